"""One trace from the call to the end: which span is whose child, and what later attempts are linked to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency import Happened, PermanentError, StillUnknown
from idempotency.application import runtime_of
from idempotency.attempt.tracing import in_trace_of
from idempotency.sagas import saga
from idempotency.upkeep import maintenance
from idempotency.wire.keys import OperationId
from tests.sagas.conftest import Stage
from tests.support import bank as b
from tests.support import batched
from tests.support.deliveries import Deliveries
from tests.support.operations import deaths, make_due
from tests.support.spans import Spans, attribute, id_of, linked, parent_of, said, trace_of, tree
from tests.support.tasks import Provider, lost, make_task, pay, write

# What must never leave: a key, an argument, a result, an error's text.
CANARY = "canary7531"


def queue(bank: Celery) -> str:
    return str(bank.conf.task_default_queue)


def test_an_operation_is_one_trace_from_its_call_to_its_commit(stage: Stage, spans: Spans, bank: Celery) -> None:
    with spans.tracer.start_as_current_span("request") as request:
        handle = stage.enqueue(b.deposit, "a1", 3)
    stage.run()
    assert handle.status() == "completed"
    names = ["request", f"enqueue {queue(bank)}", f"process {queue(bank)}", "claim", "body", "commit"]
    assert [span.name for span in spans.all()] == names, tree(spans.all())
    assert {trace_of(span) for span in spans.all()} == {request.get_span_context().trace_id}
    called, enqueued, processed, *phases = spans.all()
    assert [parent_of(span) for span in (enqueued, processed)] == [id_of(called), id_of(enqueued)]
    assert {parent_of(span) for span in phases} == {id_of(processed)}
    assert (said(processed, "task"), said(processed, "outcome"), said(processed, "attempt")) == (
        b.deposit.name,
        "completed",
        1,
    )
    assert said(processed, "operation.id") == handle.task_id == attribute(enqueued, "messaging.message.id")
    assert said(processed, "fence") > 0
    assert (enqueued.kind.name, processed.kind.name) == ("PRODUCER", "CONSUMER")
    assert attribute(processed, "messaging.destination.name") == queue(bank)


def test_a_call_without_a_trace_begins_one(stage: Stage, spans: Spans) -> None:
    stage.enqueue(b.deposit, "a1")
    stage.run()
    assert len({trace_of(span) for span in spans.all()}) == 1
    assert parent_of(spans.all()[0]) is None


def test_each_attempt_is_a_child_of_the_call_and_linked_to_the_one_before(
    stage: Stage, spans: Spans, bank: Celery, engine: Engine
) -> None:
    handle = stage.enqueue(b.failing, "a1", "raise")
    for _ in range(3):
        stage.run()
        stage.pass_time(60)
    assert handle.status() == "failed"
    enqueued = spans.named(f"enqueue {queue(bank)}")[0]
    attempts = spans.named(f"process {queue(bank)}")
    assert [said(span, "outcome") for span in attempts] == ["released", "released", "failed"], tree(spans.all())
    assert [said(span, "attempt") for span in attempts] == [1, 2, 3]
    assert {parent_of(span) for span in attempts} == {id_of(enqueued)}
    first, second, third = attempts
    assert [linked(span) for span in attempts] == [
        [],
        [(id_of(first), "earlier_attempt")],
        [(id_of(second), "earlier_attempt")],
    ]
    assert [said(span, "origin") for span in attempts] == [None, "retry", "retry"]
    assert (attribute(first, "error.type"), attribute(third, "error.type")) == ("ValueError", "ValueError")
    assert [len(spans.named(name)) for name in ("release", "fail")] == [2, 1]


def test_a_takeover_is_linked_to_the_attempt_that_died(
    stage: Stage, spans: Spans, bank: Celery, engine: Engine, deliveries: Deliveries
) -> None:
    """Only what it has noted on its record is left of the dead one."""
    stage.enqueue(b.failing, "a1", "raise")
    stage.deliver()
    deaths(engine, "a1", 1)
    with engine.connect() as connection:
        message = connection.execute(text("SELECT message FROM idempotency.outbox ORDER BY id LIMIT 1")).scalar_one()
    headers = json.loads(message)["headers"]
    deliveries.deliver(b.failing, "a1", "raise", headers=headers, origin="recover")
    before, after = spans.named(f"process {queue(bank)}")
    assert linked(after) == [(id_of(before), "earlier_attempt")]
    assert said(after, "taken_over")
    assert said(after, "origin") == "recover"


def test_a_replayed_dead_letter_is_linked_to_the_attempt_that_failed(stage: Stage, spans: Spans, bank: Celery) -> None:
    stage.enqueue(b.failing, "a1", "permanent")
    stage.run()
    stage.replay(b.failing.name)
    stage.run()
    first, replayed = spans.named(f"process {queue(bank)}")
    assert linked(replayed) == [(id_of(first), "earlier_attempt")]
    assert trace_of(first) == trace_of(replayed)
    assert (said(replayed, "generation"), said(replayed, "origin")) == (2, "replay")


def test_a_duplicate_is_linked_to_the_attempt_that_it_met(
    bank: Celery, deliveries: Deliveries, spans: Spans, engine: Engine
) -> None:
    """While that runs, and once it has ended; the duplicate may be of another trace."""
    seen: list[int] = []

    def body(self: Any) -> str:
        if not seen:
            seen.append(1)
            deliveries.deliver(task, key="k", origin="resend")
        return "x"

    task = make_task(bank, body)
    assert deliveries.deliver(task, key="k").state == "SUCCESS"
    assert deliveries.deliver(task, key="k").state == "SUCCESS"
    ran, busy, late = spans.named(f"process {queue(bank)}")
    assert [said(span, "outcome") for span in (ran, busy, late)] == ["completed", "busy", "duplicate"]
    assert linked(busy) == linked(late) == [(id_of(ran), "other_delivery")]
    assert trace_of(late) != trace_of(ran)


def test_effects_and_steps_are_spans_once(bank: Celery, deliveries: Deliveries, spans: Spans, engine: Engine) -> None:
    provider = Provider(lost())

    def reconcile(*, doubt: Any) -> Any:
        return Happened({"charge": "ch_1"})

    def body(self: Any) -> str:
        self.step("reserve", write, "reserved")
        self.effect("charge", provider, reconcile=reconcile)
        return pay(self)

    task = make_task(bank, body)
    assert deliveries.deliver(task, key="k").state == "RETRY"
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k", origin="retry").state == "SUCCESS"
    step, (first, again), asked = spans.one("step"), spans.named("effect"), spans.one("reconcile")
    assert said(step, "step") == "reserve"
    bodies = [id_of(span) for span in spans.named("body")]
    assert [parent_of(span) for span in (step, first, again)] == [bodies[0], bodies[0], bodies[1]]
    assert parent_of(asked) == id_of(again)
    assert [said(span, "repeated") for span in (first, again)] == [False, True]
    assert attribute(first, "error.type") == "ConnectionError"


def test_what_a_body_enqueues_is_a_child_of_its_attempt(stage: Stage, spans: Spans, bank: Celery) -> None:
    def body(self: Any) -> None:
        b.deposit.enqueue(self.session, "next")

    task = make_task(bank, body)
    stage.enqueue(task, idempotency_key="k")
    stage.run()
    assert len({trace_of(span) for span in spans.all()}) == 1
    _, inner = spans.named(f"enqueue {queue(bank)}")
    assert parent_of(inner) == id_of(spans.named("body")[0])


def test_a_saga_and_what_it_calls_are_one_trace(stage: Stage, spans: Spans, bank: Celery, engine: Engine) -> None:
    """Its runs are linked one to the other, and a step is a span only where it was done."""

    @saga("bank.small", key="{account}", app=bank)
    def small(saga: Any, account: str) -> Any:
        saga.step("open", b.enter, f"{account}/open")
        saga.call(b.deposit, f"{account}/one")
        saga.sleep(60)
        return saga.call(b.deposit, f"{account}/two")

    stage.enqueue(small, "s1")
    stage.run()
    stage.pass_time(61)
    stage.run()
    assert stage.saga("s1").status == "COMPLETED"
    assert len({trace_of(span) for span in spans.all()}) == 1
    runs = [span for span in spans.named(f"process {queue(bank)}") if said(span, "task") == small.name]
    assert [said(span, "outcome") for span in runs] == ["waiting"] * 3 + ["completed"]
    assert [linked(span) for span in runs[1:]] == [[(id_of(span), "earlier_attempt")] for span in runs[:-1]]
    assert said(spans.one("step"), "step") == "open"
    calls = [span for span in spans.named(f"enqueue {queue(bank)}") if said(span, "task") == b.deposit.name]
    assert [parent_of(span) for span in calls] == [id_of(spans.named("body")[0]), id_of(spans.named("body")[-3])]


def test_what_comes_from_outside_is_put_into_the_trace_of_its_operation(
    stage: Stage, spans: Spans, bank: Celery
) -> None:
    stage.enqueue(b.deposit, "a1")
    stage.run()
    runtime, id = runtime_of(bank), OperationId("default", b.deposit.name, "a1")
    with spans.tracer.start_as_current_span("webhook") as webhook, in_trace_of(runtime, id, "report") as span:
        assert span is not None
    report, processed = spans.one("report"), spans.one(f"process {queue(bank)}")
    assert (trace_of(report), parent_of(report)) == (trace_of(processed), id_of(processed))
    assert [link[0] for link in linked(report)] == [webhook.get_span_context().span_id]


@pytest.mark.long
def test_nothing_of_a_customer_is_in_a_span(
    stage: Stage, spans: Spans, bank: Celery, deliveries: Deliveries, engine: Engine
) -> None:
    """No key, argument, result, or text of an error, in whatever way an attempt ends."""

    def charge(canary: str, *, idempotency_key: str) -> Any:
        raise ValueError(canary)

    def reconcile(canary: str, *, doubt: Any) -> Any:
        return StillUnknown()

    def body(self: Any, how: str, canary: str) -> str:
        if how == "effect":
            self.effect("charge", charge, canary, reconcile=reconcile)
        if how == "step":
            self.step("open", b.enter, canary)
        if how == "permanent":
            raise PermanentError(canary, "refused")
        if how == "error":
            raise ValueError(canary)
        return canary

    task = make_task(bank, body, max_attempts=2)
    hows = ("effect", "step", "permanent", "error", "return")
    for how in hows:
        stage.enqueue(task, how, CANARY, idempotency_key=f"{CANARY}/{how}", tenant=CANARY)
        for _ in range(2):
            stage.run()
            stage.pass_time(60)
        deliveries.deliver(task, how, "other", key=f"{CANARY}/{how}", tenant=CANARY)
    assert {said(span, "outcome") for span in spans.named(f"process {queue(bank)}")} >= {
        "completed",
        "failed",
        "released",
        "refused",
    }
    assert CANARY not in spans.text()
    assert not any(span.events for span in spans.all())


def test_a_message_with_another_trace_context_gets_a_wrong_link_and_nothing_else(
    deliveries: Deliveries, spans: Spans, bank: Celery
) -> None:
    forged = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "a=1"}
    assert deliveries.deliver(b.deposit, "a1", headers=forged).state == "SUCCESS"
    assert (trace_of(spans.all()[0]), parent_of(spans.one(f"process {queue(bank)}"))) == (
        int("ab" * 16, 16),
        int("cd" * 8, 16),
    )


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"},
        {"traceparent": "x" * 100_000},
        {"traceparent": 17, "tracestate": ["a"]},
        {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "," * 100_000},
        {"traceparent": f"ff-{'ab' * 16}-{'cd' * 8}-01"},
    ],
    ids=["zeros", "long", "no text", "long state", "version"],
)
def test_headers_that_are_no_trace_do_no_harm(deliveries: Deliveries, spans: Spans, bank: Celery, headers: Any) -> None:
    assert deliveries.deliver(b.deposit, "a1", headers=headers).state == "SUCCESS"
    assert said(spans.one(f"process {queue(bank)}"), "outcome") == "completed"


def test_orphans_that_recovery_delivers_again_are_linked(
    stage: Stage, spans: Spans, bank: Celery, engine: Engine
) -> None:
    stage.enqueue(b.failing, "a1", "defer long")
    stage.deliver()
    deaths(engine, "a1", 1)
    with engine.connect() as connection:
        connection.execute(text("DELETE FROM idempotency.outbox"))
    maintenance.recover(bank)
    stage.deliver()
    first, recovered = spans.named(f"process {queue(bank)}")
    assert linked(recovered) == [(id_of(first), "earlier_attempt")]
    assert (trace_of(recovered), said(recovered, "origin")) == (trace_of(first), "recover")


def test_many_that_share_a_transaction_are_each_in_their_own_trace(bank: Celery, spans: Spans, engine: Engine) -> None:
    with Session(runtime_of(bank).engine) as session, session.begin():
        handles = [batched.post_entry.enqueue(session, account) for account in ("e1", "e2")]
    run_batch(bank, batched.post_entry, engine)
    assert [handle.status() for handle in handles] == ["completed"] * 2
    attempts = spans.named(f"process {queue(bank)}")
    assert [said(span, "outcome") for span in attempts] == ["completed"] * 2
    assert [attribute(span, "messaging.batch.message_count") for span in attempts] == [2, 2]
    enqueued = spans.named(f"enqueue {queue(bank)}")
    assert {parent_of(span) for span in attempts} == {id_of(span) for span in enqueued}
    assert len({trace_of(span) for span in attempts}) == 2


def test_a_duplicate_of_what_ran_in_a_batch_is_linked_and_what_is_reported_of_it_is_in_its_trace(
    bank: Celery, deliveries: Deliveries, spans: Spans, engine: Engine
) -> None:
    """Each of the batch has noted its own span."""
    accounts = ("e1", "e2", "e3")
    with Session(runtime_of(bank).engine) as session, session.begin():
        for account in accounts:
            batched.post_entry.enqueue(session, account)
    run_batch(bank, batched.post_entry, engine)
    for account in accounts:
        deliveries.deliver(batched.post_entry, account, key=account)
    found = spans.named(f"process {queue(bank)}")
    ran, late = found[:3], found[3:]
    assert [said(span, "outcome") for span in found] == ["completed"] * 3 + ["duplicate"] * 3
    assert [(said(span, "attempt"), said(span, "generation"), said(span, "taken_over")) for span in ran] == [
        (1, 1, False)
    ] * 3
    assert [linked(span) for span in late] == [[(id_of(span), "other_delivery")] for span in ran]
    assert [linked(span) for span in ran] == [[]] * 3
    for account in accounts:
        with in_trace_of(runtime_of(bank), OperationId("default", batched.post_entry.name, account), "report"):
            pass
    reports = [(trace_of(span), parent_of(span)) for span in spans.named("report")]
    assert reports == [(trace_of(span), id_of(span)) for span in ran]


def run_batch(bank: Celery, task: Any, engine: Engine) -> None:
    """Hand all that the outbox has for a task to a pool process, as one job."""
    from celery.app.trace import build_tracer

    from idempotency.wire.message import Message
    from idempotency.worker.batch import run_batch as run
    from tests.support.deliveries import request_of

    with engine.connect() as connection:
        rows = connection.execute(text("SELECT message FROM idempotency.outbox ORDER BY id")).scalars().all()
    calls = []
    for each in rows:
        message = Message.from_text(each)
        request = {**request_of(bank, task, message.headers["id"]), **message.headers}
        calls.append((message.headers["id"], request, message.body.encode(), "application/json", "utf-8"))
    bank.set_current()  # as in a worker; an earlier test of this process may have made another application
    tracer = build_tracer(task.name, task, app=bank)
    run(lambda name, id, request, body, *_: tracer(id, body[0], body[1], request), task.name, calls, None)
