"""What existing code calls keeps working: signatures, groups, chains, countdowns, and results from a result backend."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, chain, group
from celery.backends.redis import RedisBackend
from celery.exceptions import TaskRevokedError

from idempotency import PermanentError
from idempotency.relay.relay import Relay
from tests.support import bank as app_module
from tests.support import crashing
from tests.support.operations import Entries, Record
from tests.support.processes import Processes, eventually


@pytest.fixture
def backend(bank: Celery, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The result backend of this process: what `AsyncResult.get()` reads."""
    backend = RedisBackend(app=bank, url=redis_url)
    monkeypatch.setattr(type(bank), "backend", backend)
    yield backend
    backend.result_consumer.stop()
    backend.client.close()


@pytest.fixture
def storing(backend: Any, processes: Processes, relay: Relay, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker that stores results there."""
    for name in ("deposit", "returning", "waited_deposit", "replaced", "failing"):
        monkeypatch.setattr(getattr(app_module, name), "ignore_result", False)
    return processes.worker("--concurrency", "2", "--", "task.ignore_result=false", CELERY_RESULT_BACKEND=redis_url)


def groups_and_chains_give_their_results_and_again_when_repeated(
    bank: Celery, entries: Entries, record: Record, directory: Path
) -> None:
    for _ in range(2):
        together = group(app_module.deposit.s(f"g{number}") for number in range(5)).apply_async()
        assert [each["account"] for each in together.get(timeout=20)] == [f"g{number}" for number in range(5)]
        one_by_one = chain(
            app_module.deposit.s("first"),
            app_module.returning.s().set(idempotency_key="second"),
            app_module.deposit.si("third", 3),
        ).apply_async()
        assert one_by_one.get(timeout=20) == {"account": "third", "amount": 3}
        assert one_by_one.parent.get(timeout=20) == {"account": "first", "amount": 1}
    accounts = [f"g{number}" for number in range(5)] + ["first", "returning", "third"]
    assert [entries(account) for account in accounts] == [1] * len(accounts)


def an_errback_of_one_argument_is_a_message_under_its_own_key(
    bank: Celery, entries: Entries, record: Record, directory: Path
) -> None:
    failed = app_module.failing.apply_async(
        ("e", "permanent"), task_id="failed", link_error=app_module.deposit.s().set(idempotency_key="back")
    )
    with pytest.raises(PermanentError, match="no such account"):
        failed.get(timeout=20)
    eventually(lambda: (row := record("back")) and row.status == "completed")
    assert (entries("failed"), entries("e")) == (1, 0)


def a_revoked_task_is_revoked_for_its_caller_too_and_again_when_repeated(
    bank: Celery, entries: Entries, record: Record, directory: Path
) -> None:
    # by a stamp: Celery stores the state of what is revoked by its id at once
    assert bank.control.revoke_by_stamped_headers({"batch": ["b1"]}, reply=True, timeout=10, limit=1)
    for id in ("first", "repeated"):
        stamped = app_module.deposit.s("revoked")
        stamped.stamp(batch="b1")
        result = stamped.apply_async(task_id=id)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=20)
        assert result.state == "REVOKED"
    assert (record("revoked").status, entries("revoked")) == ("failed", 0)


def countdown_and_eta_are_kept_and_a_duplicate_runs_nothing(
    bank: Celery, entries: Entries, record: Record, directory: Path
) -> None:
    sent = datetime.now(UTC)
    app_module.deposit.apply_async(("a",), countdown=2)
    app_module.deposit.apply_async(("b",), eta=sent + timedelta(seconds=2))
    app_module.deposit.apply_async(("b",), countdown=2)
    for account in ("a", "b"):
        row = eventually(lambda account=account: (row := record(account)) and row.status == "completed" and row)
        assert row.created_at - sent >= timedelta(seconds=2)
        assert entries(account) == 1


def a_duplicate_under_its_own_task_id_gets_the_stored_result(
    bank: Celery, entries: Entries, record: Record, directory: Path
) -> None:
    first = app_module.deposit.delay("twice", 5)
    assert first.get(timeout=20) == {"account": "twice", "amount": 5}
    second = app_module.deposit.apply_async(("twice", 5), task_id="another-id")
    assert second.get(timeout=20) == {"account": "twice", "amount": 5}
    assert entries("twice") == 1


def a_busy_duplicate_of_one_task_id_leaves_its_result_alone(
    bank: Celery, entries: Entries, record: Record, directory: Path
) -> None:
    crashing.plan(directory, "working", crashing.HOLD)
    running = app_module.waited_deposit.apply_async(("busy",), task_id="one-id")
    eventually((directory / "working.held").exists)
    app_module.slow_deposit.delay("other", 0)
    app_module.waited_deposit.apply_async(("busy",), task_id="one-id")
    eventually(lambda: record("busy").duplicates == 1)
    eventually(lambda: entries("other") == 1)
    assert not running.ready()
    (directory / "working.go").touch()

    assert running.get(timeout=20) == "busy"
    assert entries("busy") == 1


def test_what_existing_code_calls_keeps_working(
    subtests: pytest.Subtests, bank: Celery, storing: Any, entries: Entries, record: Record, environment: dict[str, str]
) -> None:
    for check in (
        groups_and_chains_give_their_results_and_again_when_repeated,
        an_errback_of_one_argument_is_a_message_under_its_own_key,
        a_revoked_task_is_revoked_for_its_caller_too_and_again_when_repeated,
        countdown_and_eta_are_kept_and_a_duplicate_runs_nothing,
        a_duplicate_under_its_own_task_id_gets_the_stored_result,
        a_busy_duplicate_of_one_task_id_leaves_its_result_alone,
    ):
        with subtests.test(check.__name__):
            check(bank, entries, record, Path(environment["CRASH_DIRECTORY"]))


@pytest.mark.long
def test_a_replaced_task_gives_the_result_of_its_replacement_to_its_chain(
    bank: Celery, storing: Any, entries: Entries, record: Record
) -> None:
    for _ in range(2):
        chained = chain(
            app_module.replaced.s("a"),
            app_module.returning.s().set(idempotency_key="tail"),
        ).apply_async()
        assert chained.get(timeout=20) == {"account": "a", "amount": 1}
        assert chained.parent.get(timeout=20) == {"account": "a", "amount": 1}
    grouped = group(app_module.replaced.s("b"), app_module.deposit.s("c")).apply_async()
    assert [each["account"] for each in grouped.get(timeout=20)] == ["b", "c"]
    assert [entries(account) for account in ("a/replaced", "a", "returning", "b/replaced", "b", "c")] == [1] * 6


def test_a_worker_that_dies_after_its_commit_owes_result_and_chain(
    bank: Celery,
    storing: Any,
    processes: Processes,
    redis_url: str,
    entries: Entries,
    environment: dict[str, str],
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app_module.slow_deposit, "ignore_result", False)
    directory = Path(environment["CRASH_DIRECTORY"])
    crashing.plan(directory, "working", crashing.HOLD)
    running = chain(
        app_module.slow_deposit.s("a", 0.01), app_module.returning.s().set(idempotency_key="tail")
    ).apply_async()
    eventually((directory / "working.held").exists)
    app_module.slow_deposit.delay("a", 0.01)
    eventually(lambda: record("a").duplicates == 1)
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        (hint,) = client.keys("idempotency:hint:*")
        eventually(lambda: client.get(hint).endswith(" counted"), what="the mark")
        crashing.plan(directory, "finish.committed", crashing.KILL_WORKER)
        (directory / "working.go").touch()
        storing.process.wait(20)
        assert (record("a").status, entries("returning")) == ("completed", 0)
        assert client.get(hint).endswith(" counted")
        processes.worker("--concurrency", "2", "--", "task.ignore_result=false", CELERY_RESULT_BACKEND=redis_url)
        assert running.get(timeout=20) == "a"
    assert running.parent.get(timeout=20) == "a"
    assert (entries("a"), entries("returning")) == (1, 1)
