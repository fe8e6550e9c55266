"""Seek: move a stream's position to where a person wants it."""

from __future__ import annotations

from celery import Celery

from ..application import runtime_of
from ..errors import ChangeRefused, OperationNotFound
from ..store import streams
from ..store.streams import Place
from .change import Change, audit, repeated


def seek_stream(
    app: Celery, consumer: str, topic: str, partition: int, to: int, change: Change, *, take: bool = False
) -> int | None:
    """Let a consumer go on from the offset `to` of one partition. Returns where it was; None: it had not begun.

    Messages that come again are known by their keys, for as long as their records are kept; those that are passed over are not
    handled. `take`: also from a process that has the partition, whose commit then matches nothing; it reads again from there.
    Raises `OperationNotFound` for a partition that no process has ever had, and `ChangeRefused` for one that a process has.
    """
    runtime = runtime_of(app)
    place = Place(runtime.settings.service, consumer, topic, partition)
    said = {"consumer": consumer, "topic": topic, "partition": partition, "to": to}
    if to < 0:
        raise ChangeRefused(f"--to: an offset is at least 0, got {to}")
    with runtime.engine.begin() as connection:
        if repeated(connection, change, "seek_stream", None, said=said) is not None:
            return to
        row = streams.lock(connection, place)
        if row is None:
            raise OperationNotFound(f"stream {consumer}: no process of {place.service!r} has ever had {place}")
        if row.is_owned and not take:
            raise ChangeRefused(
                f"stream {consumer}: {place} is being handled; stop its processes, or take it from them with --take"
            )
        fence = streams.seek(connection, place, to)
        before: int | None = row.position
        details = said | {
            "from": before,
            "taken_from": row.owner if row.is_owned else None,
            "fence": [row.fence, fence],
        }
        audit(connection, change, "seek_stream", None, None, details=details)
    return before
