"""Rename: give what an application had under its old name to the one that has its tasks and queues now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery import Celery

from ..application import runtime_of
from ..broker.channel import BrokerChannel
from ..errors import BrokerUnavailable, ChangeRefused
from ..framework import framework
from ..queues import forwarded_dead_letters
from ..store import renaming
from ..store.statements import repeatable
from .change import Change, audit, refused_by_constraint
from .money import check_verified_for

# Seconds to wait for what the broker says.
BROKER_TIMEOUT = 5.0


def rename_service(app: Celery, old: str, new: str, change: Change) -> dict[str, int]:
    """Give what is stored for the application `old` (`renaming.TABLES`) to this one, which is called `new`.

    Returns how many of each. Many short transactions, each with its audit row: if it is interrupted, repeat it. Raises
    `NotAuthenticated` if a task of theirs moves money and the person is not verified, and `ChangeRefused` while a process of
    `old` is running, since it would go on to write under that name, while the broker says that others have forwarded dead
    messages to it, if the rows of a tenant that has moved to another cell are still here, and unless `new` is this
    application's name. A web server is known by its requests only.
    """
    runtime = runtime_of(app)
    settings = runtime.settings
    if new != settings.service or old == new:
        raise ChangeRefused(f"NEW: must be this application's name, {settings.service!r}, and OLD another; got {new!r}")
    check_verified_for(app, old, change)
    _check_nothing_forwarded(app, old)
    renamed, tables = dict.fromkeys(renaming.TABLES, 0), list(renaming.TABLES)
    after: Sequence[Any] | None = None

    @repeatable
    def rename_page() -> tuple[int, Sequence[Any] | None]:
        with runtime.engine.begin() as connection:
            if running := renaming.alive(connection, old, silence=settings.alarm_silence):
                names = ", ".join(f"{process.kind} {process.name}" for process in running)
                raise ChangeRefused(f"{old}: is running ({names}); stop its processes first")
            # once for a table, which is read for it: a web server gives no sign of life but its answers
            if after is None and renaming.has_answered(connection, old, silence=settings.alarm_silence):
                raise ChangeRefused(
                    f"{old}: has carried out requests over HTTP within the last {settings.alarm_silence:g} s; "
                    "stop its web servers, and wait as long"
                )
            with refused_by_constraint(
                old, "if that is of a tenant that has moved to another cell, delete its rows first"
            ):
                rows, last = renaming.rename(connection, tables[0], old, new, after=after)
            if last is None and len(tables) == 1:
                renaming.signal_again(connection, new)
                renaming.rename_alarms(connection, old, new)
            if rows:
                details = {"old": old, "new": new, "table": tables[0], "rows": rows}
                audit(connection, change, "rename_service", None, None, details=details)
        return rows, last

    while tables:
        rows, after = rename_page()
        renamed[tables[0]] += rows
        if after is None:
            tables.pop(0)
    return renamed


def _check_nothing_forwarded(app: Celery, old: str) -> None:
    """Raise `ChangeRefused` if dead messages wait, or may, where only a relay of `old` takes them."""
    queue, channel = forwarded_dead_letters(old), BrokerChannel(app, timeout=BROKER_TIMEOUT)
    try:
        found = channel.in_queue(queue)
    except BrokerUnavailable as error:
        raise ChangeRefused(f"{old}: the broker cannot say whether {queue} is empty: {error}") from None
    finally:
        channel.close()
    if found is not None and found.ready:
        raise ChangeRefused(
            f"{old}: the queue {queue} has dead messages ({found.ready}), which nothing takes under another name; first run "
            f"`{framework().command} dead-letters consume --once` under the old one, and delete the queue"
        )
