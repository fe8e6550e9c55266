"""Safeguards that a search can do without: each is taken away in this process, in the style of `tests/controls`.

Name, and how its removal changes the library's statements or functions. Where the database holds a rule as well, its
trigger rests meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from idempotency.attempt import conclusions, effects
from idempotency.store import ends, undelivered
from idempotency.store.answers import Claimed
from idempotency.store.ends import FailedEnd
from idempotency.wire.message import Message
from tests.controls.safeguards import Removal, fence
from tests.search.world import World


def own_ending(removal: Removal) -> None:
    """An ending is applied by whichever attempt has the claim."""
    removal.set(Claimed, "resumes", lambda self, earlier: True)


def verdict(removal: Removal) -> None:
    """An operation ends with the error that ended it, whatever has happened outside."""
    removal.set(conclusions, "_verdict", lambda entries, error: (error, []))
    for code in ("effect_unknown", "unfinished"):
        removal.edit(undelivered, f"THEN '{code}'", "THEN excluded.error_code", only="_GIVE_UP")


def refused_repeat(removal: Removal) -> None:
    """The refusal of a repeated call is believed as if it answered the first."""

    def believe(attempt: Any, call: Any, refusal: Exception) -> Any:
        effects._change(attempt, call.name, {"state": "not_happened"})
        raise refusal

    removal.set(effects, "_after_refused_repeat", believe)


def undos(removal: Removal) -> None:
    """A step is forgotten, and its undo is not run."""
    removal.set(conclusions, "_undo_all", lambda session, undos: None)


def forgotten_steps(removal: Removal) -> None:
    """A step that was undone stays recorded."""
    removal.set(conclusions, "FailedEnd", lambda code, error, _, changed: FailedEnd(code, error, (), changed))


def elsewhere(removal: Removal) -> None:
    """A dead copy ends its operation although something else will deliver it."""
    removal.edit(undelivered, undelivered._elsewhere(), "false")


def generation(removal: Removal) -> None:
    """A dead copy may be of an earlier generation than what it ends."""
    removal.edit(undelivered, "(%(generation)s::int IS NULL OR r.generation = %(generation)s::int)", "true")


def eager_route(removal: Removal) -> None:
    """The record of an eager call keeps a message that has no queue."""
    removal.set(Message, "routed", lambda self, *args: self)


def eager_delivery(removal: Removal) -> None:
    """An eager attempt is released without a next delivery."""
    release = ends.release
    removal.set(
        ends,
        "release",
        lambda *args, after_due=0.0, **options: release(*args, **options | ({"deliver": False} if after_due else {})),
    )


def told_again(removal: Removal) -> None:
    """`on_failed` is told of an operation's first failure only, not of a replay's."""
    conclude = conclusions.conclude

    def once(connection: Any, *args: Any, on_failed: Any, **options: Any) -> Any:
        (generation,) = connection.exec_driver_sql("SELECT generation FROM idempotency.records").one()
        return conclude(connection, *args, on_failed=on_failed if generation == 1 else None, **options)

    removal.set(conclusions, "conclude", once)


SAFEGUARDS: dict[str, Callable[[Removal], None]] = {
    removal.__name__: removal
    for removal in (
        fence,
        own_ending,
        verdict,
        refused_repeat,
        undos,
        forgotten_steps,
        elsewhere,
        generation,
        eager_route,
        eager_delivery,
        told_again,
    )
}


@contextmanager
def without(world: World, *names: str) -> Iterator[None]:
    """Search without these safeguards."""
    removal = Removal()
    try:
        for name in names:
            SAFEGUARDS[name](removal)
        if names:
            world.admin.execute("ALTER TABLE idempotency.records DISABLE TRIGGER check_record")
        yield
    finally:
        world.admin.execute("ALTER TABLE idempotency.records ENABLE TRIGGER check_record")
        removal.undo()
