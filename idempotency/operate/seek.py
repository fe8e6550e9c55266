"""Seek: move a stream's position to where a person wants it."""

from __future__ import annotations

from celery import Celery
from sqlalchemy import Connection

from ..application import runtime_of
from ..errors import ChangeRefused, NotAuthenticated, OperationNotFound
from ..store import streams
from ..store.streams import Place
from .change import Change, audit, repeated
from .money import NEEDS_TOKEN, stream_moves_money


def needs_token(app: Celery, connection: Connection, place: Place, to: int) -> bool:
    """Whether a person has to prove who they are: on the way back in a stream that moves money, which may be handled again.

    Forwards, nothing is moved, only left out.
    """
    row = streams.lock(connection, place)
    is_back = row is not None and row.position is not None and to < row.position
    return is_back and stream_moves_money(app, place.consumer)


def seek_stream(
    app: Celery, consumer: str, topic: str, partition: int, to: int, change: Change, *, take: bool = False
) -> int | None:
    """Let a consumer go on from the offset `to` of one partition. Returns where it was; None: it had not begun.

    Messages that come again are known by their keys, for as long as their records are kept; those that are passed over are not
    handled. `take`: also from a process that has the partition, whose commit then matches nothing; it reads again from there.
    Raises `OperationNotFound` for a partition that no process has ever had, `ChangeRefused` for one that a process has, and
    `NotAuthenticated` for a way back in a stream that moves money, by a person who has not proved who they are.
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
        if not change.is_verified and needs_token(app, connection, place, to):
            raise NotAuthenticated(f"stream {consumer}: {NEEDS_TOKEN}")
        fence = streams.seek(connection, place, to)
        before: int | None = row.position
        details = said | {
            "from": before,
            "taken_from": row.owner if row.is_owned else None,
            "fence": [row.fence, fence],
        }
        audit(connection, change, "seek_stream", None, None, details=details)
    return before
