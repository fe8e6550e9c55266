"""What a person may change: once, as it was shown to them, with its audit row; and nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, Row, text
from sqlalchemy.exc import DBAPIError, ProgrammingError

from idempotency import DidNotHappen, Happened, IdempotentTask, OperationFailed, OperationId
from idempotency.application import runtime_of
from idempotency.errors import ChangeRefused, InvalidResult, OperationNotFound
from idempotency.operate.cancel import cancel
from idempotency.operate.change import Change, Shown, audit, find, read
from idempotency.operate.forget import forget_process
from idempotency.operate.release import release
from idempotency.operate.resolve import resolve_effect
from idempotency.store import dead_letters as letters
from idempotency.store import ends
from idempotency.upkeep.presence import SignOfLife
from tests.support import bank as b
from tests.support import operations as op
from tests.support.bank import failures
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import operation
from tests.support.operators import ANN, snapshot
from tests.support.outside import OutsideWorld


def audits(connection: Connection) -> Sequence[Row[Any]]:
    return connection.execute(text("SELECT * FROM idempotency.audit ORDER BY id")).all()


# ---------------------------------------------------------------- the audit table


@pytest.mark.parametrize(
    "statement",
    ["UPDATE {} SET reason = 'x'", "DELETE FROM {}", "TRUNCATE {}", "UPDATE {} SET reason = 'x' WHERE false"],
)
@pytest.mark.parametrize("role", ["origin", "replica"])
def test_an_audit_row_cannot_be_changed_even_by_a_superuser(superuser: Engine, statement: str, role: str) -> None:
    connection = superuser.connect()
    connection.execute(text("INSERT INTO idempotency.audit (actor, action, reason) VALUES ('ann', 'release', 'r')"))
    before = audits(connection)
    # under `replica` ordinary triggers are silent
    connection.execute(text(f"SET session_replication_role = {role}"))
    with pytest.raises(ProgrammingError, match="append-only"):
        connection.execute(text(statement.format("idempotency.audit")))
    assert audits(connection) == before
    connection.close()


# ---------------------------------------------------------------- release


def test_a_release_delivers_again_and_fences_the_holder_off(bank: Celery, connection: Connection) -> None:
    held = op.started(connection, operation(b.deposit))
    shown = read(connection, held.id, op.SERVICE)
    release(bank, shown, ANN)

    row = op.record(connection, held.id)
    assert (row.status, row.attempts, row.token) == ("released", 1, None)
    assert [sent.origin for sent in op.outbox(connection, held.id)] == ["retry"]
    (entry,) = audits(connection)
    assert (entry.actor, entry.action, entry.reason, entry.key) == ("ann", "release", "ticket 42", "a")
    assert (entry.fence_before, entry.generation) == (held.fence, 1)
    assert entry.details == {"holder": op.HOLDER}
    assert not ends.release(connection, held, delay=0, error=None)


@pytest.mark.parametrize("make", [op.early, op.due, op.completed, op.failed])
def test_only_a_started_operation_can_be_released(bank: Celery, connection: Connection, make: Any) -> None:
    held = make(connection, operation(b.deposit))
    before = snapshot(connection)
    with pytest.raises(ChangeRefused, match="can only release what is started"):
        release(bank, read(connection, held.id, op.SERVICE), ANN)
    assert snapshot(connection) == before


def test_two_operators_at_once_release_once(bank: Celery, connection: Connection) -> None:
    shown = read(connection, op.started(connection, operation(b.deposit)).id, op.SERVICE)

    def attempt(number: int) -> str:
        try:
            release(bank, shown, Change(f"operator {number}", "stuck"))
        except ChangeRefused as error:
            return str(error)
        return "released"

    answers = op.at_once(4, attempt)
    assert answers.count("released") == 1
    assert sum("look again" in answer for answer in answers) == 3
    assert len(audits(connection)) == len(op.outbox(connection)) == 1


def test_a_release_under_another_holders_fence_is_refused(bank: Celery, connection: Connection) -> None:
    shown = read(connection, op.expired(connection, operation(b.deposit)).id, op.SERVICE)
    op.started(connection, shown.id)  # taken over meanwhile
    before = snapshot(connection)
    with pytest.raises(ChangeRefused, match="is started now; look again"):
        release(bank, shown, ANN)
    assert snapshot(connection) == before


def test_a_release_against_a_finishing_worker_has_one_winner(
    bank: Celery, deliveries: Deliveries, connection: Connection, entries: Any
) -> None:
    inside, go = threading.Event(), threading.Event()

    @bank.task(base=IdempotentTask, bind=True, key="{account}", name="tests.finishing")
    def finishing(self: IdempotentTask, account: str) -> str:
        self.session.execute(b.INSERT, {"account": account, "amount": 1})
        inside.set()
        assert go.wait(30)
        return account

    outcomes = []
    for number in range(6):
        inside.clear(), go.clear()
        key = f"a{number}"
        worker = threading.Thread(target=deliveries.deliver, args=(finishing, key))
        worker.start()
        assert inside.wait(30)
        shown = read(connection, operation(finishing, key), op.SERVICE)
        go.set()
        try:
            release(bank, shown, ANN)
            outcomes.append("released")
        except ChangeRefused:
            outcomes.append("refused")
        worker.join(30)
        status = op.record(connection, shown.id).status
        if outcomes[-1] == "released":
            # the worker's finish matched nothing; its second claim may have completed since
            assert (status, entries(key)) in [("released", 0), ("completed", 1)]
        else:
            assert (status, entries(key)) == ("completed", 1)
    assert len(audits(connection)) == outcomes.count("released")


# ---------------------------------------------------------------- cancel


def test_a_cancelled_operation_has_a_dead_letter_and_rows_of_on_failed(
    bank: Celery, deliveries: Deliveries, connection: Connection, entries: Any
) -> None:
    assert deliveries.deliver(b.failing, "a", "flaky").state == "RETRY"
    shown = read(connection, operation(b.failing), op.SERVICE)
    cancel(bank, shown, ANN)

    row = op.record(connection, shown.id)
    assert (row.status, json.loads(row.error)) == ("failed", {"code": "cancelled", "message": "ticket 42"})
    assert json.loads(row.first_error)["code"] == "ValueError"
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.status, letter.attempts, letter.payload) == ("cancelled", "open", 1, row.message)
    assert failures(connection.engine) == [("a", "cancelled")]
    (entry,) = audits(connection)
    assert (entry.action, entry.fence_before, entry.fence_after) == ("cancel", shown.fence, row.fence)
    # the delivery that was on its way, and then a replay
    late = deliver_row(deliveries, b.failing, op.outbox(connection)[0])
    assert isinstance(late.value, OperationFailed)
    assert entries("a") == 0
    with runtime_of(bank).engine.begin() as transaction:
        letters.replay(transaction, letter.id)
    assert op.record(connection, shown.id).status == "released"


@pytest.mark.parametrize("published", [False, True])
def test_an_accepted_operation_without_a_record_is_cancelled(
    bank: Celery, deliveries: Deliveries, connection: Connection, entries: Any, published: bool
) -> None:
    with runtime_of(bank).engine.begin() as transaction:
        b.deposit.enqueue(transaction, "a", 5)
    if published:
        connection.execute(text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()"))
    shown = read(connection, find(connection, "a", op.SERVICE), op.SERVICE)
    assert shown == Shown(operation(b.deposit), "accepted", None)
    cancel(bank, shown, ANN)

    row = op.record(connection, shown.id)
    assert (row.status, row.attempts) == ("failed", 0)
    assert (len(op.dead_letters(connection)), failures(connection.engine)) == (1, [("a", "cancelled")])
    assert [entry.details for entry in audits(connection)] == [{"was": "accepted", "ended_as": "cancelled"}]
    (sent,) = op.outbox(connection)
    late = deliver_row(deliveries, b.deposit, sent)
    assert (type(late.value), late.value.code, entries("a")) == (OperationFailed, "cancelled", 0)


def test_an_accepted_operation_that_has_begun_meanwhile_is_not_cancelled(
    bank: Celery, deliveries: Deliveries, connection: Connection, entries: Any
) -> None:
    with runtime_of(bank).engine.begin() as transaction:
        b.deposit.enqueue(transaction, "a", 5)
    shown = read(connection, operation(b.deposit), op.SERVICE)
    deliver_row(deliveries, b.deposit, op.outbox(connection)[0])
    before = snapshot(connection)
    with pytest.raises(ChangeRefused, match="has begun since"):
        cancel(bank, shown, ANN)
    assert (snapshot(connection), entries("a")) == (before, 1)


@pytest.mark.parametrize("make", [op.started, op.completed, op.failed])
def test_what_has_begun_or_ended_is_not_cancelled(bank: Celery, connection: Connection, make: Any) -> None:
    held = make(connection, operation(b.deposit))
    before = snapshot(connection)
    with pytest.raises(ChangeRefused, match="can only cancel what has not begun or waits for its next attempt"):
        cancel(bank, read(connection, held.id, op.SERVICE), ANN)
    assert snapshot(connection) == before


def test_a_cancel_and_a_claim_at_once_have_one_winner(
    bank: Celery, deliveries: Deliveries, connection: Connection, entries: Any
) -> None:
    for number in range(5):
        key = f"a{number}"
        with runtime_of(bank).engine.begin() as transaction:
            b.deposit.enqueue(transaction, key)
        shown = read(connection, operation(b.deposit, key), op.SERVICE)

        def act(index: int, key: str = key, shown: Shown = shown) -> str:
            if index == 0:
                return deliveries.deliver(b.deposit, key).state
            try:
                cancel(bank, shown, ANN)
            except ChangeRefused:
                return "refused"
            return "cancelled"

        delivered, cancelled = op.at_once(2, act)
        assert (delivered, cancelled) in [("SUCCESS", "refused"), ("FAILURE", "cancelled")]
        assert entries(key) == (cancelled == "refused")
        assert len(op.dead_letters(connection, shown.id)) == (cancelled == "cancelled")


def test_a_broken_on_failed_does_not_prevent_cancelling_the_operation(
    bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    def broken(session: Any, operation: Any, error: Any) -> None:
        session.execute(text("INSERT INTO failures (account, code) VALUES ('half', 'done')"))
        raise ValueError("a bug")

    @bank.task(base=IdempotentTask, bind=True, key="{account}", name="tests.broken", on_failed=broken)
    def fragile(self: IdempotentTask, account: str) -> None:
        raise ValueError(account)

    deliveries.deliver(fragile, "a")
    cancel(bank, read(connection, operation(fragile), op.SERVICE), ANN)
    assert [letter.reason for letter in op.dead_letters(connection)] == ["on_failed_error"]
    assert failures(connection.engine) == []
    assert audits(connection)[0].details["on_failed_error"] == "ValueError: a bug"


def test_another_applications_operation_is_cancelled_only_on_request(bank: Celery, connection: Connection) -> None:
    held = op.early(connection, OperationId("t", "elsewhere.task", "a"))
    with pytest.raises(ChangeRefused, match="this application has no such task"):
        cancel(bank, read(connection, held.id, op.SERVICE), ANN)
    assert op.record(connection, held.id).status == "released"
    cancel(bank, read(connection, held.id, op.SERVICE), ANN, without_task=True)
    assert op.record(connection, held.id).status == "failed"
    assert len(op.dead_letters(connection)) == len(audits(connection)) == 1


# ---------------------------------------------------------------- an effect with an unknown outcome


@pytest.fixture
def unknown(
    deliveries: Deliveries, connection: Connection, outside: OutsideWorld, monkeypatch: pytest.MonkeyPatch
) -> OperationId:
    """A transfer whose call was made, whose answer was lost, and whose key the provider has forgotten since."""
    outside.script = ["fail after"]
    assert deliveries.deliver(b.transfer, "a", outside.url).state == "RETRY"
    connection.execute(text("UPDATE idempotency.records SET effects = jsonb_set(effects, '{call,begun_at}', '1')"))
    op.age(connection, operation(b.transfer), available_at=-1)
    outcome = deliveries.deliver(b.transfer, "a", outside.url)
    assert getattr(outcome.value, "code", None) == "effect_unknown", outcome
    return operation(b.transfer)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("word", "amount", "acts"), [(Happened({"amount": 3}), 3, 1), (DidNotHappen(), 7, 2)], ids=["happened", "not"]
)
def test_a_persons_word_and_a_replay_bring_an_unknown_effect_to_its_end(
    bank: Celery,
    deliveries: Deliveries,
    connection: Connection,
    outside: OutsideWorld,
    entries: Any,
    unknown: OperationId,
    word: Any,
    amount: int,
    acts: int,
) -> None:
    resolve_effect(bank, read(connection, unknown, op.SERVICE), "call", word, ANN)
    (entry,) = audits(connection)
    assert (entry.action, entry.details["effect"]) == ("resolve", "call")
    (letter,) = op.dead_letters(connection)
    with runtime_of(bank).engine.begin() as transaction:
        letters.replay(transaction, letter.id)

    (replayed,) = [row for row in op.outbox(connection) if row.origin == "replay"]
    outcome = deliver_row(deliveries, b.transfer, replayed)
    assert (outcome.state, outcome.value) == ("SUCCESS", {"amount": amount})
    # "did not happen" calls under another key: the person said so
    assert (sum(outside.acts.values()), set(outside.calls.values())) == (acts, {1})
    assert (entries("a"), entries("a/step")) == (1, 1)


def test_an_effect_is_resolved_once_and_only_where_its_outcome_is_unknown(
    bank: Celery, connection: Connection, unknown: OperationId
) -> None:
    shown = read(connection, unknown, op.SERVICE)
    before = snapshot(connection)
    with pytest.raises(ChangeRefused, match="no effect 'other'; it has: call"):
        resolve_effect(bank, shown, "other", DidNotHappen(), ANN)
    with pytest.raises(ChangeRefused, match="no effect 'reserve'"):  # a step
        resolve_effect(bank, shown, "reserve", DidNotHappen(), ANN)
    with pytest.raises(InvalidResult, match="at most"):
        resolve_effect(bank, shown, "call", Happened("x" * 300_000), ANN)
    assert snapshot(connection) == before

    def attempt(_: int) -> bool:
        try:
            resolve_effect(bank, shown, "call", DidNotHappen(), ANN)
        except ChangeRefused:
            return False
        return True

    assert sorted(op.at_once(2, attempt)) == [False, True]
    assert len(audits(connection)) == 1


def test_an_operation_that_failed_otherwise_has_nothing_to_resolve(
    bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(b.failing, "a", "permanent")
    with pytest.raises(ChangeRefused, match="has no effect 'call'; it has: none"):
        resolve_effect(bank, read(connection, operation(b.failing), op.SERVICE), "call", DidNotHappen(), ANN)
    assert audits(connection) == []


# ---------------------------------------------------------------- finding, and saying why


def test_a_key_of_several_operations_is_refused_with_the_choices(connection: Connection) -> None:
    for id in (OperationId("t1", "one", "a"), OperationId("t2", "one", "a"), OperationId("t1", "two", "a")):
        op.started(connection, id)
    with pytest.raises(ChangeRefused, match=r"3 operations have it.*--task one --tenant t2"):
        find(connection, "a", op.SERVICE)
    with pytest.raises(ChangeRefused, match="2 operations"):
        find(connection, "a", op.SERVICE, task="one")
    assert find(connection, "a", op.SERVICE, task="one", tenant="t2") == OperationId("t2", "one", "a")
    with pytest.raises(OperationNotFound, match="key 'b': no operation has it"):
        find(connection, "b", op.SERVICE)
    with pytest.raises(OperationNotFound, match="key 'a': no operation of 'on' has it, but one of one, two does"):
        find(connection, "a", op.SERVICE, task="on")


@pytest.mark.parametrize(("actor", "reason"), [("", "r"), ("a" * 256, "r"), ("a", " "), ("a", "r" * 501)])
def test_a_change_says_who_and_why(actor: str, reason: str) -> None:
    with pytest.raises(ChangeRefused, match=r"^--(as|reason): 1 to \d+ characters"):
        Change(actor, reason)


def test_a_change_without_its_audit_row_is_no_change(bank: Celery, connection: Connection) -> None:
    shown = read(connection, op.started(connection, operation(b.deposit)).id, op.SERVICE)
    connection.execute(text("ALTER TABLE idempotency.audit RENAME TO audit_gone"))
    with pytest.raises(DBAPIError):
        release(bank, shown, ANN)
    assert op.record(connection, shown.id).status == "started"
    assert op.outbox(connection) == []


def test_details_that_are_no_text_to_postgres_are_audited(connection: Connection) -> None:
    audit(connection, ANN, "cancel", None, None, details={"on_failed_error": "a\0b\ud800", "dead_letter": 1})
    details = connection.execute(text("SELECT details FROM idempotency.audit")).scalar_one()
    assert details == {"on_failed_error": "a\ufffdb?", "dead_letter": 1}


# ---------------------------------------------------------------- forget


def test_every_process_that_is_forgotten_has_its_audit_row(bank: Celery, connection: Connection) -> None:
    for kind in ("worker", "beat"):
        SignOfLife(bank, kind, "gone@host").sign()
    change = Change("ann", "scaled down", "request-1")
    with pytest.raises(ChangeRefused, match="no process of this name is silent"):
        forget_process(bank, "gone@host", change)
    assert audits(connection) == []
    connection.execute(text("UPDATE idempotency.processes SET seen_at = seen_at - interval '2 min'"))
    assert forget_process(bank, "gone@host", change) == 2
    found = [(row.actor, row.action, row.reason, row.details["kind"]) for row in audits(connection)]
    assert sorted(found) == [("ann", "forget", "scaled down", kind) for kind in ("beat", "worker")]
