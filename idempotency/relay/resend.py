"""Resend: what the broker has lost is sent again from the outbox.

A row stays unsettled until its operation has ended, so that deleting every queue loses nothing. Age says little: a long
backlog is not a lost one, and sending it again would only make it longer. So a row is looked at once it must have left
its queue: the queue is empty, or a marker that was sent behind the row has reached a worker. If it has left no trace
then, and no consumer holds it, it is lost. So a pass costs what has left its queue, and never what waits in it.

Where queues are not first in, first out (Redis), messages are counted instead: no queue is sent more than it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from celery import Celery
from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from ..application import runtime_of
from ..attempt.runtime import Runtime
from ..broker.channel import Seen
from ..broker.publisher import Publisher
from ..errors import BrokerAway
from ..observe import metrics
from ..observe.logs import log
from ..store import lost, markers, sweeps
from ..store.lost import BATCH
from ..wire.message import Message

# Seconds in which a message that has left its queue reaches a worker, which then says that it holds it.
GRACE = 5.0
# Quorum queues hand out two classes, up to priority 4 and above, each first in, first out; a marker for each.
PRIORITIES = (0, 9)


@dataclass(frozen=True, slots=True)
class Resent:
    """What one pass did: rows whose operation has ended, and operations sent again."""

    settled: int
    resent: int


def resend_lost(
    app: Celery, depth: Callable[[str], int] | None = None, *, publisher: Publisher | None = None
) -> Resent:
    """Settle what has ended, and send again what the broker has lost. Any number at once.

    Nothing is sent again while the broker is away. `publisher` is used where one is open already. `depth` tells how
    many messages are ready in a queue of a broker that is not first in, first out.
    """
    runtime = runtime_of(app)
    with runtime.autocommit() as connection:
        settled = lost.settle(connection)
        if depth is not None:
            return _counted(app, runtime, connection, depth, settled)
        own = publisher or Publisher(app, confirm_timeout=10.0)
        try:
            if own.is_fifo():
                found, resent = _send_what_is_lost(runtime, connection, own)
                return Resent(settled + found, resent)
            return _counted(app, runtime, connection, own.depth, settled)
        except BrokerAway as error:
            log.warning("broker_unavailable", error=str(error))
            return Resent(settled, 0)
        finally:
            if publisher is None:
                own.close()


# ---------------------------------------------------------------- first in, first out


def _send_what_is_lost(runtime: Runtime, connection: Connection, publisher: Publisher) -> tuple[int, int]:
    """How many rows turned out to be settled, and how many operations were sent again."""
    settings = runtime.settings
    after = settings.resend_after
    settled = resent = 0
    for queue in lost.queues(connection, after=after):
        # before the look, so that an empty queue held none of what was published until then
        times = markers.times(connection, queue, after=after, grace=GRACE, classes=len(PRIORITIES))
        seen = publisher.look(queue)
        if seen is None:
            continue
        left = times.marked if seen.ready else times.before_grace
        if left is not None:
            found, ended = lost.look(connection, queue, min(left, times.overdue), after, settings.service)
            settled += ended
            resent += _resend(runtime, _not_held(publisher, queue, seen, found))
        if seen.ready and seen.consumers:
            _mark(connection, publisher, queue, times, pause=settings.sweep / 2)
    return settled, resent


def _not_held(publisher: Publisher, queue: str, seen: Seen, rows: list[Row[Any]]) -> list[Row[Any]]:
    """What no consumer holds: a delivery that waits for a free slot is not lost."""
    if not rows or not seen.consumers:
        return rows
    tasks = {row.id: _task_id(row.message) for row in rows}
    held = publisher.held(queue, seen.consumers, list(tasks.values()))
    if held is None:
        log.warning("consumers_silent", queue=queue, consumers=seen.consumers, operations=len(rows))
        return [row for row in rows if row.old]
    return [row for row in rows if tasks[row.id] not in held]


def _task_id(message: str) -> str:
    try:
        return str(Message.from_text(message).headers.get("id"))
    except ValueError:
        return ""  # no worker holds what is no message


def _mark(connection: Connection, publisher: Publisher, queue: str, times: Row[Any], *, pause: float) -> None:
    for priority in PRIORITIES:
        id = str(uuid4())
        if markers.mark(connection, id, queue, priority=priority, pause=pause, times=times):
            publisher.mark(queue, id, priority=priority)
    if times.marked is not None:
        markers.forget(connection, queue, times.marked)


# ---------------------------------------------------------------- counted


def _counted(
    app: Celery, runtime: Runtime, connection: Connection, depth: Callable[[str], int], settled: int
) -> Resent:
    return Resent(settled + lost.settle_any(connection), _send_what_lacks(app, runtime, connection, depth))


def _send_what_lacks(app: Celery, runtime: Runtime, connection: Connection, depth: Callable[[str], int]) -> int:
    waiting: dict[str, list[Row[Any]]] = {}
    after = runtime.settings.resend_after
    lost.refuse_any(connection, runtime.settings.service, after=after)
    for row in lost.waiting(connection, after=after):
        waiting.setdefault(row.queue or _routed(app, row.task), []).append(row)
    total = 0
    for queue, rows in waiting.items():
        overdue = [row for row in rows if row.overdue]
        if not overdue:
            continue
        try:
            lacking = len(rows) - depth(queue)
        except BrokerAway:
            break
        total += _resend(runtime, overdue[: max(lacking, 0)])
    return total


# ---------------------------------------------------------------- both


def _resend(runtime: Runtime, rows: Sequence[Row[Any]]) -> int:
    total = 0
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        try:
            total += _send_again(runtime, batch)
        except DBAPIError as error:
            if not sweeps.is_of_a_row(error):
                raise
            with runtime.autocommit() as connection:
                total += lost.one_by_one(connection, batch, lambda row: _send_again(runtime, [row]))
    if total:
        metrics.resent.inc(total)
        log.warning("resent", operations=total)
    return total


def _send_again(runtime: Runtime, rows: Sequence[Row[Any]]) -> int:
    with runtime.engine.begin() as connection:  # with their lanes: a row without one is never published
        return lost.send_again(connection, rows)


def _routed(app: Celery, task: str) -> str:
    queue = app.amqp.router.route({}, task).get("queue")
    return str(getattr(queue, "name", queue or app.conf.task_default_queue))
