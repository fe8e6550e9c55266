"""Seek: move a stream's position to where a person wants it; and forget one that is read no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Celery
from sqlalchemy import Connection

from ..application import runtime_of
from ..errors import ChangeRefused, NotAuthenticated, OperationNotFound
from ..store import stream_places, streams
from ..store.stream_places import Place
from ..streams.declaring import declared_streams
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
        if (done := repeated(connection, change, "seek_stream", None, said=said)) is not None:
            return _from(done.details)
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


def forget_position(app: Celery, consumer: str, topic: str, partition: int, change: Change) -> int | None:
    """Forget where a consumer was in a partition that it reads no more: its alarm ends. Returns where it was.

    If it is read again after all, it stops until `seek_stream` says where to go on. Raises `OperationNotFound` for one that is
    not known, `ChangeRefused` for one that a process has or that this application reads, and `NotAuthenticated` for a stream
    that moves money, by a person who has not proved who they are.
    """
    runtime = runtime_of(app)
    app.loader.import_default_modules()
    place = Place(runtime.settings.service, consumer, topic, partition)
    said = {"consumer": consumer, "topic": topic, "partition": partition}
    declared = declared_streams().get(consumer)
    with runtime.engine.begin() as connection:
        if (done := repeated(connection, change, "forget_position", None, said=said)) is not None:
            return _from(done.details)
        row = streams.lock(connection, place)
        if row is None or not row.is_shown:
            raise OperationNotFound(f"stream {consumer}: no process of {place.service!r} has ever had {place}")
        if row.is_owned:
            raise ChangeRefused(f"stream {consumer}: {place} is being handled")
        if declared is not None and declared.source.reads(topic, partition):
            raise ChangeRefused(
                f"stream {consumer}: the application reads {place}, and would stop there; `seek` moves it"
            )
        if not change.is_verified and stream_moves_money(app, consumer):
            raise NotAuthenticated(f"stream {consumer}: {NEEDS_TOKEN}")
        stream_places.forget(connection, place)
        audit(connection, change, "forget_position", None, None, details=said | {"from": row.position})
    return _from({"from": row.position})


def _from(details: Mapping[str, Any]) -> int | None:
    position: int | None = details["from"]
    return position
