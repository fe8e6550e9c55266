"""What an attempt says of itself in a trace: one span for each delivery, with those of its phases, effects and steps below it.

A delivery's span is a child of the span that enqueued its message, however late it comes, and linked to the attempt before it:
that one's span is on the record, so the next attempt finds it whatever has happened in between, a death or a replay included.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..observe.logs import log
from ..observe.traces import PARENT_HEADER, Kind, Span, Traces
from ..store import traces as stored
from ..store.answers import Busy, Claimed, Completed, Failed
from ..store.statements import is_news
from ..wire.delivery import Delivery
from ..wire.headers import ORIGIN_HEADER
from ..wire.keys import HTTP_TASK, OperationId
from .attempt import Attempt
from .batch import BatchBody
from .endings import Ended, Ending, Fail, Finished, Release
from .runtime import Runtime
from .sharing import SharingAttempt

OutcomeT = TypeVar("OutcomeT")
# Of a delivery that neither ran nor met what had: its key is another request's, or it came too late.
_REFUSED = "refused"


def traced(traces: Traces, runtime: Runtime, delivery: Delivery, work: Callable[[], OutcomeT]) -> OutcomeT:
    """Carry out a delivery under a span of its own, which says what came of it."""
    kind: Kind = "consumer" if delivery.message else "internal"
    with traces.span(_name(delivery), kind, headers=delivery.headers, attributes=attributes_of(delivery)) as span:
        outcome = work()
        _note_outcome(runtime, delivery, span, outcome)
        return outcome


def _name(delivery: Delivery) -> str:
    if delivery.message:
        return f"process {delivery.queue}"
    return "keyed request" if delivery.id.task == HTTP_TASK else "attempt"


def attributes_of(delivery: Delivery) -> dict[str, str | int | bool]:
    """What a delivery's span says from the beginning. The id of its message stays the same in all attempts; a request has none."""
    found: dict[str, str | int | bool] = {"idempotency.task": delivery.id.task}
    if delivery.message:
        found |= {
            "messaging.system": "celery",
            "messaging.operation.type": "process",
            "messaging.operation.name": "process",
            "messaging.destination.name": delivery.queue,
            "messaging.message.id": delivery.task_id,
            "idempotency.operation.id": delivery.task_id,
        }
    if isinstance(origin := delivery.headers.get(ORIGIN_HEADER), str):
        found["idempotency.origin"] = origin
    return found


class BatchSpans:
    """The spans of deliveries that run together: each is current while its body runs, and ends when all are committed."""

    def __init__(self, runtime: Runtime, deliveries: Sequence[Delivery], body: BatchBody) -> None:
        self._traces = runtime.traces
        self._deliveries = deliveries
        self._body = body
        self._spans: dict[int, Span] = {}

    def run(self, place: int, attempt: SharingAttempt) -> Any:
        """Run one body, perhaps once more. Its span is noted with its end, so that it costs no statement of its own."""
        if self._traces is None:
            return self._body(place, attempt)
        if (span := self._spans.get(place)) is None:
            delivery = self._deliveries[place]
            attributes = attributes_of(delivery) | {"messaging.batch.message_count": len(self._deliveries)}
            span = self._traces.open(_name(delivery), "consumer", headers=delivery.headers, attributes=attributes)
            self._spans[place] = span
        if span.is_recording:
            span.note(_of_claim(attempt.claim))
            attempt.trace = None if self._traces.is_without_links else span.headers().get(PARENT_HEADER)
        with span.entered():
            return self._body(place, attempt)

    def end(self, finished: Collection[int]) -> None:
        """End all. Those that are not among the finished, by their places, run alone, under another span."""
        for place, span in self._spans.items():
            span.note({"idempotency.outcome": "completed" if place in finished else "runs_alone"})
            span.end()


def note_attempt(traces: Traces, attempt: Attempt) -> None:
    """Say which attempt this delivery is, and link it to the one before."""
    claim, span = attempt.claim, traces.current()
    if not span.is_recording:
        return
    span.note(_of_claim(claim))
    own = span.headers().get(PARENT_HEADER)
    if own is not None:
        earlier = _asked(attempt.runtime, claim.id, lambda connection: stored.note(connection, claim, own))
        _link(span, earlier, "earlier_attempt")


def _of_claim(claim: Claimed) -> dict[str, str | int | bool]:
    return {
        "idempotency.attempt": claim.attempts,
        "idempotency.fence": claim.fence,
        "idempotency.generation": claim.generation,
        "idempotency.taken_over": claim.taken_over,
    }


def applied(traces: Traces, ending: Ending, attempt: Attempt) -> Finished | Ended | Release:
    """Apply an ending under a span, unless it is committed already."""
    if isinstance(ending, Finished):
        return ending
    with traces.span("fail" if isinstance(ending, Fail) else "release"):
        return ending.apply(attempt)


@contextmanager
def in_trace_of(runtime: Runtime, id: OperationId, name: str) -> Iterator[Span | None]:
    """Do something about an operation in its trace: `with in_trace_of(runtime, id, "report"): ...`.

    For what comes from outside without a trace, as a provider's webhook does, once it is known to be genuine. The span's
    parent is the operation's last attempt, and it is linked to the span that is current here. Without a trace of the operation
    it is in the current one; where nothing is traced, this does nothing.
    """
    if (traces := runtime.traces) is None:
        yield None
        return
    last = _asked(runtime, id, lambda connection: stored.last(connection, id))
    headers = {} if last is None else {PARENT_HEADER: last}
    with traces.span(name, headers=headers, is_theirs=True, attributes={"idempotency.task": id.task}) as span:
        yield span


def _note_outcome(runtime: Runtime, delivery: Delivery, span: Span, outcome: object) -> None:
    if not span.is_recording:
        return
    match outcome:
        case Finished():
            said = "completed"
        case Ended(error):
            said = "failed"
            span.fail(getattr(error, "code", type(error).__name__))
        case Release(cause=cause):
            said = "waiting" if cause is None else "released"
            if cause is not None:
                span.fail(type(cause).__name__)
        case Completed() | Failed():
            said = "duplicate"
        case Busy():
            said = "busy"
        case _:
            said = _REFUSED
    span.note({"idempotency.outcome": said})
    if said in ("duplicate", "busy"):
        last = _asked(runtime, delivery.id, lambda connection: stored.last(connection, delivery.id))
        _link(span, last, "other_delivery")


def _link(span: Span, trace: str | None, relation: str) -> None:
    if trace is not None:
        span.link({PARENT_HEADER: trace}, relation)


def _asked(runtime: Runtime, id: OperationId, ask: Callable[[Any], str | None]) -> str | None:
    """What the record has of a trace. A link is not worth an error: without an answer, or the column, there is none."""
    if runtime.traces is None or runtime.traces.is_without_links:
        return None
    try:
        with runtime.autocommit(id.tenant) as connection:
            return ask(connection)
    except (DBAPIError, PoolTimeout) as error:
        # before the migration, it would be so for every attempt
        runtime.traces.is_without_links = isinstance(error, ProgrammingError)
        if runtime.traces.is_without_links or is_news(error):
            log.warning("traces_not_linked", task=id.task, error=type(error).__name__)
        return None
