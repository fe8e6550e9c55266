"""From an event to its deliveries: one task writes a row for each endpoint that wants it, another one delivers each.

A delivery is one operation. It is completed when an endpoint has accepted it, and when it was given up; both are in
`webhook_deliveries`. Each attempt is recorded before the POST: one without an answer means that its process died, and
the next one repeats it under the same id.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from http import HTTPStatus
from typing import Any

from celery import Celery, current_app
from sqlalchemy.orm import Session

from ..application import runtime_of
from ..attempt.endings import Throttled
from ..attempt.runtime import Runtime
from ..errors import Again, PermanentError
from ..events import subscribe
from ..observe import metrics
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..observe.traces import Span
from ..providers import ProviderContract
from ..store import webhooks as stored
from ..wire.delivery import Operation
from ..worker.task import IdempotentTask
from .posting import RESOLVE_TIMEOUT, Answer, Sender
from .signing import signed

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
# Seconds until the next attempt, after each one that failed: more than three days in all, so that a weekend is survived.
PAUSES = (5.0, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 5 * HOUR, 10 * HOUR, 14 * HOUR, 20 * HOUR, 24 * HOUR)
ATTEMPTS = len(PAUSES) + 1
# Of a pause, so that what failed together does not come back together.
JITTER = 0.2
# The longest pause that an endpoint may ask for by Retry-After.
LONGEST_PAUSE = DAY
# An endpoint has a few attempts at a time, one that fails a single one; the others wait about so long, and hold no worker.
BUSY_PAUSE = 30.0
# Of the operation: attempts of a delivery are counted by their rows, and what dies before it has one uses up these.
MAX_ATTEMPTS = 100
# A repeated webhook has the same id, which receivers are told to look at, however late it comes.
RECEIVER = ProviderContract("webhook receivers", 365 * DAY, keeps_refusals=True, compares_body=False)


class NotAccepted(Exception):
    """An endpoint has not accepted a webhook; the next attempt comes later."""


def send_webhooks(
    *patterns: str, app: Celery | None = None, consumer: str = "webhooks", having: Sequence[str] = (), **options: Any
) -> Any:
    """Send events to the endpoints that the customers have registered for them: `send_webhooks("order.*", app=app)`.

    Call it once, in a module of the application's `include`. It makes two tasks, `webhooks.fan_out` and
    `webhooks.deliver`, named by `consumer`; `options` are those of `@app.task`, for both. `patterns` and `having` are as
    for `subscribe`. An event's tenant says whose endpoints get it. Returns the task that delivers. Raises as `subscribe` does.
    """
    application = app or current_app._get_current_object()

    def fan_out(self: IdempotentTask, event: dict[str, Any]) -> int:
        """One delivery for each endpoint that wants the event. Returns how many."""
        return _fan_out(self, event, deliver)

    def deliver_once(self: IdempotentTask, delivery_id: str, redelivery: int = 0) -> dict[str, Any]:
        """Post a delivery until it is accepted or given up."""
        return _deliver(self, delivery_id, redelivery)

    subscribe(*patterns, consumer=consumer, having=having, app=application, **options)(fan_out)
    deliver = application.task(
        base=IdempotentTask,
        bind=True,
        name=f"{consumer}.deliver",
        shared=False,
        key="{delivery_id}:{redelivery}",
        max_attempts=MAX_ATTEMPTS,
        provider=RECEIVER,
        on_failed=delivery_failed,
        **options,
    )(deliver_once)
    return deliver


def delivery_id(event_id: str, endpoint_id: str) -> str:
    """The id of a delivery, which is its `webhook-id` in every attempt."""
    return "msg_" + hashlib.sha256(f"{event_id}:{endpoint_id}".encode()).hexdigest()[:32]


def delivery_failed(session: Session, operation: Operation, error: PermanentError) -> None:
    """The operation has ended otherwise than by an answer: its processes died, or a person has cancelled it."""
    arguments = operation.arguments
    stored.give_up(session.connection(), arguments["delivery_id"], arguments["redelivery"], error.code)


def _fan_out(task: IdempotentTask, event: dict[str, Any], deliver: Any) -> int:
    service = runtime_of(task.app).settings.service
    connection = task.session.connection()
    body = json.dumps({"type": event["type"], "timestamp": event["time"], "data": event["data"]}, separators=(",", ":"))
    wanted = [
        each.id
        for each in stored.open_endpoints(connection, service, task.tenant)
        if any(fnmatchcase(event["type"], pattern) for pattern in each.events)
    ]
    for endpoint in wanted:
        id = delivery_id(event["id"], endpoint)
        stored.add_delivery(
            connection,
            id,
            tenant=task.tenant,
            service=service,
            endpoint=endpoint,
            task=deliver.name,
            event_type=event["type"],
            body=body,
        )
        deliver.enqueue(task.session, delivery_id=id, redelivery=0, tenant=task.tenant)
    return len(wanted)


def _deliver(task: IdempotentTask, delivery_id: str, redelivery: int) -> dict[str, Any]:
    runtime = runtime_of(task.app)
    outcome = task.effect("post", partial(_attempt, runtime, task.tenant), delivery_id, redelivery)
    connection = task.session.connection()
    if outcome["given_up"] is None:
        stored.delivered(connection, delivery_id, redelivery)
        return outcome
    stored.give_up(connection, delivery_id, redelivery, outcome["given_up"])
    if outcome["given_up"] not in (stored.NO_ENDPOINT, stored.ERASED):
        settings = runtime.settings
        endpoint = stored.count_given_up(
            connection,
            delivery_id,
            is_gone=outcome["given_up"] == stored.GONE,
            most=settings.webhook_failed_deliveries,
            failing_for=settings.webhook_failing_for,
        )
        if endpoint is not None and endpoint.disabled_because is not None:
            log.error("webhook_endpoint_disabled", endpoint=endpoint.id, reason=endpoint.disabled_because)
    log.warning("webhook_given_up", delivery=delivery_id, reason=outcome["given_up"])
    return outcome


def _attempt(
    runtime: Runtime, tenant: str, delivery_id: str, redelivery: int, *, idempotency_key: str
) -> dict[str, Any]:
    """Record an attempt, make it, and record the answer. Returns what ends the delivery; raises `Again` if nothing does."""
    sender = Sender.of(runtime.settings)
    with runtime.transaction(tenant) as connection:
        begun = stored.begin_attempt(
            connection, delivery_id, redelivery, most=ATTEMPTS, longest=sender.timeout + 2 * RESOLVE_TIMEOUT
        )
    if isinstance(begun, stored.NotBegun):
        if begun.because is None:
            raise Throttled(BUSY_PAUSE * random.uniform(0.5, 1.5), "other attempts at this endpoint are under way")
        return {"given_up": begun.because}
    crash_point("webhook.recorded")
    with _post_span(runtime) as span:
        answer = sender.post(begun.url, signed(delivery_id, begun.body, begun.secrets, datetime.now(UTC)), begun.body)
        if span is not None:
            _note_answer(span, answer, begun.number)
    crash_point("webhook.posted")
    with runtime.transaction(tenant) as connection:
        stored.end_attempt(
            connection,
            begun.attempt,
            status=answer.status,
            error=answer.failure,
            milliseconds=answer.milliseconds,
            is_accepted=answer.is_accepted,
        )
    metrics.webhooks.labels(answer.failure or f"{str(answer.status)[0]}xx").inc()
    if answer.is_accepted:
        return {"given_up": None, "attempts": begun.number}
    if answer.status == HTTPStatus.GONE:
        return {"given_up": stored.GONE, "attempts": begun.number}
    if begun.number >= ATTEMPTS:
        return {"given_up": stored.EXHAUSTED, "attempts": begun.number}
    raise Again(_pause(begun.number, answer), NotAccepted(f"attempt {begun.number} of {ATTEMPTS}: {answer}"))


def _post_span(runtime: Runtime) -> AbstractContextManager[Span | None]:
    """The span of a POST. Its address is a customer's and may have a secret in it, so the span does not say it.

    Nor does the request have our trace: its receiver is a stranger.
    """
    if runtime.traces is None:
        return nullcontext()
    return runtime.traces.span("POST", "client", attributes={"http.request.method": "POST"})


def _note_answer(span: Span, answer: Answer, number: int) -> None:
    span.note({"http.request.resend_count": number - 1})
    if answer.status is not None:
        span.note({"http.response.status_code": answer.status})
    if not answer.is_accepted:
        span.fail(answer.failure or str(answer.status))


def _pause(number: int, answer: Answer) -> float:
    """Seconds until the next attempt."""
    pause = PAUSES[number - 1] * random.uniform(1 - JITTER, 1 + JITTER)
    return max(pause, min(answer.retry_after or 0.0, LONGEST_PAUSE))
