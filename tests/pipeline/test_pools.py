"""Every worker pool of Celery: attempts side by side, a worker killed in the middle, bodies longer than their lease."""

from __future__ import annotations

import random

import pytest
from celery import Celery

from idempotency.relay.relay import Relay
from tests.support import bank as app_module
from tests.support.operations import Entries, Record
from tests.support.processes import Processes, eventually

POOLS = {
    "prefork": ("--pool", "prefork", "--concurrency", "2"),
    "threads": ("--pool", "threads", "--concurrency", "8"),
    "gevent": ("--pool", "gevent", "--concurrency", "16"),
    "solo": ("--pool", "solo"),
}


@pytest.fixture(params=[pytest.param(pool, marks=[pytest.mark.long] * (pool != "prefork")) for pool in POOLS])
def pool(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return POOLS[request.param]


def test_parallel_attempts_stay_apart_and_a_killed_worker_doubles_nothing(
    pool: tuple[str, ...], bank: Celery, processes: Processes, relay: Relay, entries: Entries, record: Record
) -> None:
    accounts = {f"a{number}": random.Random(number).choice((0, 0.02, 0.1)) for number in range(40)}
    messages = [*accounts] * 3
    random.Random(1).shuffle(messages)
    first = processes.worker(*pool)
    for account in messages:
        app_module.lonely_deposit.delay(account, accounts[account])
    eventually(lambda: sum(entries(account) for account in accounts) >= 10)
    first.kill()
    processes.worker(*pool)

    eventually(lambda: all((row := record(a)) and row.status in ("completed", "failed") for a in accounts), timeout=60)
    assert [record(account).error for account in accounts if record(account).status == "failed"] == []
    assert [entries(account) for account in accounts] == [1] * len(accounts)


@pytest.mark.long
def test_a_lease_is_renewed_while_bodies_sleep_or_compute_for_longer(
    pool: tuple[str, ...], bank: Celery, processes: Processes, relay: Relay, entries: Entries, record: Record
) -> None:
    processes.worker(*pool, LEASE="2")
    app_module.lonely_deposit.delay("sleeping", 2.7)
    app_module.lonely_deposit.delay("computing", 2.7, busy=True)

    # the relay of this test takes every lease that is over, and looks every 0.2 s
    for account in ("sleeping", "computing"):
        eventually(lambda account=account: (row := record(account)) and row.status == "completed", timeout=40)
        assert (entries(account), record(account).attempts) == (1, 1)
