"""A batch that commits together claims nothing before: who else comes for one of its operations, and which of the two it is left to."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from sqlalchemy import Engine, text

from idempotency import IdempotentTask, OperationId
from idempotency.application import runtime_of
from idempotency.attempt import batch
from idempotency.attempt.batch import Answer, run_together
from idempotency.attempt.endings import Finished
from idempotency.attempt.policy import Policy
from idempotency.store import batches
from idempotency.store.answers import Completed
from idempotency.wire.delivery import Delivery
from idempotency.worker.revocation import revoke_terminated
from tests.integration.test_batch_each import many
from tests.integration.test_batch_neighbours import accounts, batched, put, run, states
from tests.support import operations as op
from tests.support.bank import INSERT
from tests.support.operations import Record, wait_for_a_lock

# Seconds: enough for what does not wait.
SOON = 20


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def deliveries_of(task: str, many: int) -> list[Delivery]:
    return [Delivery(OperationId("default", task, f"e{n}"), op.FINGERPRINT, {}, message="{}") for n in range(many)]


def together(app: Celery, deliveries: Sequence[Delivery], before: Any = None) -> list[Answer]:
    """Run and commit these. `before`: called in each body before it writes, with its place."""
    runtime = runtime_of(app)

    def body(place: int, attempt: Any) -> str:
        if before is not None:
            before(place)
        attempt.session.execute(INSERT, {"account": deliveries[place].id.key, "amount": 1})
        return "done"

    return run_together(runtime, deliveries, Policy.of(IdempotentTask, runtime.settings), body)


def test_of_two_batches_with_the_same_messages_each_is_committed_by_one(
    bank: Celery, engine: Engine, threads: ThreadPoolExecutor
) -> None:
    """Both are in their bodies at the same time, as when a relay has published twice: neither has claimed anything."""
    deliveries, barrier = deliveries_of("t", 5), threading.Barrier(2)
    met = threading.local()

    def wait(place: int) -> None:
        if not getattr(met, "other", False):
            met.other = True
            barrier.wait(SOON)

    one = threads.submit(together, bank, deliveries, wait)
    two = threads.submit(together, bank, [*reversed(deliveries)], wait)
    answers = one.result(SOON), two.result(SOON)
    assert accounts(engine) == {f"e{n}": [1] for n in range(5)}
    finished = [[isinstance(each.outcome, Finished) for each in of_one] for of_one in answers]
    assert sorted(map(all, finished)) == [False, True]
    # what the other one has committed is asked for alone, by its record
    assert sorted(map(any, finished)) == [False, True]
    assert set(states(engine).values()) == {"completed"}


def test_who_claims_alone_while_a_batch_commits_waits_for_it(
    bank: Celery, engine: Engine, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A duplicate that is acknowledged has found the result, and not a batch that may still be rolled back."""
    written, go = threading.Event(), threading.Event()

    def hold(point: str) -> None:
        if point == "finish.written":
            written.set()
            assert go.wait(SOON)

    monkeypatch.setattr(batch, "crash_point", hold)
    deliveries = deliveries_of("t", 3)
    of_batch = threads.submit(together, bank, deliveries)
    assert written.wait(SOON)
    with engine.connect() as connection, engine.connect() as watching:
        claimed = threads.submit(op.claim, connection, deliveries[1].id)
        wait_for_a_lock(watching)
        go.set()
        assert claimed.result(SOON) == Completed('"done"')
    assert all(isinstance(each.outcome, Finished) for each in of_batch.result(SOON))


def test_who_has_claimed_alone_keeps_it_and_the_others_are_committed(bank: Celery, engine: Engine) -> None:
    deliveries = deliveries_of("t", 3)

    def claim(place: int) -> None:
        if place == 2 and "e1" not in states(engine):
            with engine.connect() as connection:
                op.started(connection, deliveries[1].id)

    answers = together(bank, deliveries, claim)
    assert [isinstance(each.outcome, Finished) for each in answers] == [True, False, True]
    assert answers[1].claim is None
    assert states(engine) == {"e0": "completed", "e1": "started", "e2": "completed"}
    assert accounts(engine) == {"e0": [1], "e2": [1]}


def test_what_is_revoked_while_its_batch_runs_has_done_nothing(bank: Celery, engine: Engine) -> None:
    messages: list[Any] = []

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        if account == "e2" and "e1" not in states(engine):
            _, request, *_ = messages[1]
            revoke_terminated(task, Context(request, args=["e1"], kwargs={}))

    task = batched(bank, body)
    messages += many(bank, task)
    run(bank, task, *messages)
    assert states(engine) == {"e0": "completed", "e1": "failed", "e2": "completed"}
    assert accounts(engine) == {"e0": [1], "e2": [1]}


def test_nothing_is_left_of_a_batch_whose_process_ends(bank: Celery, engine: Engine) -> None:
    """No claim, and so no lease to wait for: whoever gets the messages next runs them at once, in their first attempt."""

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        if account == "e2" and not ended:
            ended.append(account)
            raise SystemExit(1)

    ended: list[str] = []
    task = batched(bank, body)
    messages = many(bank, task)
    with pytest.raises(SystemExit):
        run(bank, task, *messages)
    assert (states(engine), accounts(engine)) == ({}, {})
    run(bank, task, *messages)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT DISTINCT attempts FROM idempotency.records")).scalars().all() == [1]
    assert accounts(engine) == {"e0": [1], "e1": [1], "e2": [1]}


def test_a_record_keeps_of_its_message_what_a_single_claim_keeps(bank: Celery, engine: Engine, record: Record) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)

    task = batched(bank, body)
    alone, *others = many(bank, task)
    run(bank, task, *others)
    _, request, *_ = alone
    request["delivery_info"] = {**(request.get("delivery_info") or {}), "redelivered": True}
    run(bank, task, alone)
    of_one, of_batch = record("e0"), record("e1")
    assert '[[\\"e1\\"], {}, ' in of_batch.message
    assert (of_one.queue, of_one.service, of_one.attempts) == (of_batch.queue, of_batch.service, of_batch.attempts)
    assert (of_one.effects, of_one.generation, of_one.response_code) == (
        of_batch.effects,
        of_batch.generation,
        of_batch.response_code,
    )
    assert of_batch.token is None


def test_what_has_been_completed_what_has_a_record_and_what_is_too_old_are_told_apart(
    bank: Celery, engine: Engine
) -> None:
    day = 86400.0
    with engine.connect() as connection:
        now = connection.execute(text("SELECT extract(epoch FROM clock_timestamp())::float8")).scalar_one()
        done, held, foreign = op.completed(connection), op.started(connection), op.completed(connection)
        result = op.record(connection, done.id).result
    ids = {"new": op.new_id(), "old": op.new_id(), "done": done.id, "held": held.id, "other": foreign.id}
    prints = {"other": "v1:another"}
    signed = {"old": now - 1.25 * day, "new": now - day / 2, "done": now - 1.25 * day}
    deliveries = [
        Delivery(id, prints.get(name, op.FINGERPRINT), {}, message="{}", signed_at=signed.get(name))
        for name, id in ids.items()
    ]
    with runtime_of(bank).autocommit() as connection:
        known = batches.known(connection, deliveries, service=op.SERVICE, horizon=day)
    assert {name: known.get(id.key, "new") for name, id in ids.items()} == {
        "new": "new",
        "old": None,
        "done": Completed(result),
        "held": None,
        "other": None,
    }
