"""Resend: messages that the broker has lost are sent again from the outbox.

A row stays unsettled until its operation has ended, so deleting every queue loses nothing. Age proves little: a long
backlog is not lost, and resending it would only make it longer. So a row is examined once it must have left its queue:
the queue is empty, or a marker sent after the row has reached a worker. If the row has left no trace by then and no
consumer holds it, it is lost. The cost of a pass therefore depends on what has left the queues, not on their backlog.

If queues are not first in, first out (Redis), messages are counted instead: a queue is resent at most what it lacks.
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
from ..broker.publisher import CONFIRM_TIMEOUT, Publisher
from ..errors import BrokerUnavailable
from ..observe import metrics
from ..observe.logs import log
from ..store import lost, markers, sweeps
from ..store.adoption import adopt
from ..store.lost import BATCH
from ..wire.message import Message
from ..worker.task import idempotent_tasks

# How long a message may take from its queue to a worker that reports holding it, in seconds.
GRACE = 5.0
# Quorum queues have two priority classes, up to 4 and above, each first in, first out; each needs its own marker.
PRIORITIES = (0, 9)


@dataclass(frozen=True, slots=True)
class Resent:
    """The result of one pass: rows settled because their operation has ended, and operations resent."""

    settled: int
    resent: int


def resend_lost(
    app: Celery, depth: Callable[[str], int] | None = None, *, publisher: Publisher | None = None
) -> Resent:
    """Settle what has ended, and resend what the broker has lost of this application. Safe to run concurrently.

    Nothing is resent while the broker is unavailable. Pass a `publisher` to reuse its connection. `depth` returns the
    number of ready messages in a queue, for a broker whose queues are not first in, first out.
    """
    runtime = runtime_of(app)
    with runtime.autocommit() as connection:
        tasks = [task.name for task in idempotent_tasks(app)]
        adopt(connection, runtime.settings.service, tasks, app.amqp.queues)
        settled = lost.settle(connection)
        if depth is not None:
            return _resend_by_count(runtime, connection, depth, settled)
        own = publisher or Publisher(app, confirm_timeout=CONFIRM_TIMEOUT, secrets=runtime.settings.message_secrets)
        try:
            if own.is_fifo():
                found, resent = _resend_fifo(app, runtime, connection, own)
                return Resent(settled + found, resent)
            return _resend_by_count(runtime, connection, lambda queue: _ready(own, queue), settled)
        except BrokerUnavailable as error:
            log.warning("broker_unavailable", error=str(error))
            return Resent(settled, 0)
        finally:
            if publisher is None:
                own.close()


# ---------------------------------------------------------------- first in, first out


def _resend_fifo(app: Celery, runtime: Runtime, connection: Connection, publisher: Publisher) -> tuple[int, int]:
    """Returns how many rows were settled and how many operations were resent."""
    settings = runtime.settings
    after = settings.resend_after
    settled = resent = 0
    queues = lost.queues(connection, settings.service, app.amqp.queues, after=after)
    for queue in publisher.silent.in_turn(queues):
        # before looking at the queue: if it is empty then, it holds nothing published up to here
        times = markers.cutoffs(connection, queue, after=after, grace=GRACE, classes=len(PRIORITIES))
        waiting = publisher.in_queue(queue)  # one that is silent ends this pass; the next one leaves it out
        if waiting is None:
            continue
        left = times.marked if waiting.ready else times.before_grace
        if left is not None:
            found, ended = lost.judge(connection, queue, min(left, times.overdue), after, settings.service)
            settled += ended
            resent += _resend(runtime, _not_held(publisher, queue, waiting.consumers, found))
        if waiting.ready and waiting.consumers and queue not in publisher.unconfirming:
            _mark(connection, publisher, queue, times, pause=settings.sweep / 2)
    return settled, resent


def _not_held(publisher: Publisher, queue: str, consumers: int, rows: list[Row[Any]]) -> list[Row[Any]]:
    """The rows that no consumer holds: a delivery waiting for a free slot is not lost.

    With remote control off, none can be asked. Then what they hold is sent once more; the record answers it.
    """
    if not rows or not consumers or not publisher.may_ask_workers:
        return rows
    tasks = {row.id: _task_id(row.message) for row in rows}
    held = publisher.held(queue, consumers, list(tasks.values()))
    if held is None:
        log.warning("consumers_silent", queue=queue, consumers=consumers, operations=len(rows))
        return [row for row in rows if row.old]
    return [row for row in rows if tasks[row.id] not in held]


def _task_id(message: str) -> str:
    try:
        return str(Message.from_text(message).headers.get("id"))
    except ValueError:
        return ""  # no worker can hold it


def _mark(connection: Connection, publisher: Publisher, queue: str, times: Row[Any], *, pause: float) -> None:
    for priority in PRIORITIES:
        id = str(uuid4())
        if markers.mark(connection, id, queue, priority=priority, pause=pause, times=times):
            publisher.mark(queue, id, priority=priority)
    if times.marked is not None:
        markers.forget(connection, queue, times.marked)


# ---------------------------------------------------------------- counted


def _resend_by_count(runtime: Runtime, connection: Connection, depth: Callable[[str], int], settled: int) -> Resent:
    settled += lost.settle_any(connection, runtime.settings.service)
    return Resent(settled, _resend_missing(runtime, connection, depth))


def _ready(publisher: Publisher, queue: str) -> int:
    found = publisher.in_queue(queue)
    if found is None:
        raise BrokerUnavailable(f"queue {queue}: the broker cannot say what is in it")
    return found.ready


def _resend_missing(runtime: Runtime, connection: Connection, depth: Callable[[str], int]) -> int:
    waiting: dict[str, list[Row[Any]]] = {}
    after, service = runtime.settings.resend_after, runtime.settings.service
    lost.refuse_any(connection, service, after=after)
    for row in lost.waiting(connection, service, after=after):
        if row.queue:  # what an exchange was given that no queue of ours is bound to is in none that could be counted
            waiting.setdefault(row.queue, []).append(row)
    total = 0
    for queue, rows in waiting.items():
        overdue = [row for row in rows if row.overdue]
        if not overdue:
            continue
        try:
            missing = len(rows) - depth(queue)
        except BrokerUnavailable:
            break
        total += _resend(runtime, overdue[: max(missing, 0)])
    return total


# ---------------------------------------------------------------- both


def _resend(runtime: Runtime, rows: Sequence[Row[Any]]) -> int:
    total = 0
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        try:
            total += _send_again(runtime, batch)
        except DBAPIError as error:
            if not sweeps.is_row_error(error):
                raise
            with runtime.autocommit() as connection:
                total += lost.one_by_one(connection, batch, lambda row: _send_again(runtime, [row]))
    if total:
        metrics.resent.inc(total)
        log.warning("resent", operations=total)
    return total


def _send_again(runtime: Runtime, rows: Sequence[Row[Any]]) -> int:
    with runtime.engine.begin() as connection:  # together with their lanes: a row without a lane is never published
        return lost.send_again(connection, rows)
