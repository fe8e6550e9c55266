"""Dead letters: stored with the failure, replayed under the same key, refused when there is nothing to replay."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text
from sqlalchemy.exc import DataError

from idempotency import IdempotentTask, PermanentError
from idempotency.application import runtime_of
from idempotency.errors import OperationNotFound, ReplayRefused
from idempotency.store import dead_letters as letters
from idempotency.store import ends
from idempotency.store.answers import error_text
from idempotency.store.letters import store_failure, store_refusal
from idempotency.wire.delivery import Delivery
from idempotency.wire.headers import KEY_HEADER
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from tests.support import bank as b
from tests.support import operations as op
from tests.support.deliveries import Deliveries, Outcome, deliver_row
from tests.support.operations import age, at_once, operation, record

UNKNOWN = 4711


@b.app.task(base=IdempotentTask, bind=True, key="{account}", name="tests.repairable")
def repairable(self: IdempotentTask, account: str, amount: int = 1) -> int:
    """Reserves in a step; then the account has to exist."""
    reserved = self.step("reserve", reserve, account, amount)
    self.session.execute(b.INSERT, {"account": account, "amount": amount})
    if self.session.execute(text("SELECT count(*) FROM failures WHERE code = 'repaired'")).scalar_one() == 0:
        raise PermanentError("no such account", "no_account")
    return int(reserved)


def reserve(session: Any, account: str, amount: int) -> int:
    session.execute(b.INSERT, {"account": f"{account}/step", "amount": amount})
    return amount


def repair(connection: Connection) -> None:
    """From now on the account exists."""
    connection.execute(text("INSERT INTO failures (account, code) VALUES ('', 'repaired')"))


def entries(connection: Connection, account: str) -> int:
    count: int = connection.execute(
        text("SELECT count(*) FROM entries WHERE account = :account"), {"account": account}
    ).scalar_one()
    return count


def replay(app: Celery, letter: int) -> OperationId:
    with runtime_of(app).engine.begin() as connection:
        return letters.replay(connection, letter)


# ---------------------------------------------------------------- stored


def test_a_failure_stores_its_dead_letter_with_the_record(deliveries: Deliveries, connection: Connection) -> None:
    outcome = deliveries.deliver(b.failing, "a1", "permanent", task_id="t-1", headers={"trace-id": "abc"})
    assert outcome.state == "FAILURE"
    row = record(connection, operation(b.failing, "a1"))
    assert row is not None
    assert row.status == "failed"
    (letter,) = op.dead_letters(connection)
    assert (letter.source, letter.status, letter.reason) == ("operation", "open", "no_account")
    assert (letter.tenant, letter.task, letter.key) == ("default", b.failing.name, "a1")
    assert letter.header_task == b.failing.name
    assert letter.queue == deliveries.app.conf.task_default_queue
    assert (letter.generation, letter.attempts, letter.fingerprint) == (1, 1, row.fingerprint)
    assert json.loads(letter.last_error) == {"code": "no_account", "message": "no such account", "declined": True}
    assert letter.last_error == letter.first_error == row.error
    # the whole message, as it would be delivered again
    assert letter.payload == row.message
    message = Message.from_text(letter.payload)
    assert (message.headers["id"], message.headers["trace-id"]) == ("t-1", "abc")
    assert json.loads(letter.headers) == json.loads(letter.headers) | {"id": "t-1", "trace-id": "abc"}
    assert letter.consumer_service == "bank"
    # on_failed's row is there, the body's is not
    assert connection.execute(text("SELECT account, code FROM failures")).all() == [("a1", "no_account")]
    assert entries(connection, "a1") == 0


def test_the_letter_of_used_up_attempts_has_the_first_and_the_last_error(
    deliveries: Deliveries, connection: Connection
) -> None:
    for how in range(3):
        outcome = deliveries.deliver(b.failing, "a1", "flaky")
        if how < 2:
            assert outcome.state == "RETRY"
            assert op.dead_letters(connection) == []
            connection.execute(
                text("UPDATE idempotency.records SET first_error = coalesce(nullif(first_error, error), :first)"),
                {"first": error_text("First", "the first error")},
            )
            age(connection, operation(b.failing, "a1"), available_at=-1)
    assert outcome.state == "FAILURE"
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.attempts) == ("attempts_exhausted", 3)
    assert json.loads(letter.first_error)["code"] == "First"
    assert "flaky" in json.loads(letter.last_error)["message"]


def test_a_holder_that_lost_its_operation_leaves_no_dead_letter(
    bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(b.failing, "a1", "value")
    id = operation(b.failing, "a1")
    row = record(connection, id)
    assert row is not None
    age(connection, id, available_at=-1)
    held = op.started(connection, id, fingerprint=row.fingerprint)
    age(connection, id, locked_until=-1)
    op.started(connection, id, fingerprint=row.fingerprint)
    with runtime_of(bank).engine.connect() as transaction:
        store_failure(transaction, delivery(row, id), held, reason="late", last_error=op.ERROR, service=op.SERVICE)
        assert len(op.dead_letters(transaction)) == 1
        with pytest.raises(DataError):
            ends.fail(transaction, held, op.FAILED, retention=60.0, lease=60.0)
        transaction.rollback()
    assert op.dead_letters(connection) == []


def delivery(row: Any, id: OperationId) -> Delivery:
    return Delivery(id, row.fingerprint, {}, "t-1", row.message, {}, "q")


def test_a_duplicate_of_a_failed_operation_stores_nothing_more(deliveries: Deliveries, connection: Connection) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    again = deliveries.deliver(b.failing, "a1", "permanent")
    assert (again.state, again.value.code) == ("FAILURE", "no_account")
    assert len(op.dead_letters(connection)) == 1
    assert connection.execute(text("SELECT count(*) FROM failures")).scalar_one() == 1


def test_a_mismatch_is_stored_once_per_fingerprint_and_touches_no_record(
    deliveries: Deliveries, connection: Connection
) -> None:
    first = deliveries.deliver(b.deposit, "a1", amount=5)
    before = record(connection, operation(b.deposit, "a1"))
    for amount, expected in [(6, 1), (6, 1), (7, 2), (6, 2)]:
        assert deliveries.deliver(b.deposit, "a1", amount=amount).state == "FAILURE"
        assert len(op.dead_letters(connection)) == expected
    assert {letter.reason for letter in op.dead_letters(connection)} == {"fingerprint_mismatch"}
    assert record(connection, operation(b.deposit, "a1")) == before
    assert entries(connection, "a1") == 1
    assert deliveries.deliver(b.deposit, "a1", amount=5) == first


def test_letters_are_listed_newest_first_and_shown_whole(deliveries: Deliveries, connection: Connection) -> None:
    for account in ("a1", "a2"):
        deliveries.deliver(b.failing, account, "permanent")
    deliveries.deliver(repairable, "a3")
    keys = [row.key for row in letters.list_letters(connection)]
    assert keys == ["a3", "a2", "a1"]
    assert [row.key for row in letters.list_letters(connection, task=b.failing.name, limit=1)] == ["a2"]
    assert letters.list_letters(connection, status="replayed") == []
    newest = letters.list_letters(connection)[0]
    assert letters.show(connection, newest.id).payload == op.dead_letters(connection)[-1].payload
    with pytest.raises(OperationNotFound, match=f"dead letter {UNKNOWN}"):
        letters.show(connection, UNKNOWN)


# ---------------------------------------------------------------- replayed


def test_a_replay_runs_the_operation_under_its_key_and_keeps_its_steps(
    deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(repairable, "a1", 5, task_id="t-1")
    id = operation(repairable, "a1")
    failed = record(connection, id)
    assert failed is not None
    assert failed.status == "failed"
    (letter,) = op.dead_letters(connection)

    assert replay(deliveries.app, letter.id) == id
    reopened = record(connection, id)
    assert reopened is not None
    assert (reopened.status, reopened.generation, reopened.attempts) == ("released", 2, 0)
    assert (reopened.error, reopened.first_error, reopened.response_code) == (None, None, None)
    assert (reopened.completed_at, reopened.expires_at) == (None, None)
    assert reopened.opened_at > failed.opened_at
    assert reopened.effects == failed.effects
    assert list(reopened.effects) == ["reserve"]
    (closed,) = op.dead_letters(connection)
    assert closed.status == "replayed"
    assert closed.closed_at is not None
    (row,) = op.outbox(connection, id)
    assert (row.origin, row.status, row.message, row.fingerprint) == (
        "replay",
        "pending",
        failed.message,
        failed.fingerprint,
    )
    assert Message.from_text(row.message).headers["id"] == "t-1"

    repair(connection)
    assert deliver_row(deliveries, repairable, row) == Outcome("SUCCESS", 5)
    completed = record(connection, id)
    assert completed is not None
    assert (completed.status, completed.generation, completed.attempts) == ("completed", 2, 1)
    assert completed.fence > failed.fence
    assert (entries(connection, "a1/step"), entries(connection, "a1")) == (1, 1)


def test_a_replay_that_fails_again_gets_a_letter_of_its_generation(
    deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(repairable, "a1")
    replay(deliveries.app, op.dead_letters(connection)[0].id)
    (row,) = op.outbox(connection)
    assert deliver_row(deliveries, repairable, row).state == "FAILURE"
    first, second = op.dead_letters(connection)
    assert (first.generation, first.status) == (1, "replayed")
    assert (second.generation, second.status) == (2, "open")
    replay(deliveries.app, second.id)
    reopened = record(connection, operation(repairable, "a1"))
    assert reopened is not None
    assert reopened.generation == 3


def test_a_late_original_after_a_replay_gives_one_result(deliveries: Deliveries, connection: Connection) -> None:
    deliveries.deliver(repairable, "a1", 5)
    replay(deliveries.app, op.dead_letters(connection)[0].id)
    repair(connection)
    (row,) = op.outbox(connection)
    original = deliveries.deliver(repairable, "a1", 5)
    assert original == deliver_row(deliveries, repairable, row) == Outcome("SUCCESS", 5)
    assert entries(connection, "a1") == 1


def test_of_replays_at_once_one_wins_and_the_others_are_refused(deliveries: Deliveries, connection: Connection) -> None:
    for account in map(str, range(5)):
        deliveries.deliver(b.failing, account, "permanent")
    for letter in op.dead_letters(connection):

        def attempt(_: int, letter: Any = letter) -> str:
            try:
                return replay(deliveries.app, letter.id).key
            except ReplayRefused as refused:
                return str(refused)

        refusal = f"dead letter {letter.id}: already replayed"
        assert sorted(at_once(4, attempt)) == sorted([letter.key, refusal, refusal, refusal])
        row = record(connection, operation(b.failing, letter.key))
        assert row is not None
        assert (row.status, row.generation) == ("released", 2)
        assert [row.origin for row in op.outbox(connection, operation(b.failing, letter.key))] == ["replay"]


def test_a_replay_that_is_rolled_back_changes_nothing(deliveries: Deliveries, connection: Connection) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    (letter,) = op.dead_letters(connection)
    before = record(connection, operation(b.failing, "a1"))
    with runtime_of(deliveries.app).engine.connect() as transaction:
        letters.replay(transaction, letter.id)
        transaction.rollback()
    assert record(connection, operation(b.failing, "a1")) == before
    assert op.dead_letters(connection) == [letter]
    assert op.outbox(connection) == []
    replay(deliveries.app, letter.id)


def test_a_letter_whose_record_was_purged_is_replayed_by_its_message_alone(
    deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(repairable, "a1", 5)
    connection.execute(text("DELETE FROM idempotency.records"))
    repair(connection)
    replay(deliveries.app, op.dead_letters(connection)[0].id)
    (row,) = op.outbox(connection)
    assert row.origin == "replay"
    assert deliver_row(deliveries, repairable, row) == Outcome("SUCCESS", 5)


# ---------------------------------------------------------------- refused


def test_a_letter_that_does_not_exist_is_refused(bank: Celery, connection: Connection) -> None:
    with pytest.raises(OperationNotFound, match=f"dead letter {UNKNOWN}: not found"):
        replay(bank, UNKNOWN)
    assert op.outbox(connection) == []


@pytest.mark.parametrize("status", ["replayed", "discarded"])
def test_a_letter_that_is_closed_is_refused_with_its_status(
    deliveries: Deliveries, connection: Connection, status: str
) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    (letter,) = op.dead_letters(connection)
    connection.execute(
        text("UPDATE idempotency.dead_letters SET status = :status, closed_at = clock_timestamp()"),
        {"status": status},
    )
    before = record(connection, operation(b.failing, "a1"))
    with pytest.raises(ReplayRefused, match=f"dead letter {letter.id}: already {status}"):
        replay(deliveries.app, letter.id)
    assert record(connection, operation(b.failing, "a1")) == before
    assert op.outbox(connection) == []


@pytest.mark.parametrize("state", [op.started, op.expired, op.early, op.due, op.completed, op.failed])
def test_a_letter_of_another_request_is_always_refused(
    deliveries: Deliveries, connection: Connection, state: Callable[..., Any]
) -> None:
    id = operation(b.deposit, "a1")
    state(connection, id)
    before, rows = record(connection, id), op.outbox(connection)
    assert before is not None
    deliveries.deliver(b.deposit, "a1", 6)
    (letter,) = op.dead_letters(connection)
    assert letter.reason == "fingerprint_mismatch"
    with pytest.raises(ReplayRefused, match=r"its key was used with other arguments, .* discard it"):
        replay(deliveries.app, letter.id)
    assert record(connection, id) == before
    assert op.dead_letters(connection) == [letter]
    assert op.outbox(connection) == rows


def test_a_letter_of_an_earlier_generation_is_refused_from_then_on(
    deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(repairable, "a1", 5)
    id = operation(repairable, "a1")
    (letter,) = op.dead_letters(connection)
    replay(deliveries.app, letter.id)
    connection.execute(text("UPDATE idempotency.dead_letters SET status = 'open', closed_at = NULL"))

    def refused(status: str) -> None:
        with pytest.raises(ReplayRefused, match=f"the operation is {status}"):
            replay(deliveries.app, letter.id)

    refused("released")
    row = record(connection, id)
    assert row is not None
    held = op.started(connection, id, fingerprint=row.fingerprint)
    refused("started")
    ends.complete(connection, held, "5", retention=60.0, lease=60.0)
    refused("completed")
    assert len(op.outbox(connection, id)) == 1


def test_a_letter_carries_the_key_that_the_call_gave(deliveries: Deliveries, connection: Connection) -> None:
    deliveries.deliver(b.failing, "a1", "permanent", key="given", tenant="acme")
    (letter,) = op.dead_letters(connection)
    assert (letter.tenant, letter.key) == ("acme", "given")
    assert replay(deliveries.app, letter.id) == OperationId("acme", b.failing.name, "given")
    (row,) = op.outbox(connection)
    assert Message.from_text(row.message).headers[KEY_HEADER] == "given"
    assert deliver_row(deliveries, b.failing, row).state == "FAILURE"
    assert [letter.generation for letter in op.dead_letters(connection)] == [1, 2]


@pytest.mark.parametrize("state", [op.started, op.expired, op.early, op.due, op.completed])
def test_only_a_letter_of_a_failed_operation_is_accepted(
    bank: Celery, connection: Connection, state: Callable[..., Any]
) -> None:
    id, failed = operation(b.deposit, "a1"), operation(b.deposit, "failed")
    state(connection, id)
    op.failed(connection, failed)
    before, rows = record(connection, id), op.outbox(connection, id)
    assert before is not None
    for each in (id, failed):
        row = record(connection, each)
        store_refusal(
            connection,
            delivery(row, each),
            generation=1,
            reason="delivery_limit",
            error=op.ERROR,
            service=op.SERVICE,
        )
    refused, accepted = op.dead_letters(connection)
    with pytest.raises(ReplayRefused, match=f"the operation is {before.status}"):
        replay(bank, refused.id)
    assert record(connection, id) == before
    assert op.outbox(connection, id) == rows
    assert replay(bank, accepted.id) == failed


def test_a_letter_of_an_earlier_failure_does_not_replay_a_later_one(
    deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(repairable, "a1")
    replay(deliveries.app, op.dead_letters(connection)[0].id)
    (row,) = op.outbox(connection)
    deliver_row(deliveries, repairable, row)
    connection.execute(text("UPDATE idempotency.dead_letters SET status = 'open', closed_at = NULL"))
    earlier, later = op.dead_letters(connection)
    with pytest.raises(ReplayRefused, match="only one that failed in the letter's generation"):
        replay(deliveries.app, earlier.id)
    assert replay(deliveries.app, later.id) == operation(repairable, "a1")
