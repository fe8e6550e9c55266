"""Waiting for results: how often Postgres is asked, and with how many connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, event

from idempotency import Handle
from idempotency.application import close_runtime, runtime_of
from idempotency.errors import OperationBusy
from idempotency.store import ends
from tests.support import operations as op

WAITERS = 100


@pytest.fixture
def small_pool(bank: Celery) -> Iterator[Celery]:
    bank.conf.idempotency_pool_size = 2
    yield bank
    close_runtime(bank)
    bank.conf.pop("idempotency_pool_size")


class Watched:
    """How often a connection was taken from a pool, and how many were in use at the same time."""

    def __init__(self, engine: Engine) -> None:
        self.taken = self.out = self.most = 0
        self._lock = threading.Lock()
        event.listen(engine, "checkout", self._checkout)
        event.listen(engine, "checkin", self._checkin)

    def _checkout(self, *_: Any) -> None:
        with self._lock:
            self.taken += 1
            self.out += 1
            self.most = max(self.most, self.out)

    def _checkin(self, *_: Any) -> None:
        with self._lock:
            self.out -= 1


def test_a_hundred_waiters_share_a_small_pool_and_all_get_their_results(
    small_pool: Celery, connection: Connection
) -> None:
    watched = Watched(runtime_of(small_pool)._autocommit_engine)
    holders = [op.started(connection) for _ in range(WAITERS)]
    waiting = threading.Barrier(WAITERS + 1, timeout=60)

    def wait(holder: Any) -> Any:
        waiting.wait()
        return Handle(small_pool, holder.id).result(timeout=120)

    with ThreadPoolExecutor(WAITERS) as pool:
        results = [pool.submit(wait, holder) for holder in holders]
        waiting.wait()
        for number, holder in enumerate(holders):
            ends.complete(connection, holder, str(number), retention=3600, lease=60)
        assert [result.result(120) for result in results] == list(range(WAITERS))
    assert 0 < watched.most <= 4  # the pool's size, and as many again under load
    assert watched.out == 0


def test_a_long_wait_asks_seldom_and_holds_no_connection_between_two_looks(
    bank: Celery, connection: Connection
) -> None:
    watched = Watched(runtime_of(bank)._autocommit_engine)
    holder = op.started(connection)
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(Handle(bank, holder.id).wait, 4.0)
        free = seen = 0
        while not waiting.done():
            seen += 1
            free += watched.out == 0
            time.sleep(0.01)
        with pytest.raises(OperationBusy, match=r"not finished within 4\.0 s"):
            waiting.result()
    took = time.monotonic() - began
    # 0.05 + 0.075 + … + 1 + 1 s: 8 looks in the first 2.5 s, then one a second; every 0.05 s would be 80
    assert 3 <= watched.taken <= 12
    assert free > seen / 2
    assert took >= 4.0


def test_waiting_no_time_looks_once(bank: Celery, connection: Connection) -> None:
    watched = Watched(runtime_of(bank)._autocommit_engine)
    holder = op.started(connection)
    with pytest.raises(OperationBusy):
        Handle(bank, holder.id).wait(0)
    assert watched.taken == 1
