"""A message that decides nothing now is published again: nothing else would bring it back, as the outbox does for Postgres.

The copy is confirmed by the broker, where it does that, before the message itself is acknowledged. If it is not taken, or the
worker stops, the message goes back to its queue.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Task
from celery.exceptions import Reject, Retry

from ..errors import OperationBusy, SettingsError
from ..observe import metrics
from ..observe.logs import log
from ..store.statements import describe
from ..stores.store import StoreAway, Watch
from ..wire.delivery import Delivery
from ..wire.headers import (
    FINGERPRINT_HEADER,
    KEY_HEADER,
    SEEN_HEADER,
    SERVICE_HEADER,
    TENANT_HEADER,
    UNANSWERED_HEADER,
    VERSION_HEADER,
    WAITS_HEADER,
    harmless_headers,
)
from ..wire.message import Message
from . import signed_calls
from .keyed import shown
from .waiting import GLANCE, is_stopping

if TYPE_CHECKING:
    from .deduplicated import DeduplicatedTask

# Seconds before a message goes back to its queue because its copy was not taken: the broker counts how often that happens.
REJECT_PAUSE = 1.0
# Of ours, the headers that every copy of a message has.
_KEPT = (FINGERPRINT_HEADER, VERSION_HEADER, SERVICE_HEADER)


@dataclass(frozen=True, slots=True)
class Later:
    """This delivery decides nothing: its message has to come again after `pause` seconds. `seen`, `unanswered`: see `Watch`."""

    pause: float
    why: str
    seen: str = ""
    unanswered: str = ""


def watch_for(delivery: Delivery, patience: float) -> Watch:
    """What this message's earlier deliveries have learnt, for its claim."""
    seen, unanswered = (str(delivery.headers.get(name, "")) for name in (SEEN_HEADER, UNANSWERED_HEADER))
    return Watch(seen, rest, patience, unanswered)


def pause_for(delivery: Delivery, lease: float, due_in: float | None, seen: str) -> float:
    """Seconds until a message comes back whose operation another attempt has: 1, 2, 4, … up to half a lease."""
    if due_in is not None:
        return due_in
    # longer than a heartbeat: a holder that lives has changed what was seen
    return lease / 2 if seen else min(2.0 ** _waits(delivery), lease / 2)


def cell_unknown(task: DeduplicatedTask, delivery: Delivery, pause: float) -> Later | None:
    """That this message has to come again, because it cannot be told which cell its tenant is of. Raises `WrongCell`."""
    try:
        task.check_cell(delivery.id)
    except SettingsError as error:
        if delivery.is_eager:
            raise
        return Later(pause, describe(error))
    return None


def rest(seconds: float) -> None:
    """Sleep, unless the worker is told to stop meanwhile. Raises `StoreAway`."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if is_stopping():
            raise StoreAway("the worker stops")
        time.sleep(min(left, GLANCE))


def put_off(task: DeduplicatedTask, delivery: Delivery, later: Later) -> BaseException:
    """Publish this message again, without counting an attempt. Returns what to raise to Celery."""
    metrics.put_back.labels(task.name, "queue" if is_stopping() else "copy").inc()
    log.info("put_off", task=task.name, key=delivery.id.key, why=later.why, pause=round(later.pause, 3))
    if is_stopping():
        stops: BaseException = Reject("the worker stops", requeue=True)
        return stops
    told = {SEEN_HEADER: later.seen, UNANSWERED_HEADER: later.unanswered}
    marks = {WAITS_HEADER: _waits(delivery) + 1} | {name: value for name, value in told.items() if value}
    retry: BaseException = Retry(exc=OperationBusy(later.why), when=later.pause)
    return _published(task, delivery, later.pause, task.request.retries, marks) or retry


def retried(task: DeduplicatedTask, delivery: Delivery, retry: Retry) -> BaseException:
    """Publish this message again, for the next attempt. Returns what to raise to Celery."""
    again: BaseException = retry
    if delivery.is_eager:
        return again
    delay = float(retry.when) if isinstance(retry.when, int | float) else 0.0
    return _published(task, delivery, delay, task.request.retries + 1, {}) or again


def _published(
    task: DeduplicatedTask, delivery: Delivery, delay: float, retries: int, marks: Mapping[str, Any]
) -> BaseException | None:
    """Publish a copy, to come after `delay` seconds. Returns what to raise instead if it was not taken."""
    id = delivery.id
    kept = {name: delivery.headers[name] for name in _KEPT if name in delivery.headers}
    headers = {**harmless_headers(delivery.headers), **kept, KEY_HEADER: id.key, TENANT_HEADER: id.tenant, **marks}
    try:
        # By its queue: a broker's delay has added itself to the routing key. That delay counts whole seconds.
        queue = Message.delivered(task.request).queue(task.app)
        copy = task.signature_from_request(
            task.request,
            queue=queue if queue in task.app.amqp.queues else None,
            headers=headers,
            countdown=math.ceil(max(delay, 0.0)),
            retries=retries,
        )
        with signed_calls.signing(task._settings):
            Task.apply_async(task, copy.args, copy.kwargs, **{**copy.options, **shown(id)})
    except Exception as error:
        log.error("not_put_off", task=task.name, key=id.key, error=type(error).__name__)
        with suppress(SoftTimeLimitExceeded):  # past it, Celery would acknowledge
            time.sleep(REJECT_PAUSE)
        refused: BaseException = Reject("its copy was not published", requeue=True)
        return refused
    return None


def _waits(delivery: Delivery) -> int:
    waits = delivery.headers.get(WAITS_HEADER, 0)
    return min(waits, 60) if isinstance(waits, int) and waits > 0 else 0
