"""What a task promises, delivery by delivery, on real Postgres and Redis."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry
from sqlalchemy import text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from idempotency import (
    FingerprintMismatch,
    InvalidArguments,
    InvalidKey,
    InvalidResult,
    MissingKey,
    OperationFailed,
    PermanentError,
    SessionNotYours,
    lookup,
)
from tests.support import bank, crashing
from tests.support.bank import failures
from tests.support.deliveries import Deliveries
from tests.support.hints import leave_hint
from tests.support.operations import Entries, Record, make_due
from tests.support.processes import eventually
from tests.support.tasks import ROW, make_task, transactional

# ---------------------------------------------------------------- duplicates


def test_a_duplicate_gets_the_stored_result_and_runs_nothing(deliveries: Deliveries, entries: Entries) -> None:
    first = deliveries.deliver(bank.deposit, "a", amount=5)
    second = deliveries.deliver(bank.deposit, "a", amount=5)

    assert (first.state, second.state) == ("SUCCESS", "SUCCESS")
    assert first.value == second.value == {"account": "a", "amount": 5}
    assert entries("a") == 1


def test_a_positional_and_a_keyword_call_are_one(deliveries: Deliveries, entries: Entries) -> None:
    deliveries.deliver(bank.deposit, "a", 5)
    assert deliveries.deliver(bank.deposit, amount=5, account="a").state == "SUCCESS"
    assert entries("a") == 1


def test_one_key_with_other_arguments_is_refused_and_kept_as_a_dead_letter(
    deliveries: Deliveries, entries: Entries, engine: Engine, record: Record
) -> None:
    deliveries.deliver(bank.deposit, "a", 5)
    before = record("a")
    refused = deliveries.deliver(bank.deposit, "a", 6)

    assert isinstance(refused.value, FingerprintMismatch)
    assert entries("a") == 1
    assert record("a") == before
    with engine.connect() as connection:
        letter = connection.execute(text("SELECT reason, payload, status FROM idempotency.dead_letters")).one()
    assert (letter.reason, letter.status) == ("fingerprint_mismatch", "open")
    assert json.loads(json.loads(letter.payload)["body"])[0] == ["a", 6]


@pytest.mark.parametrize("value", [None, 0, "", [], {}, False, 1e16, -0.0, "a\u0000b", {"b": 1, "a": {"c": []}}])
def test_every_result_survives_byte_for_byte(deliveries: Deliveries, record: Record, value: Any) -> None:
    first = deliveries.deliver(bank.returning, value, key="k")
    stored = record("k").result
    second = deliveries.deliver(bank.returning, value, key="k")

    assert json.dumps(first.value) == json.dumps(second.value) == json.dumps(value)
    assert record("k").result == stored


@pytest.mark.parametrize(
    ("value", "says"), [({1, 2}, "set"), (float("nan"), "float"), ("x" * 300_000, "262144"), (object(), "object")]
)
def test_a_result_that_cannot_be_stored_commits_nothing(
    bank: Celery, deliveries: Deliveries, entries: Entries, record: Record, value: Any, says: str
) -> None:
    task = make_task(bank, lambda self: (self.session.execute(ROW), value)[1])
    outcome = deliveries.deliver(task, key="k")

    assert isinstance(outcome.value, InvalidResult)
    assert says in str(outcome.value)
    assert record("k").status == "failed"
    assert entries("row") == 0


def test_tenants_share_keys_without_meeting(deliveries: Deliveries, entries: Entries) -> None:
    deliveries.deliver(bank.deposit, "a", 5, tenant="one")
    assert deliveries.deliver(bank.deposit, "a", 6, tenant="two").state == "SUCCESS"
    assert entries("a") == 2


# ---------------------------------------------------------------- who may be acknowledged while it runs


def in_flight(deliveries: Deliveries, task: Any, *args: Any, **kwargs: Any) -> Any:
    """Start a delivery that holds inside its body until `go()`."""
    done = []
    thread = threading.Thread(target=lambda: done.append(deliveries.deliver(task, *args, **kwargs)))
    thread.start()
    return thread, done


def test_a_duplicate_in_flight_is_counted_and_let_go(
    bank: Celery,
    deliveries: Deliveries,
    entries: Entries,
    record: Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CRASH_DIRECTORY", str(tmp_path))
    crashing.plan(tmp_path, "working", crashing.HOLD)
    thread, done = in_flight(deliveries, bank_task("slow_deposit"), "a", 0.05)
    eventually((tmp_path / "working.held").exists)

    duplicates = [deliveries.deliver(bank_task("slow_deposit"), "a", 0.05) for _ in range(3)]
    (tmp_path / "working.go").touch()
    thread.join()

    assert [duplicate.state for duplicate in duplicates] == ["IGNORED"] * 3
    assert isinstance(duplicates[0].value, Ignore)
    assert done[0].state == "SUCCESS"
    assert entries("a") == 1
    # one write to Postgres; the counted mark let the others go from Redis alone
    assert record("a").duplicates == 1


def test_another_request_under_a_busy_key_is_refused_and_not_swallowed(
    bank: Celery, deliveries: Deliveries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRASH_DIRECTORY", str(tmp_path))
    crashing.plan(tmp_path, "working", crashing.HOLD)
    thread, _ = in_flight(deliveries, bank_task("slow_deposit"), "a", 0.05)
    eventually((tmp_path / "working.held").exists)
    deliveries.deliver(bank_task("slow_deposit"), "a", 0.05)  # sets the counted mark
    refused = deliveries.deliver(bank_task("slow_deposit"), "a", 9.0)
    (tmp_path / "working.go").touch()
    thread.join()

    assert isinstance(refused.value, FingerprintMismatch)


def test_a_resent_delivery_never_takes_redis_answer(
    deliveries: Deliveries, record: Record, engine: Engine, entries: Entries, redis_url: str
) -> None:
    # the holder died: recovery released the record, and Redis still has the dead holder's counted hint
    deliveries.deliver(bank.failing, "a", "value")
    make_due(engine, "a")
    leave_hint(redis_url, record("a"), counted=True)

    ordinary = deliveries.deliver(bank.failing, "a", "value")
    resent = deliveries.deliver(bank.failing, "a", "value", origin="recover")

    assert ordinary.state == "IGNORED"
    assert resent.state == "RETRY"
    assert record("a").attempts == 2


def test_redis_saying_busy_does_not_stop_a_claim_that_postgres_allows(
    deliveries: Deliveries, record: Record, engine: Engine, redis_url: str
) -> None:
    deliveries.deliver(bank.failing, "a", "value")
    make_due(engine, "a")
    leave_hint(redis_url, record("a"), counted=False)

    assert deliveries.deliver(bank.failing, "a", "value").state == "RETRY"
    assert record("a").attempts == 2


def test_a_released_operation_is_not_run_before_it_is_due(
    deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    deliveries.deliver(bank.failing, "a", "value")
    make_due(engine, "a", "1 hour")  # due in an hour
    early = deliveries.deliver(bank.failing, "a", "value", origin="retry")
    assert early.state == "IGNORED"
    assert (record("a").attempts, record("a").duplicates) == (1, 1)

    make_due(engine, "a", "-1 second")
    assert deliveries.deliver(bank.failing, "a", "value", origin="retry").state == "RETRY"


def test_flushing_redis_under_a_running_attempt_doubles_nothing(
    bank: Celery,
    deliveries: Deliveries,
    entries: Entries,
    record: Record,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CRASH_DIRECTORY", str(tmp_path))
    crashing.plan(tmp_path, "working", crashing.HOLD)
    thread, done = in_flight(deliveries, bank_task("slow_deposit"), "a", 0.05)
    eventually((tmp_path / "working.held").exists)
    with redis_client.Redis.from_url(redis_url) as client:
        client.flushall()
    duplicate = deliveries.deliver(bank_task("slow_deposit"), "a", 0.05)
    (tmp_path / "working.go").touch()
    thread.join()

    assert duplicate.state == "IGNORED"
    assert done[0].state == "SUCCESS"
    assert entries("a") == 1


def test_without_redis_claims_go_on_through_postgres_alone(
    environment: dict[str, str], deliveries: Deliveries, entries: Entries
) -> None:
    bank.configure(environment | {"REDIS_URL": "redis://127.0.0.1:1/0"})
    assert deliveries.deliver(bank.deposit, "a").state == "SUCCESS"
    assert deliveries.deliver(bank.deposit, "a").state == "SUCCESS"
    assert entries("a") == 1


# ---------------------------------------------------------------- how attempts end


def test_a_permanent_error_fails_at_once_with_its_rows_and_its_dead_letter(
    deliveries: Deliveries, entries: Entries, record: Record, engine: Engine
) -> None:
    outcome = deliveries.deliver(bank.failing, "a", "permanent")

    assert isinstance(outcome.value, PermanentError)
    assert (record("a").status, record("a").attempts, entries("a")) == ("failed", 1, 0)
    assert failures(engine) == [("a", "no_account")]
    with engine.connect() as connection:
        letter = connection.execute(text("SELECT * FROM idempotency.dead_letters")).one()
    assert (letter.reason, letter.generation, letter.attempts) == ("no_account", 1, 1)
    assert json.loads(letter.last_error) == {"code": "no_account", "message": "no such account", "declined": True}


def test_a_duplicate_of_a_failed_operation_gets_the_stored_error(deliveries: Deliveries, engine: Engine) -> None:
    deliveries.deliver(bank.failing, "a", "permanent")
    duplicate = deliveries.deliver(bank.failing, "a", "permanent")

    assert isinstance(duplicate.value, OperationFailed)
    assert (duplicate.value.code, str(duplicate.value)) == ("no_account", "no such account")
    assert failures(engine) == [("a", "no_account")]


def test_an_ordinary_error_is_retried_and_ends_as_a_dead_letter(
    deliveries: Deliveries, entries: Entries, record: Record, engine: Engine
) -> None:
    states = []
    for _ in range(3):
        states.append(deliveries.deliver(bank.failing, "a", "value", origin="retry").state)
        make_due(engine, "a")

    assert states == ["RETRY", "RETRY", "FAILURE"]
    assert (record("a").status, record("a").attempts, entries("a")) == ("failed", 3, 0)
    assert failures(engine) == [("a", "attempts_exhausted")]
    assert outbox(engine) == [("retry", "pending"), ("retry", "pending")]


def test_a_deferral_uses_no_attempt(deliveries: Deliveries, record: Record, engine: Engine) -> None:
    for _ in range(5):
        assert deliveries.deliver(bank.failing, "a", "defer", origin="retry").state == "RETRY"
        make_due(engine, "a")
    assert (record("a").status, record("a").attempts) == ("released", 0)


def test_a_deferral_beyond_its_budget_uses_attempts(deliveries: Deliveries, record: Record, engine: Engine) -> None:
    deliveries.deliver(bank.failing, "a", "defer")
    with engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.records SET opened_at = opened_at - interval '13 hours'"))
    for _ in range(3):
        make_due(engine, "a")
        last = deliveries.deliver(bank.failing, "a", "defer", origin="retry")
    assert (record("a").status, record("a").attempts, last.state) == ("failed", 3, "FAILURE")


def test_self_retry_is_a_release_with_its_countdown(deliveries: Deliveries, record: Record, engine: Engine) -> None:
    assert deliveries.deliver(bank.failing, "a", "retry").state == "RETRY"
    assert record("a").status == "released"
    assert outbox(engine) == [("retry", "pending")]


def test_autoretry_for_is_a_release_too_but_not_for_a_permanent_error(
    bank: Celery, deliveries: Deliveries, record: Record
) -> None:
    def body(self: Any, account: str, how: Any) -> None:
        raise PermanentError("final") if how == "final" else ConnectionError("again")

    task = make_task(bank, body, key="{account}", autoretry_for=(Exception,), retry_backoff=True)
    assert deliveries.deliver(task, "a", "again").state == "RETRY"
    assert record("a").status == "released"
    assert deliveries.deliver(task, "b", "final").state == "FAILURE"
    assert record("b").status == "failed"


@pytest.mark.parametrize("control", [Ignore(), Reject(requeue=True), Reject(requeue=False)])
def test_control_flow_past_the_record_is_a_permanent_error(
    bank: Celery, deliveries: Deliveries, record: Record, control: Any
) -> None:
    def body(self: Any) -> None:
        raise control

    outcome = deliveries.deliver(make_task(bank, body), key="k")
    assert outcome.state == "FAILURE"
    assert json.loads(record("k").error)["code"] == "unsupported_control"


def test_permanent_errors_of_the_task_end_it_at_once(bank: Celery, deliveries: Deliveries, record: Record) -> None:
    def body(self: Any) -> None:
        raise LookupError("gone")

    outcome = deliveries.deliver(make_task(bank, body, permanent_errors=(LookupError,)), key="k")
    assert isinstance(outcome.value, LookupError)
    assert (record("k").status, record("k").attempts) == ("failed", 1)


def test_where_every_error_is_permanent_only_retry_asks_for_another_attempt(
    bank: Celery, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    reasons = iter([PoolTimeout("no connection left"), Retry("later", when=0), LookupError("gone")])

    def body(self: Any) -> None:
        raise next(reasons)

    task = make_task(bank, body, permanent_errors=(Exception,))
    seen = []
    for _ in range(3):
        seen.append(deliveries.deliver(task, key="k").state)
        make_due(engine, "k")
    assert seen == ["RETRY", "RETRY", "FAILURE"]
    assert (record("k").status, record("k").attempts) == ("failed", 2)


def test_a_broken_on_failed_does_not_keep_the_operation_open(
    bank: Celery, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    def broken(session: Session, operation: Any, error: Any) -> None:
        session.execute(ROW)
        raise RuntimeError("bug")

    def body(self: Any) -> None:
        raise PermanentError("no")

    deliveries.deliver(make_task(bank, body, on_failed=broken), key="k")
    assert record("k").status == "failed"
    with engine.connect() as connection:
        assert connection.execute(text("SELECT reason FROM idempotency.dead_letters")).scalars().all() == [
            "on_failed_error"
        ]
        assert connection.execute(text("SELECT count(*) FROM entries")).scalar_one() == 0


def test_a_shutdown_gives_the_attempt_back_with_the_next_delivery(
    bank: Celery, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    def body(self: Any) -> None:
        self.session.execute(ROW)
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        deliveries.deliver(make_task(bank, body), key="k")
    assert (record("k").status, record("k").attempts) == ("released", 0)
    assert outbox(engine) == [("retry", "pending")]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM entries")).scalar_one() == 0


# ---------------------------------------------------------------- the session


def test_commit_on_the_session_is_refused_and_names_the_step(
    bank: Celery, deliveries: Deliveries, record: Record
) -> None:
    def body(self: Any) -> None:
        self.session.execute(ROW)
        self.session.commit()

    outcome = deliveries.deliver(make_task(bank, body), key="k")
    assert isinstance(outcome.value, SessionNotYours)
    assert "self.step" in str(outcome.value)
    assert record("k").status == "failed"


def test_a_savepoint_in_the_session_is_allowed(bank: Celery, deliveries: Deliveries, entries: Entries) -> None:
    def body(self: Any) -> None:
        with self.session.begin_nested():
            self.session.execute(ROW)

    assert deliveries.deliver(make_task(bank, body), key="k").state == "SUCCESS"
    assert entries("row") == 1


def test_a_bodys_rows_are_visible_exactly_when_the_record_is_completed(
    bank: Celery, deliveries: Deliveries, entries: Entries, record: Record
) -> None:
    seen = []

    def body(self: Any) -> None:
        self.session.execute(ROW)
        self.session.flush()
        seen.append((entries("row"), record("k").status))

    deliveries.deliver(make_task(bank, body), key="k")
    assert seen == [(0, "started")]
    assert (entries("row"), record("k").status) == (1, "completed")


def test_a_constraint_failing_at_commit_is_an_ordinary_error_not_a_doubt(
    bank: Celery, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    with engine.connect() as connection:
        connection.execute(text("CREATE TABLE parent (id int PRIMARY KEY)"))
        connection.execute(text("CREATE TABLE child (id int REFERENCES parent (id) DEFERRABLE INITIALLY DEFERRED)"))

    def body(self: Any) -> None:
        self.session.execute(text("INSERT INTO child VALUES (1)"))

    outcome = deliveries.deliver(make_task(bank, body), key="k")
    assert outcome.state == "RETRY"
    assert (record("k").status, record("k").attempts) == ("released", 1)


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize(
    "call",
    [
        lambda task, session: task.delay(1),
        lambda task, session: task.apply_async((1,)),
        lambda task, session: task.enqueue(session, 1),
        lambda task, session: task.apply((1,)),
        lambda task, session: task.s(1).apply_async(),
    ],
)
def test_a_call_without_a_key_is_refused_where_it_is_made(bank: Celery, engine: Engine, call: Any) -> None:
    with Session(engine) as session, pytest.raises(MissingKey):
        call(bank_task("returning"), session)
    assert outbox(engine) == []


def test_enqueue_leaves_with_the_callers_commit_and_not_without_it(bank: Celery, engine: Engine) -> None:
    with Session(engine.execution_options(isolation_level="READ COMMITTED")) as session:
        bank_task("returning").enqueue(session, 1, idempotency_key="k1")
        session.rollback()
        bank_task("returning").enqueue(session, 1, idempotency_key="k2", countdown=60)
        session.commit()
    with engine.connect() as connection:
        rows = connection.execute(
            text(
                "SELECT key, available_at > clock_timestamp() + interval '50 seconds' AS later FROM idempotency.outbox"
            )
        ).all()
    assert rows == [("k2", True)]


def test_enqueue_heeds_the_options_of_the_task_as_apply_async_does(bank: Celery, engine: Engine) -> None:
    def body(self: Any, account: str) -> None: ...

    task = make_task(bank, body, key="{account}", soft_time_limit=7)
    with Session(engine.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
        task.enqueue(session, "a")
        task.enqueue(session, "b", priority=5)
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT message FROM idempotency.outbox ORDER BY id")).scalars()
        first, second = (json.loads(row) for row in rows)
    assert second["properties"]["priority"] == 5
    assert first["headers"]["timelimit"] == [None, 7]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"idempotency_key": ""}, InvalidKey),
        ({"idempotency_key": "x" * 256}, InvalidKey),
        ({"idempotency_key": "a\nb"}, InvalidKey),
        ({"idempotency_key": "k", "expires": 60}, InvalidArguments),
        ({"idempotency_key": "k", "kwargs": {"nobody": 1}}, InvalidArguments),
        ({"idempotency_key": "k", "args": (float("nan"),)}, InvalidArguments),
        ({"idempotency_key": "k", "args": ("x" * 1_100_000,)}, InvalidArguments),
    ],
)
def test_a_bad_call_is_refused_where_it_is_made(bank: Celery, options: Any, error: Any) -> None:
    with pytest.raises(error):
        bank_task("returning").apply_async(**options)


def test_a_message_shows_its_key_and_never_its_arguments(bank: Celery, engine: Engine) -> None:
    with Session(transactional(engine)) as session, session.begin():
        bank_task("deposit").enqueue(session, "a-key", 987654321098)
    with engine.connect() as connection:
        headers = json.loads(connection.execute(text("SELECT message FROM idempotency.outbox")).scalar_one())["headers"]
    assert headers["argsrepr"] == "idempotency-key=a-key"
    assert "987654321098" not in json.dumps(headers)


def test_an_eager_call_is_protected_too_and_retries_at_once(bank: Celery, entries: Entries, record: Record) -> None:
    tries = []

    def body(self: Any, account: str) -> Any:
        tries.append(account)
        if len(tries) < 3:
            raise ValueError("again")
        self.session.execute(ROW)
        return len(tries)

    task = make_task(bank, body, key="{account}")
    assert task.apply(("a",)).get() == 3
    assert task("a") == 3
    assert (len(tries), entries("row"), record("a").attempts) == (3, 1, 3)


def test_a_plain_call_runs_here_under_its_key(bank: Celery, entries: Entries) -> None:
    assert bank_task("deposit")("a", 5) == bank_task("deposit")("a", 5) == {"account": "a", "amount": 5}
    assert entries("a") == 1


def test_lookup_reads_the_stored_operation(bank: Celery, deliveries: Deliveries) -> None:
    deliveries.deliver(bank_task("deposit"), "a", 5)
    stored = lookup(bank, "tests.support.bank.deposit", "a")
    assert (stored.status, stored.attempts, stored.result) == ("completed", 1, {"account": "a", "amount": 5})


# ---------------------------------------------------------------- what the tests above share


def bank_task(name: str) -> Any:
    return getattr(bank, name)


def outbox(engine: Engine) -> Any:
    with engine.connect() as connection:
        return [
            tuple(row) for row in connection.execute(text("SELECT origin, status FROM idempotency.outbox ORDER BY id"))
        ]


def test_a_body_that_hangs_in_a_transaction_loses_its_locks_with_its_lease(
    deliveries: Deliveries, engine: Engine, environment: dict[str, str]
) -> None:
    bank.configure(environment | {"LEASE": "1", "MAX_RUN": "1"})
    seen = []
    idle = text(
        "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = current_database()"
    )

    def body(self: Any) -> None:
        self.session.execute(ROW)
        with engine.connect() as connection:
            seen.append(connection.execute(idle).scalar_one())
            eventually(lambda: connection.execute(idle).scalar_one() == 0, what="evicted by the server")
            seen.append(connection.execute(idle).scalar_one())

    deliveries.deliver(make_task(deliveries.app, body), key="k")
    assert seen[:2] == [1, 0]
