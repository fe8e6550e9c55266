"""What another reader proved wrong about calls, leases, messages, letters and parts, each held to what is right."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from idempotency import (
    AttemptsExhausted,
    FingerprintMismatch,
    IdempotentTask,
    Operation,
    OperationId,
    PermanentError,
    SessionNotYours,
    StillUnknown,
)
from idempotency.attempt.runtime import Runtime
from idempotency.letters import dead_letter_queue
from idempotency.letters.dead_letter_queue import ON_FAILED_TRIES, DeadLetterConsumer
from idempotency.operate import operators
from idempotency.relay.reconcile import reconcile
from idempotency.store import records
from idempotency.upkeep import maintenance
from idempotency.wire import keys
from idempotency.wire.message import FINGERPRINT_HEADER, KEY_HEADER
from tests.integration.test_proven_attempts import commit_in_sql
from tests.integration.test_purge import SETTLED, a_retention_later, deliver_again, past_its_time
from tests.integration.test_stuck_letters import body as message_body
from tests.support import bank as b
from tests.support import operations as op
from tests.support.bank import INSERT
from tests.support.dead_messages import die, headers
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import Entries, Record, code, deaths, make_due
from tests.support.operators import ANN, replay, shown
from tests.support.tasks import Provider, lost, make_task, told, told_codes, unwrite, write


def pay(self: Any) -> str:
    self.session.execute(INSERT, {"account": "paid", "amount": 1})
    return "paid"


# ---------------------------------------------------------------- calls


def keyed(function: Any) -> Any:
    """How a gateway is often made: a wrapper turns the key into a header of the client that it hands in."""

    @functools.wraps(function)
    def call(*args: Any, idempotency_key: str, **kwargs: Any) -> Any:
        return function({"Idempotency-Key": idempotency_key}, *args, **kwargs)

    return call


@keyed
def charge(headers: dict[str, str], amount: int) -> str:
    return f"charged {amount}"


def order(*, idempotency_key: str, **of: str) -> str:
    return f"ordered {of}"


@pytest.mark.parametrize(
    ("call", "arguments", "result"),
    [
        (charge, {"amount": 5}, "charged 5"),
        (order, {"what": "shoes"}, "ordered {'what': 'shoes'}"),
        (order, {"function": "shoes"}, "ordered {'function': 'shoes'}"),
    ],
    ids=["through a decorator", "named what", "named function"],
)
def test_an_effect_takes_every_call_that_its_function_takes(
    bank: Celery, deliveries: Deliveries, call: Any, arguments: dict[str, Any], result: str
) -> None:
    task = make_task(bank, lambda self: self.effect("call", call, **arguments))
    assert deliveries.deliver(task, key="k").value == result


def test_a_signature_that_a_deploy_broke_leaves_the_other_attempts(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    """The next release repairs it, and the effect that was begun is completed."""
    provider = Provider(lost())
    reconciles: list[Any] = [lambda doubt: StillUnknown()]
    task = make_task(bank, lambda self: self.effect("call", provider, reconcile=reconciles[-1]))
    for found in (None, lambda in_doubt: StillUnknown()):
        reconciles += [found] if found else []
        assert deliveries.deliver(task, key="k", origin="retry").state == "RETRY"
        make_due(engine, "k")
    reconciles.pop()
    assert deliveries.deliver(task, key="k", origin="retry").value == {"charge": "ch_1"}
    assert (record("k").attempts, len(set(provider.keys))) == (3, 1)


# ---------------------------------------------------------------- attempts


def test_an_eager_call_that_meets_a_lock_raises_it_and_uses_no_attempt(
    bank: Celery, engine: Engine, record: Record
) -> None:
    runs: list[int] = []

    def body(self: Any) -> str:
        runs.append(1)
        self.session.execute(text("SET LOCAL lock_timeout = '1ms'"))
        self.session.execute(text("LOCK entries"))
        return "paid"

    task = make_task(bank, body, max_attempts=2)
    # past SQLAlchemy: to an eager call a transaction of this thread would be its caller's
    with psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(hide_password=False)) as holder:
        holder.execute("LOCK entries")
        for _ in range(3):
            with pytest.raises(OperationalError, match="lock timeout"):
                task.apply(idempotency_key="k", throw=True).get()
            assert (record("k").status, record("k").attempts) == ("released", 0)
            make_due(engine, "k")
    assert task.apply(idempotency_key="k", throw=True).get() == "paid"
    assert len(runs) == 4


def test_an_older_relay_neither_ends_nor_marks_what_workers_would_try(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    """A rolling deploy raises max_attempts; a death is swept by a relay that has the old number."""
    fails = [True]

    def body(self: Any) -> str:
        if fails:
            fails.clear()
            raise ValueError("again")
        return pay(self)

    task = make_task(bank, body, max_attempts=20)
    deliveries.deliver(task, key="k")
    deaths(engine, "k", 6)
    type(task).max_attempts = 5  # the relay's code
    maintenance.recover(bank)
    assert (record("k").status, record("k").spent_at) == ("released", None)
    type(task).max_attempts = 20
    assert deliveries.deliver(task, key="k", origin="recover").value == "paid"


class GaveUp(AttemptsExhausted):
    default_code = "gave_up"


@pytest.mark.parametrize(
    ("script", "ended"),
    [(None, ("gave_up", None)), ([], ("unfinished", "gave_up")), ([lost()], ("effect_unknown", "gave_up"))],
    ids=["nothing begun", "happened", "open"],
)
def test_a_body_that_gives_up_keeps_its_own_code_and_message(
    bank: Celery, deliveries: Deliveries, record: Record, script: list[Exception] | None, ended: Any
) -> None:
    def body(self: Any) -> None:
        try:
            if script is not None:
                self.effect("call", Provider(*script))
        finally:
            raise GaveUp("the bank has closed the account")

    assert deliveries.deliver(make_task(bank, body), key="k").state == "FAILURE"
    assert (code(record("k")), record("k").attempts) == (ended, 1)
    assert "the bank has closed the account" in record("k").error


# ---------------------------------------------------------------- leases by the process's clock


def test_a_body_that_holds_the_interpreter_beyond_its_lease_completes(
    bank: Celery, deliveries: Deliveries, record: Record
) -> None:
    """A C extension keeps the GIL: the heartbeat is late, and the operation was not taken by another attempt."""
    runs: list[int] = []

    def body(self: Any) -> str:
        runs.append(1)
        (holding,) = Runtime.of(bank).heartbeat._holdings.values()
        holding.renewed_at -= 61.0
        return pay(self)

    assert deliveries.deliver(make_task(bank, body, max_attempts=2), key="k").value == "paid"
    assert (len(runs), record("k").status, record("k").attempts) == (1, "completed", 1)


def test_an_answer_to_a_claim_that_takes_a_lease_begins_the_body_once(
    bank: Celery, deliveries: Deliveries, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage, say."""
    runs: list[str] = []
    claim = records.claim

    def wait_for_the_answer(*args: Any, **options: Any) -> records.Answer:
        answer = claim(*args, **options)
        return replace(answer, asked_at=answer.asked_at - 61.0) if isinstance(answer, records.Claimed) else answer

    def body(self: Any) -> str:
        runs.append("the client's mail is written")
        return pay(self)

    monkeypatch.setattr(records, "claim", wait_for_the_answer)
    assert deliveries.deliver(make_task(bank, body), key="k").value == "paid"
    assert (len(runs), record("k").attempts) == (1, 1)


# ---------------------------------------------------------------- messages and rows


def test_a_message_with_other_arguments_gets_no_strangers_result(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    """A body edited by hand, or by a script that shovels messages, keeps its headers."""
    deliveries.deliver(b.deposit, "a", 5)
    edited = deliveries.deliver(b.deposit, "a", 600, headers={FINGERPRINT_HEADER: record("a").fingerprint})
    assert isinstance(edited.value, FingerprintMismatch)
    assert [letter.reason for letter in op.dead_letters(connection)] == ["fingerprint_mismatch"]


def test_a_message_with_other_arguments_does_not_run_as_the_accepted_one(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    runs: list[int] = []

    def body(self: Any, amount: int) -> int:
        runs.append(amount)
        if len(runs) == 1:
            raise ValueError("again")
        return amount

    task = make_task(bank, body)
    deliveries.deliver(task, 5, key="k")
    make_due(engine, "k")
    accepted = {FINGERPRINT_HEADER: record("k").fingerprint}
    assert isinstance(deliveries.deliver(task, 600, key="k", headers=accepted).value, FingerprintMismatch)
    assert deliveries.deliver(task, 5, key="k", headers=accepted).value == 5
    assert (runs, record("k").fingerprint) == ([5, 5], accepted[FINGERPRINT_HEADER])


def test_a_fingerprint_that_cannot_be_read_is_ignored(bank: Celery, deliveries: Deliveries, record: Record) -> None:
    """Half a surrogate pair: AMQP carries it, and Postgres does not."""
    unreadable = {FINGERPRINT_HEADER: "v1:\ud800"}
    assert deliveries.deliver(b.deposit, "a", 5, headers=unreadable).state == "SUCCESS"
    assert record("a").fingerprint.isascii()
    assert isinstance(deliveries.deliver(b.deposit, "a", 6, headers=unreadable).value, FingerprintMismatch)


def test_a_parameter_renamed_before_the_first_attempt_makes_no_letter(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    def old(self: Any, account: str) -> None: ...

    def new(self: Any, account_id: str) -> str:
        return account_id

    task = make_task(bank, old)
    with Session(engine) as session, session.begin():
        task.enqueue(session, "a", idempotency_key="k")
    op.sent(connection, op.outbox(connection)[0])
    del bank.tasks[task.name]
    renamed = bank.task(base=IdempotentTask, bind=True, name=task.name, shared=False)(new)
    assert deliver_row(deliveries, renamed, op.outbox(connection)[0]).value == "a"
    assert record("k").fingerprint == op.outbox(connection)[0].fingerprint
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '2 days'"))
    reconcile(bank, lambda queue: 0)
    (row,) = op.outbox(connection)
    assert (row.settled_at is not None, op.dead_letters(connection)) == (True, [])


def test_a_key_that_is_sent_again_keeps_its_record_and_no_old_rows(bank: Celery, connection: Connection) -> None:
    """A client that repeats its request once in a redelivery horizon."""
    id = past_its_time(connection)
    for _ in range(3):
        deliver_again(connection, id, **SETTLED)
    just_now = dict.fromkeys(("published_at", "settled_at"), "clock_timestamp()")
    deliver_again(connection, id, **SETTLED | just_now)
    a_retention_later(connection)
    assert maintenance.purge(bank) == 0
    assert (op.record(connection, id) is not None, len(op.outbox(connection, id))) == (True, 1)


# ---------------------------------------------------------------- letters


def test_the_letter_of_what_the_relay_could_not_handle_can_be_replayed(
    bank: Celery, deliveries: Deliveries, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter_queue, "HELD_PAUSE", 0.0)
    id = OperationId("default", b.deposit.name, "stuck")
    op.due(connection, id)
    accepted = keys.fingerprint({"account": "stuck"})
    for table in ("records", "outbox"):
        connection.execute(text(f"UPDATE idempotency.{table} SET fingerprint = '{accepted}'"))
    marks = op.sent(connection, id)
    connection.execute(
        text("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON idempotency.dead_letters FOR EACH ROW
        WHEN (NEW.reason <> 'unhandled') EXECUTE FUNCTION refuse()""")
    )
    consumer = DeadLetterConsumer(bank)
    stuck = headers(expires="2001-01-01T00:00:00+00:00", **{KEY_HEADER: "stuck"}) | marks
    die(bank, consumer, message_body("stuck"), headers=stuck)
    for _ in range(ON_FAILED_TRIES + 2):
        consumer.run_once()
    consumer.close()
    connection.execute(text("DROP FUNCTION refuse() CASCADE"))
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.operation, letter.key) == ("unhandled", id.operation, "stuck")
    before = len(op.outbox(connection))
    operators.replay(bank, letter.id, ANN)
    (row,) = op.outbox(connection)[before:]
    assert deliver_row(deliveries, b.deposit, row).state == "SUCCESS"


# ---------------------------------------------------------------- the application's part of an end


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "statement", ["COMMIT", "/* done */ end", "-- done\nROLLBACK WORK", "abort", "PREPARE TRANSACTION 'x'"]
)
def test_a_body_that_ends_its_transaction_in_sql_is_refused(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries, statement: str
) -> None:
    def body(self: Any) -> None:
        pay(self)
        self.session.execute(text(statement))

    assert isinstance(deliveries.deliver(make_task(bank, body), key="k").value, SessionNotYours)
    assert (code(record("k")), entries("paid")) == (("session_not_yours", None), 0)


def test_a_body_may_roll_back_to_its_own_savepoint_in_sql(
    bank: Celery, deliveries: Deliveries, entries: Entries
) -> None:
    def body(self: Any) -> str:
        self.session.execute(text("SAVEPOINT mine"))
        pay(self)
        self.session.execute(text("ROLLBACK TO SAVEPOINT mine"))
        return pay(self)

    assert deliveries.deliver(make_task(bank, body), key="k").value == "paid"
    assert entries("paid") == 1


@pytest.mark.filterwarnings("ignore")
def test_an_undo_is_not_committed_by_on_failed_and_a_replay_repeats_its_step(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries
) -> None:
    declined = [True]

    def body(self: Any) -> str:
        self.step("reserve", write, "reserved", undo=unwrite)
        if declined:
            raise PermanentError("no", "declined")
        return pay(self)

    task = make_task(bank, body, on_failed=commit_in_sql)
    deliveries.deliver(task, key="k")
    assert (code(record("k")), told_codes()) == (("declined", None), ["declined"])
    assert (entries("reserved"), entries("undone reserved")) == (0, 1)
    assert "on_failed_error" in [letter.reason for letter in op.dead_letters(connection)]
    declined.clear()
    assert replay(bank, connection, deliveries, task).value == "paid"
    assert (record("k").status, entries("paid"), entries("reserved")) == ("completed", 1, 1)


@pytest.mark.filterwarnings("ignore")
def test_an_accepted_operation_is_cancelled_although_on_failed_commits(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record, entries: Entries
) -> None:
    task = make_task(bank, pay, on_failed=commit_in_sql)
    with Session(engine) as session, session.begin():
        task.enqueue(session, idempotency_key="k")
    operators.cancel(bank, shown(connection, task), ANN)
    assert (code(record("k"))[0], told_codes()) == ("cancelled", ["cancelled"])
    assert connection.execute(text("SELECT count(*) FROM failures")).scalar_one() == 0
    assert connection.execute(text("SELECT action FROM idempotency.audit")).scalars().all() == ["cancel"]
    assert deliver_row(deliveries, task, op.outbox(connection)[0]).state != "SUCCESS"
    assert entries("paid") == 0


@pytest.mark.filterwarnings("ignore")
def test_a_dead_message_gets_its_letter_although_on_failed_commits(
    bank: Celery, connection: Connection, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bank.tasks[b.deposit.name], "on_failed", commit_in_sql)
    consumer = DeadLetterConsumer(bank)
    die(bank, consumer, headers=headers(expires="2001-01-01T00:00:00+00:00"))
    consumer.run_once()
    consumer.close()
    assert (record("a1").status, told_codes()) == ("failed", ["expired"])
    (letter,) = op.dead_letters(connection)
    assert (letter.operation, letter.key, letter.status) == (b.deposit.name, "a1", "open")


@pytest.fixture
def role(connection: Connection) -> Iterator[str]:
    """A tenant's role with rights on the application's tables and none on the library's."""
    name = "proven_tenant"
    connection.execute(text(f"CREATE ROLE {name} NOLOGIN"))
    connection.execute(text(f"GRANT ALL ON failures, entries TO {name}"))
    connection.execute(text(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {name}"))
    yield name
    connection.execute(text(f"DROP OWNED BY {name}"))
    connection.execute(text(f"DROP ROLE {name}"))


def test_an_end_goes_on_after_an_on_failed_that_has_set_its_role(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, role: str
) -> None:
    """Row level security by `SET LOCAL ROLE`, which outlives its savepoint."""

    def handler(session: Session, operation: Operation, error: PermanentError) -> None:
        told.append((error.code, operation))
        session.execute(text(f"SET LOCAL ROLE {role}"))
        session.execute(text("INSERT INTO failures (account, code) VALUES ('told', 'x')"))

    def body(self: Any) -> None:
        raise PermanentError("no", "declined")

    assert deliveries.deliver(make_task(bank, body, on_failed=handler), key="k").state == "FAILURE"
    assert (code(record("k")), told_codes()) == (("declined", None), ["declined"])
    assert connection.execute(text("SELECT count(*) FROM failures")).scalar_one() == 1
