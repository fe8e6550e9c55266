"""Attempts: how they are counted, used up and overtaken."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.message import Message
from typing import Any
from urllib.error import HTTPError
from uuid import uuid4

import psycopg
import pytest
from celery import Celery
from celery.exceptions import Retry
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from idempotency import AttemptsExhausted, Happened, PermanentError, StillUnknown
from idempotency.application import close_runtime, runtime_of
from idempotency.errors import OutcomeInDoubt
from idempotency.store import claims as claiming
from idempotency.store import ends as ending
from idempotency.store.answers import Answer, Claimed
from idempotency.store.recover import SPARE_CLAIMS
from idempotency.upkeep import maintenance
from idempotency.wire.keys import OperationId
from idempotency.worker import waiting
from tests.support import bank as b
from tests.support import operations as op
from tests.support.bank import record_failure
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries, Record, code, deaths, make_due
from tests.support.processes import eventually
from tests.support.tasks import Provider, lost, make_task, on_failed, pay, told_codes, unwrite, write

# ---------------------------------------------------------------- an ending belongs to its attempt


@pytest.mark.parametrize("unheard", [0, 3], ids=["answered", "the answer to its claim is lost"])
def test_an_ending_does_not_outlive_its_attempt(
    bank: Celery,
    deliveries: Deliveries,
    engine: Engine,
    record: Record,
    entries: Entries,
    monkeypatch: pytest.MonkeyPatch,
    unheard: int,
) -> None:
    """The first attempt pauses before its step; the second one reserves, and is released after an error."""
    runs, claims = [], []
    claim = claiming.claim

    def lose_answer(*args: Any, **options: Any) -> Answer:
        claims.append(claim(*args, **options))
        if len(claims) == unheard:
            raise OperationalError("the answer was lost", None, Exception())
        return claims[-1]

    monkeypatch.setattr(claiming, "claim", lose_answer)
    monkeypatch.setattr(waiting, "FIRST_PAUSE", 0.0)

    def reserve(session: Session) -> str:
        if session.execute(text("SELECT count(*) FROM entries WHERE account = 'reserved'")).scalar_one():
            raise PermanentError("nothing left to reserve", "exceeds_captured")
        return write(session, "reserved")

    def body(self: Any) -> str:
        runs.append(record("k").attempts)
        if len(runs) == 1:
            with engine.connect() as connection:
                connection.execute(
                    text("UPDATE idempotency.records SET locked_until = clock_timestamp() - interval '1s'")
                )
            assert deliveries.deliver(task, key="k", origin="recover").state == "RETRY"
            make_due(engine, "k")
        self.step("reserve", reserve)
        if len(runs) == 2:
            raise ValueError("after the step")
        return "paid out"

    task = make_task(bank, body, on_failed=record_failure)
    outcome = deliveries.deliver(task, key="k")
    assert (outcome.value, runs) == ("paid out", [1, 2, 3])
    assert (record("k").status, entries("reserved")) == ("completed", 1)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT * FROM failures")).all() == []


def test_an_ending_whose_commit_was_in_doubt_is_applied_without_the_body(
    bank: Celery, deliveries: Deliveries, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    fail, tries = ending.fail, []

    def fail_once(*args: Any, **options: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise OutcomeInDoubt("the answer was lost")
        fail(*args, **options)

    def body(self: Any) -> None:
        runs.append(1)
        raise PermanentError("no", "refused")

    monkeypatch.setattr(ending, "fail", fail_once)
    deliveries.deliver(make_task(bank, body, on_failed=on_failed), key="k")
    assert (len(runs), len(tries), record("k").attempts, code(record("k"))) == (1, 2, 1, ("refused", None))


# ---------------------------------------------------------------- attempts that are used up


def test_a_lower_max_attempts_runs_undo_and_on_failed(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, entries: Entries
) -> None:
    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=unwrite)
        raise ValueError("again")

    task = make_task(bank, body, max_attempts=10, on_failed=on_failed)
    for _ in range(8):
        assert deliveries.deliver(task, key="k", origin="retry").state == "RETRY"
        make_due(engine, "k")
    type(task).max_attempts = 2  # the deploy
    deliveries.deliver(task, key="k", origin="retry")
    assert code(record("k")) == ("attempts_exhausted", None)
    assert (entries("reserved"), entries("undone reserved"), told_codes()) == (0, 1, ["attempts_exhausted"])


def test_a_lower_max_attempts_asks_the_provider_before_an_end(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    provider = Provider(*(lost() for _ in range(9)))
    answers: list[Any] = []
    task = make_task(
        bank,
        lambda self: self.effect("call", provider, reconcile=answers[0] if answers else None),
        max_attempts=5,
        on_failed=on_failed,
    )
    for _ in range(4):
        deliveries.deliver(task, key="k", origin="retry")
        make_due(engine, "k")
    answers.append(lambda doubt: Happened({"charge": "ch_1"}))
    type(task).max_attempts = 2
    assert deliveries.deliver(task, key="k", origin="retry").value == {"charge": "ch_1"}
    assert (record("k").status, told_codes()) == ("completed", [])


def test_a_lower_max_attempts_leaves_the_end_to_a_worker(
    bank: Celery, connection: Connection, engine: Engine, deliveries: Deliveries, record: Record
) -> None:
    """The sweep ends only what has died in so many claims since its attempts were found used up."""

    def body(self: Any) -> None:
        raise ValueError("again")

    task = make_task(bank, body, max_attempts=50)
    deliveries.deliver(task, key="k")
    type(task).max_attempts = 2
    for died_in, noted, ends in (
        (20, None, "released"),
        (1 + 2 * SPARE_CLAIMS, None, "released"),
        (20 + SPARE_CLAIMS, 22, "released"),
        (21 + SPARE_CLAIMS, 22, "failed"),
    ):
        deaths(engine, "k", died_in, spent_at=noted)
        maintenance.recover(bank)
        assert record("k").status == ends


def test_an_operation_that_dies_in_every_claim_is_ended_by_the_sweep(
    bank: Celery, engine: Engine, deliveries: Deliveries, record: Record
) -> None:
    def body(self: Any) -> None:
        raise ValueError("again")

    deliveries.deliver(make_task(bank, body, max_attempts=2), key="k")
    deaths(engine, "k", 2 + 2 * SPARE_CLAIMS)
    maintenance.recover(bank)
    assert code(record("k"))[0] == "attempts_exhausted"


@pytest.mark.long
@pytest.mark.parametrize("limit", ["max_retries", "max_attempts"])
def test_retries_used_up_get_a_last_look_like_attempts(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, limit: str
) -> None:
    provider = Provider(lost(), lost())

    def find(*, doubt: Any) -> Any:
        return Happened({"charge": "ch_1"}) if len(provider.keys) == 2 else StillUnknown()

    def body(self: Any) -> Any:
        try:
            return self.effect("call", provider, reconcile=find)
        except ConnectionError as error:
            raise self.retry(exc=error, countdown=0, max_retries=1 if limit == "max_retries" else None) from None

    task = make_task(bank, body, max_attempts=2 if limit == "max_attempts" else None, on_failed=on_failed)
    for _ in range(3):
        outcome = deliveries.deliver(task, key="k", origin="retry")
        make_due(engine, "k")
    assert (outcome.value, record("k").status, told_codes()) == ({"charge": "ch_1"}, "completed", [])


@pytest.mark.parametrize("options", [{}, {"autoretry_for": (Exception,), "retry_backoff": False}], ids=str)
def test_a_lock_that_is_held_uses_no_attempt(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, options: dict[str, Any]
) -> None:
    """A frozen attempt keeps the locks of its transaction for several leases."""

    def body(self: Any) -> str:
        self.session.execute(text("SET LOCAL lock_timeout = '20ms'"))
        self.session.execute(text("SELECT * FROM entries WHERE account = 'payment' FOR UPDATE"))
        return "paid"

    task = make_task(bank, body, max_attempts=2, **options)
    with engine.connect() as frozen:
        frozen.execute(text("INSERT INTO entries (account, amount) VALUES ('payment', 100)"))
        with create_engine(engine.url).connect() as holder:
            holder.execute(text("SELECT * FROM entries FOR UPDATE"))
            for _ in range(4):
                assert deliveries.deliver(task, key="k", origin="recover").state == "RETRY"
                assert record("k").attempts == 0
                make_due(engine, "k")
    assert deliveries.deliver(task, key="k", origin="recover").value == "paid"


def test_a_row_that_has_moved_to_another_partition_uses_no_attempt(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    moves = [1, 2, 3]

    def body(self: Any) -> str:
        if moves:
            moves.pop()
            # what Postgres raises for who has waited for one
            self.session.execute(text("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$"))
        return "paid"

    task = make_task(bank, body, max_attempts=2)
    for _ in range(3):
        assert deliveries.deliver(task, key="k", origin="recover").state == "RETRY"
        assert record("k").attempts == 0
        make_due(engine, "k")
    assert deliveries.deliver(task, key="k", origin="recover").value == "paid"


def test_a_deadlock_uses_no_attempt(bank: Celery, deliveries: Deliveries, engine: Engine, record: Record) -> None:
    """A real one: the body holds one row and waits for the other, whose holder waits for the first."""
    with engine.connect() as connection:
        connection.execute(text("INSERT INTO entries (account, amount) VALUES ('a', 1), ('b', 1)"))
    lock = text("SELECT * FROM entries WHERE account = :account FOR UPDATE")
    other = create_engine(engine.url).connect()

    def body(self: Any) -> str:
        self.session.execute(lock, {"account": "a"})
        if not waiting:
            other.execute(lock, {"account": "b"})
            waiting.append(executor.submit(other.execute, lock, {"account": "a"}))
            time.sleep(1.3)  # Postgres ends the one that waits last: each looks once, after a second
            self.session.execute(lock, {"account": "b"})
        return "paid"

    waiting: list[Future[Any]] = []
    task = make_task(bank, body, max_attempts=1)
    with ThreadPoolExecutor(1) as executor:
        assert deliveries.deliver(task, key="k").state == "RETRY"
        waiting[0].result(30)
        other.close()
    assert record("k").attempts == 0
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k", origin="recover").value == "paid"


@pytest.mark.parametrize("options", [{}, {"autoretry_for": (OSError,), "retry_backoff": False}], ids=["retry", "auto"])
def test_an_error_that_cannot_be_pickled_is_recorded_as_itself(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, options: dict[str, Any]
) -> None:
    """Celery's Retry has an empty OSError in its place."""

    def body(self: Any) -> None:
        try:
            raise HTTPError("http://provider", 503, "overloaded", Message(), None)
        except HTTPError as error:
            if options:
                raise
            raise self.retry(exc=error, countdown=0, throw=False) from error

    task = make_task(bank, body, max_attempts=2, **options)
    assert deliveries.deliver(task, key="k").state == "RETRY"
    assert json.loads(record("k").error) == {"code": "HTTPError", "message": "HTTPError: HTTP Error 503: overloaded"}
    make_due(engine, "k")
    deliveries.deliver(task, key="k", origin="retry")
    assert json.loads(record("k").error)["message"].endswith("HTTPError: HTTP Error 503: overloaded")


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("seconds", [2.0**60, float("nan"), float("inf")])
def test_a_retry_beyond_the_calendar_ends_the_operation(
    bank: Celery, deliveries: Deliveries, record: Record, seconds: float, by_hand: bool
) -> None:
    def body(self: Any) -> None:
        raise Retry(when=seconds) if by_hand else self.retry(countdown=seconds)

    assert deliveries.deliver(make_task(bank, body), key="k").state == "FAILURE"
    assert code(record("k"))[0] == "call_refused"


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("seconds", [-1e12, float("-inf")])
def test_a_retry_after_less_than_no_time_is_due_at_once(
    bank: Celery, deliveries: Deliveries, record: Record, seconds: float, by_hand: bool
) -> None:
    """A provider's Retry-After in the past, say. Postgres has no date that long ago."""

    def body(self: Any) -> None:
        raise Retry(when=seconds) if by_hand else self.retry(countdown=seconds)

    task = make_task(bank, body, max_attempts=2)
    assert deliveries.deliver(task, key="k").state == "RETRY"
    assert record("k").status == "released"
    deliveries.deliver(task, key="k", origin="retry")
    assert code(record("k"))[0] == "attempts_exhausted"


@pytest.mark.parametrize("zone", [UTC, None])
def test_a_retry_by_hand_at_a_time_comes_then(
    bank: Celery, deliveries: Deliveries, connection: Connection, zone: Any
) -> None:
    def body(self: Any) -> None:
        raise Retry(when=(datetime.now(UTC) + timedelta(hours=5)).replace(tzinfo=zone))

    assert deliveries.deliver(make_task(bank, body, max_attempts=3), key="k").state == "RETRY"
    due = text("SELECT extract(epoch FROM available_at - clock_timestamp()) FROM idempotency.records")
    assert 4.9 * 3600 < connection.execute(due).scalar_one() <= 5 * 3600


def test_a_retry_of_a_task_without_a_default_delay_has_the_usual_back_off(
    bank: Celery, deliveries: Deliveries, record: Record
) -> None:
    """Celery takes `default_retry_delay=None`."""

    def body(self: Any) -> None:
        raise self.retry(exc=ConnectionError("the provider is away"))

    task = make_task(bank, body, max_attempts=3, default_retry_delay=None, permanent_errors=(TypeError,))
    assert deliveries.deliver(task, key="k").state == "RETRY"
    assert "the provider is away" in json.loads(record("k").error)["message"]


# ---------------------------------------------------------------- attempts that are not used


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
        (holding,) = runtime_of(bank).heartbeat._holdings.values()
        holding.renewed_at -= 61.0
        return pay(self)

    assert deliveries.deliver(make_task(bank, body, max_attempts=2), key="k").value == "paid"
    assert (len(runs), record("k").status, record("k").attempts) == (1, "completed", 1)


def test_an_answer_to_a_claim_that_takes_a_lease_begins_the_body_once(
    bank: Celery, deliveries: Deliveries, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage, say."""
    runs: list[str] = []
    claim = claiming.claim

    def wait_for_the_answer(*args: Any, **options: Any) -> Answer:
        answer = claim(*args, **options)
        return replace(answer, asked_at=answer.asked_at - 61.0) if isinstance(answer, Claimed) else answer

    def body(self: Any) -> str:
        runs.append("the client's mail is written")
        return pay(self)

    monkeypatch.setattr(claiming, "claim", wait_for_the_answer)
    assert deliveries.deliver(make_task(bank, body), key="k").value == "paid"
    assert (len(runs), record("k").attempts) == (1, 1)


# ---------------------------------------------------------------- tasks of other applications


def test_only_an_application_that_has_the_task_ends_spent_operations(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, entries: Entries
) -> None:
    """Another service on the same database, with its own tasks and its own default of attempts."""

    def body(self: Any) -> str:
        self.step("reserve", write, "reserved", undo=unwrite)
        if record("k").attempts < 21:
            raise ValueError("again")
        return "paid"

    task = make_task(bank, body, max_attempts=50)
    deliveries.deliver(task, key="k")
    deaths(engine, "k", 20)
    other = Celery("other")
    other.conf.update({name: bank.conf[name] for name in bank.conf if name.startswith("idempotency_")})
    other.conf.update(idempotency_service="other")
    try:
        maintenance.recover(other)
        assert record("k").status in ("started", "released")
    finally:
        close_runtime(other)
    maintenance.recover(bank)
    assert record("k").status == "released"
    assert deliveries.deliver(task, key="k", origin="recover").value == "paid"
    assert (record("k").status, entries("reserved")) == ("completed", 1)


# ---------------------------------------------------------------- a full Postgres


@pytest.fixture
def crowded(bank: Celery, engine: Engine, superuser: Engine, database: str) -> Iterator[Engine]:
    """The application under a role that may have two connections; a connection of this engine fills Postgres."""
    role = f"app_{uuid4().hex[:8]}"
    with engine.connect() as connection:
        owner = connection.execute(text("SELECT current_user")).scalar_one()
    with superuser.connect() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'secret' CONNECTION LIMIT 2"))
        connection.execute(text(f'GRANT "{owner}" TO {role}'))
    limited = make_url(database).set(username=role, password="secret")
    close_runtime(bank)
    bank.conf.update(idempotency_database_url=limited.render_as_string(hide_password=False))
    other = create_engine(limited, poolclass=NullPool)
    yield other
    other.dispose()
    close_runtime(bank)
    with superuser.connect() as connection:
        connection.execute(text(f"DROP ROLE {role}"))


def test_a_postgres_that_is_full_uses_no_attempt(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries, crowded: Engine
) -> None:
    """Claims have their connections, bodies get none (53300)."""
    id = OperationId("default", b.deposit.name, "a1")
    with runtime_of(bank).autocommit() as own:
        own.exec_driver_sql("SELECT 1")  # the pool of claims has its connection
    with crowded.connect():
        for attempt in range(1, 7):
            deliveries.deliver(b.deposit, "a1", origin="retry" if attempt > 1 else None)
            assert (record("a1").status, record("a1").attempts) == ("released", 0)
            op.age(connection, id, available_at=-1)
    left = text("SELECT count(*) = 1 FROM pg_stat_activity WHERE usename = :role")
    # a server process ends a moment after its client has closed the connection
    eventually(lambda: connection.execute(left, {"role": crowded.url.username}).scalar_one())
    assert deliveries.deliver(b.deposit, "a1", origin="retry").state == "SUCCESS"  # Postgres has room again
    assert (record("a1").status, record("a1").attempts) == ("completed", 1)
    assert entries("a1") == 1
