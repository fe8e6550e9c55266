"""Batches: what runs together is committed together, and each message is acknowledged by its own outcome."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import BigInteger, Column, Engine, MetaData, Table, Text, insert, text

from idempotency import IdempotentTask, SettingsError
from tests.support import batched, crashing
from tests.support.bank import failures
from tests.support.batches import TRANSACTIONS, queued, states
from tests.support.documents import python_blocks
from tests.support.operations import Entries, Record
from tests.support.processes import Processes, Worker, eventually

APPLICATION = "tests.support.batched"
ENTRIES = text("SELECT account, count(*) FROM entries GROUP BY account ORDER BY account")
SHORT = (
    ("finish.written", crashing.KILL_CHILD, "post_entry"),
    ("finish.committed", crashing.KILL_WORKER, "post_entry"),
    ("finish.committed", crashing.KILL_CHILD, "post_each"),
)


@pytest.fixture
def send(bank: Celery) -> Callable[..., list[str]]:
    """Send messages for these accounts, each with what its body does."""

    def send(many: int, task: Any = batched.post_entry, **hows: str) -> list[str]:
        accounts = [f"e{number:02}" for number in range(many)]
        for account in accounts:
            task.delay(account, hows.get(account, ""))
        return accounts

    return send


@pytest.fixture
def start(processes: Processes) -> Callable[..., Worker]:
    def start(children: int = 1, **environment: str) -> Worker:
        return processes.worker("--concurrency", str(children), app=APPLICATION, **environment)

    return start


def posted(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return dict(list(connection.execute(ENTRIES)))


def all_ended(engine: Engine, accounts: list[str]) -> Callable[[], bool]:
    def ended() -> bool:
        found = states(engine)
        return all(found.get(account) in ("completed", "failed") for account in accounts)

    return ended


@pytest.mark.long
def test_batches_are_full_while_more_waits_than_the_pool_takes(
    bank: Celery, engine: Engine, send: Callable[..., list[str]], start: Callable[..., Worker]
) -> None:
    """Those that wait while no process is free join the next one, however long that is; one closes at the time of no other."""
    accounts = send(200, batched.post_slowly)
    worker = start()
    eventually(lambda: len(posted(engine)) == len(accounts), timeout=60, what=worker.log)
    with engine.connect() as connection:
        batches = connection.execute(TRANSACTIONS).scalar_one()
    assert batches <= len(accounts) / batched.BATCH + 3  # the first ones, for which the pool has waited


def test_what_waits_is_committed_in_one_transaction(
    bank: Celery, send: Any, start: Any, engine: Engine, record: Record
) -> None:
    accounts = send(batched.BATCH)
    worker = start()
    eventually(all_ended(engine, accounts))
    assert posted(engine) == dict.fromkeys(accounts, 1)
    with engine.connect() as connection:
        assert connection.execute(TRANSACTIONS).scalar_one() == 1, worker.log
    row = record("e00")
    assert row is not None
    assert (row.status, row.attempts, row.result, row.response_code, row.locked_until) == (
        "completed",
        1,
        '"e00"',
        200,
        None,
    )
    eventually(lambda: worker.log.count("succeeded in") == len(accounts), what="Celery has seen each")
    worker.terminate()
    worker.process.wait(30)
    assert queued(bank) == 0


@pytest.mark.long
def test_less_than_a_batch_runs_too(send: Any, start: Any, engine: Engine) -> None:
    start()
    accounts = send(3)
    eventually(all_ended(engine, accounts))
    assert posted(engine) == dict.fromkeys(accounts, 1)


@pytest.mark.long
def test_a_key_twice_in_a_batch_runs_once(
    send: Any, start: Any, engine: Engine, entries: Entries, bank: Celery
) -> None:
    accounts = send(5)
    send(5)
    worker = start()
    eventually(lambda: worker.log.count("succeeded in") == 10, what="both of each")
    assert posted(engine) == dict.fromkeys(accounts, 1)


@pytest.mark.parametrize(
    ("how", "status", "rows", "attempts"),
    [
        pytest.param("once", "completed", 1, 2, marks=pytest.mark.long),
        pytest.param("permanent", "failed", 0, 1, marks=pytest.mark.long),
        ("effect", "completed", 1, 1),
        pytest.param("step", "completed", 1, 1, marks=pytest.mark.long),
        pytest.param("rolled back", "completed", 1, 1, marks=pytest.mark.long),
        pytest.param("caught", "completed", 1, 1, marks=pytest.mark.long),
        pytest.param("swallowed", "failed", 0, None, marks=pytest.mark.long),
        pytest.param("sets", "completed", 1, 1, marks=pytest.mark.long),
        pytest.param("not json", "failed", 0, None, marks=pytest.mark.long),
        pytest.param("later", "failed", 0, None, marks=pytest.mark.long),
        pytest.param("kill", "failed", 0, None, marks=pytest.mark.long),
        pytest.param("retry", "failed", 0, None, marks=pytest.mark.long),
    ],
)
def test_one_that_cannot_stay_costs_the_others_nothing(
    how: str,
    status: str,
    rows: int,
    attempts: int | None,
    send: Any,
    start: Any,
    engine: Engine,
    record: Record,
    relay: Any,
    bank: Celery,
) -> None:
    with engine.connect() as connection:
        connection.execute(text("CREATE TABLE twice (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    accounts = send(10, e03=how)
    start(LEASE="2")
    eventually(all_ended(engine, accounts), timeout=60)
    others = {account: 1 for account in accounts if account != "e03"}
    found = posted(engine)
    assert found.pop("e03/step", 0) == (how == "step")
    assert found == others | ({"e03": rows} if rows else {})
    row = record("e03")
    assert row is not None
    assert row.status == status
    assert attempts in (None, row.attempts)
    assert [account for account, _ in failures(engine)] == ["e03"] * (status == "failed")
    if how != "kill":
        for account in others:
            other = record(account)
            assert other is not None
            assert other.attempts == 1


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("point", "action", "task"),
    [
        pytest.param(point, action, task, marks=() if (point, action, task) in SHORT else pytest.mark.long)
        for point in ("claimed", "body.entered", "finish.written", "finish.committed")
        for action in (crashing.KILL_CHILD, crashing.KILL_WORKER)
        for task in ("post_entry", "post_each")
    ],
)
def test_a_process_that_dies_at_any_moment_loses_and_doubles_nothing(
    point: str, action: str, task: str, send: Any, start: Any, engine: Engine, environment: dict[str, str], relay: Any
) -> None:
    plan = crashing.plan(environment["CRASH_DIRECTORY"], point, action)
    accounts = send(12, getattr(batched, task))
    start(LEASE="2")
    eventually(lambda: not plan.exists(), what="it died")
    if action == crashing.KILL_WORKER:
        start(LEASE="2")
    eventually(all_ended(engine, accounts), timeout=60)
    assert posted(engine) == dict.fromkeys(accounts, 1)


@pytest.mark.long
def test_one_that_ends_its_thread_keeps_no_other(send: Any, processes: Processes, engine: Engine, relay: Any) -> None:
    """In a pool of threads, what would end a process comes to the worker as an exception."""
    send(3, e01="exit")
    processes.worker("--concurrency", "1", "--pool", "threads", app=APPLICATION, LEASE="2")
    eventually(all_ended(engine, ["e00", "e02"]), timeout=60)
    assert {name: count for name, count in posted(engine).items() if name != "e01"} == {"e00": 1, "e02": 1}


@pytest.mark.long
def test_a_holder_that_is_overtaken_commits_nothing(
    send: Any, start: Any, engine: Engine, environment: dict[str, str], relay: Any
) -> None:
    crashing.plan(environment["CRASH_DIRECTORY"], "working", crashing.HOLD)
    accounts = send(8, e07="works")
    start(2)
    held = Path(environment["CRASH_DIRECTORY"]) / "working.held"
    eventually(held.exists, what="the last body runs")
    with engine.connect() as connection:  # as a sweep does after a pause that was longer than the lease
        connection.execute(
            text(
                "UPDATE idempotency.records SET fence = nextval('idempotency.fence'), token = 'other' WHERE key = 'e02'"
            )
        )
    held.with_name("working.go").touch()
    eventually(all_ended(engine, [each for each in accounts if each != "e02"]))
    assert posted(engine) == {each: 1 for each in accounts if each != "e02"}
    assert states(engine)["e02"] == "started"


@pytest.mark.long
def test_another_tenant_has_its_own_transaction(start: Any, engine: Engine, bank: Celery, entries: Entries) -> None:
    for number in range(4):
        for tenant in ("one", "two"):
            batched.post_entry.apply_async((f"e{number}",), tenant=tenant)
    start()
    eventually(lambda: sum(posted(engine).values()) == 8)
    with engine.connect() as connection:
        assert connection.execute(TRANSACTIONS).scalar_one() == 2
        tenants = connection.execute(text("SELECT DISTINCT tenant FROM idempotency.records WHERE status = 'completed'"))
        assert {row.tenant for row in tenants} == {"one", "two"}


@pytest.mark.long
def test_a_message_that_is_revoked_ends_alone(
    send: Any, start: Any, engine: Engine, record: Record, bank: Celery
) -> None:
    start()
    bank.control.revoke("revoked-id", reply=True, timeout=5)
    batched.post_entry.apply_async(("r1",), task_id="revoked-id")
    accounts = send(5)
    eventually(all_ended(engine, [*accounts, "r1"]))
    assert posted(engine) == dict.fromkeys(accounts, 1)
    row = record("r1")
    assert row is not None
    assert row.error_code == "revoked"


def posting(self: Any, a: str) -> str:
    return a


@pytest.mark.parametrize(
    "option", [{"batch": 0}, {"batch": 1.5}, {"batch": 5000}, {"batch_wait": 0.0}, {"batch_commit": "one"}]
)
def test_a_size_of_no_use_is_refused(option: dict[str, Any], bank: Celery) -> None:
    with pytest.raises(SettingsError, match=next(iter(option))):
        bank.task(base=IdempotentTask, bind=True, name="test.batch", shared=False, key="{a}", **option)(posting)


def test_the_examples_of_the_page_charge_and_post(bank: Celery, engine: Engine) -> None:
    (example,) = python_blocks("docs/batches.md")
    tables = MetaData()
    postings = Table("postings", tables, Column("id", Text), Column("account", Text), Column("amount", BigInteger))
    payments = Table("payments", tables, Column("id", Text), Column("charge", Text))
    tables.create_all(engine)
    charged = []

    def charge(payment_id: str, amount: int, *, idempotency_key: str) -> dict[str, str]:
        charged.append((payment_id, amount))
        return {"id": f"ch_{payment_id}"}

    names: dict[str, Any] = {
        "__name__": __name__,
        "app": bank,
        "IdempotentTask": IdempotentTask,
        "insert": insert,
        "Posting": postings,
        "Payment": payments,
        "provider": SimpleNamespace(charge=charge),
    }
    exec(example, names)
    for _ in range(2):
        names["post_entry"]("p1", "cash", 700)
        assert names["capture"]("p2", 700) == "ch_p2"
    assert charged == [("p2", 700)]
    with engine.connect() as connection:
        assert [tuple(row) for row in connection.execute(postings.select())] == [("p1", "cash", 700)]
        assert [tuple(row) for row in connection.execute(payments.select())] == [("p2", "ch_p2")]
