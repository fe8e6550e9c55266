"""The safeguards, and how each is taken away: here and nowhere in the library.

Every removal changes the library's own statements or methods in this process. One that finds nothing to change raises
`NothingToRemove`: a control whose safeguard has moved must not appear to work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from idempotency.attempt import hints
from idempotency.attempt.hints import Hint
from idempotency.broker import publisher
from idempotency.broker.channel import BrokerChannel
from idempotency.store import claims, effects, ends, operations, outbox, undelivered


class NothingToRemove(Exception):
    """The library has changed, and this removal does not remove anything any more."""


class Removal:
    """What was changed in this process, and how it was before."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Put a value in the place of an attribute, which must exist."""
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def edit(self, module: ModuleType, old: str, new: str, *, only: str | None = None) -> None:
        """Replace a piece of text in a module's statements: in all of them, or in one."""
        names = [only] if only is not None else [name for name, value in vars(module).items() if isinstance(value, str)]
        found = [name for name in names if not name.startswith("__") and old in getattr(module, name)]
        if not found:
            raise NothingToRemove(f"{module.__name__}: no statement has {old!r}")
        for name in found:
            self.set(module, name, getattr(module, name).replace(old, new))

    def undo(self) -> None:
        """Put everything back."""
        for owner, name, value in reversed(self._before):
            setattr(owner, name, value)


def fence(removal: Removal) -> None:
    """Neither the fence nor the token is compared in any write after the claim."""
    for module in (claims, effects, ends):
        removal.edit(module, " AND fence = %(fence)s AND token = %(token)s", "")


def status(removal: Removal) -> None:
    """No write after the claim asks whether the record is still started."""
    for module in (claims, effects, ends):
        removal.edit(module, "status = 'started' AND fence = %(fence)s", "fence = %(fence)s")


def confirm(removal: Removal) -> None:
    """What was sent counts as published: no confirm is awaited."""
    connect = BrokerChannel._connect

    def connect_without(self: Any) -> Any:
        channel = connect(self)
        self._confirms = False
        return channel

    removal.set(BrokerChannel, "_connect", connect_without)


def mandatory(removal: Removal) -> None:
    """The broker may drop what it cannot route: it is not asked to send it back."""
    put_together = publisher.Publisher._put_together

    def without(self: Any, channel: Any, message: Any) -> tuple[Any, dict[str, Any]]:
        prepared, options = put_together(self, channel, message)
        return prepared, options | {"mandatory": False}

    removal.set(publisher.Publisher, "_put_together", without)


def select_by_state(removal: Removal) -> None:
    """The relay keeps a cursor: it takes the rows behind the last one that it has published."""
    removal.edit(
        outbox,
        "WHERE status = 'pending' AND available_at",
        "WHERE id > (SELECT coalesce(max(id), 0) FROM idempotency.outbox WHERE published_at IS NOT NULL)"
        " AND status = 'pending' AND available_at",
        only="_RESERVE_ROWS",
    )


def outbox_until_terminal(removal: Removal) -> None:
    """A row is settled as soon as it is published."""
    removal.edit(
        outbox,
        "published_at = clock_timestamp()",
        "published_at = clock_timestamp(), settled_at = clock_timestamp()",
        only="_MARK_PUBLISHED",
    )


def tenant(removal: Removal) -> None:
    """Records are found by operation and key alone."""
    for module in (claims, effects, ends, undelivered, operations):
        removal.edit(module, "tenant = %(tenant)s AND task", "task")


def hint_compare(removal: Removal) -> None:
    """An attempt that leaves deletes the hint in Redis, even if it is that of another one."""
    removal.edit(hints, "if value == ARGV[i + 1] or value == ARGV[i + 1] .. ' counted' then", "if value then")


def counted_mark(removal: Removal) -> None:
    """Any hint in Redis is believed, as if a duplicate had been counted."""
    take = hints.Hints.take

    def believe(self: Any, *args: Any) -> Hint:
        hint = take(self, *args)
        return Hint.COUNTED if hint is Hint.HELD else hint

    removal.set(hints.Hints, "take", believe)


def delivery_limit(removal: Removal) -> None:
    """The queue hands a message out without end. Set by the queue's arguments: see `tests.controls.app`."""


SAFEGUARDS: dict[str, Callable[[Removal], None]] = {
    "fence": fence,
    "status": status,
    "confirm": confirm,
    "mandatory": mandatory,
    "delivery_limit": delivery_limit,
    "select_by_state": select_by_state,
    "outbox_until_terminal": outbox_until_terminal,
    "tenant": tenant,
    "hint_compare": hint_compare,
    "counted_mark": counted_mark,
}


def remove(names: Iterable[str]) -> Removal:
    """Take these safeguards away in this process, until `undo()`."""
    removal = Removal()
    try:
        for name in names:
            SAFEGUARDS[name](removal)
    except BaseException:
        removal.undo()
        raise
    return removal


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Do something without these safeguards."""
    removal = remove(names)
    try:
        yield
    finally:
        removal.undo()
