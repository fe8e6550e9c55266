"""What was found by reading: each test passes while the fault is there."""

from __future__ import annotations

from celery import Celery
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from idempotency.application import runtime_of
from idempotency.attempt.tracing import in_trace_of
from idempotency.store import traces as stored
from idempotency.wire.keys import OperationId
from tests.support import batched
from tests.support.deliveries import Deliveries
from tests.support.spans import Spans, attribute, id_of, linked, said, trace_of
from tests.traces.test_attempts import queue, run_batch


def test_a_duplicate_of_what_ran_in_a_batch_is_linked_to_nothing_and_a_webhook_begins_another_trace(
    bank: Celery, deliveries: Deliveries, spans: Spans, engine: Engine
) -> None:
    with Session(runtime_of(bank).engine) as session, session.begin():
        for account in ("e1", "e2"):
            batched.post_entry.enqueue(session, account)
    run_batch(bank, batched.post_entry, engine)
    deliveries.deliver(batched.post_entry, "e1", key="e1")
    first, _, late = spans.named(f"process {queue(bank)}")
    assert [said(span, "outcome") for span in (first, late)] == ["completed", "duplicate"]
    assert linked(late) == [], "docs/traces.md: other_delivery, from a duplicate to the attempt that it met, or the last one"
    assert attribute(first, "idempotency.attempt") is None
    id = OperationId("default", batched.post_entry.name, "e1")
    with runtime_of(bank).autocommit() as connection:
        assert stored.last(connection, id) is None
    with in_trace_of(runtime_of(bank), id, "report"):
        pass
    (report,) = spans.named("report")
    assert trace_of(report) != trace_of(first), "docs/traces.md: it is put into the trace of the operation that it is about"
