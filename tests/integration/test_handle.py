"""Waiting for results: how often Postgres is asked, and with how many connections."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from idempotency import FingerprintMismatch, Handle, InvalidKey, OperationFailed, OperationId, lookup
from idempotency.application import close_runtime, runtime_of
from idempotency.attempt.runtime import READERS
from idempotency.errors import OperationBusy, OperationNotFound
from idempotency.store import ends, operations
from idempotency.store.connections import KeptConnection
from tests.support import bank as b
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.proxy import Proxy

WAITERS = 100


@pytest.fixture
def small_pool(bank: Celery) -> Iterator[Celery]:
    bank.conf.idempotency_pool_size = 2
    yield bank
    close_runtime(bank)
    bank.conf.pop("idempotency_pool_size")


class Watched:
    """How often a connection was taken, and how many were in use at the same time."""

    def __init__(self, kept: KeptConnection) -> None:
        self.taken = self.out = self.most = 0
        self._lock = threading.Lock()
        self._kept, self._take, self._give_back = kept, kept.take, kept.give_back
        kept.take, kept.give_back = self._taking, self._giving_back  # type: ignore[method-assign]

    def _taking(self) -> Connection:
        connection = self._take()
        with self._lock:
            self.taken += 1
            self.out += 1
            self.most = max(self.most, self.out)
        return connection

    def _giving_back(self, connection: Connection, *, is_usable: bool) -> None:
        with self._lock:
            self.out -= 1
        self._give_back(connection, is_usable=is_usable)


def test_a_hundred_waiters_share_a_small_pool_and_all_get_their_results(
    small_pool: Celery, connection: Connection
) -> None:
    watched = Watched(runtime_of(small_pool)._kept)
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


def test_a_handle_gives_no_result_of_another_call_under_its_key(
    bank: Celery, database: str, deliveries: Deliveries
) -> None:
    deliveries.deliver(b.deposit, "a1", 5, key="k")
    with Session(create_engine(database, poolclass=NullPool)) as session, session.begin():
        same = b.deposit.enqueue(session, "a1", 5, idempotency_key="k")
        other = b.deposit.enqueue(session, "a1", 6, idempotency_key="k")
    assert same.result() == {"account": "a1", "amount": 5}
    for read in (other.status, other.result, other.lookup):
        with pytest.raises(FingerprintMismatch, match="used before with other arguments"):
            read()


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["wait", "await"])
def test_waiting_outlasts_an_outage_of_postgres(bank: Celery, database: str, connection: Connection, how: str) -> None:
    url = make_url(database)
    holder = op.started(connection)
    with Proxy(str(url.host), int(url.port or 5432)) as proxy:
        bank.conf.idempotency_database_url = url.set(host="127.0.0.1", port=proxy.port).render_as_string(
            hide_password=False
        )
        close_runtime(bank)
        handle = Handle(bank, holder.id)
        assert handle.status() == "started"
        proxy.refuse()
        proxy.reset()
        with pytest.raises(OperationBusy):
            handle.wait(0.1)
        waiting = ThreadPoolExecutor(1).submit(handle.result, 30) if how == "wait" else None
        ends.complete(connection, holder, "5", retention=3600, lease=60)
        threading.Timer(0.3, proxy.heal).start()

        async def awaited() -> Any:
            return await handle

        assert (asyncio.run(awaited()) if waiting is None else waiting.result(30)) == 5
        close_runtime(bank)


@pytest.mark.long
def test_a_long_wait_asks_seldom_and_holds_no_connection_between_two_looks(
    bank: Celery, connection: Connection
) -> None:
    watched = Watched(runtime_of(bank)._kept)
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


def test_a_misspelt_task_is_not_waited_for(bank: Celery, connection: Connection) -> None:
    misspelt = Handle(bank, OperationId("default", f"{b.deposit.name}s", "a"))
    for ask in (misspelt.status, partial(misspelt.wait, 60), partial(misspelt.wake, connection)):
        with pytest.raises(
            OperationNotFound, match=f"{b.deposit.name}s: the application has no such task; did you mean"
        ):
            ask()
    assert Handle(bank, OperationId("default", "of.another.application", "a")).status() == "not_found"


def test_what_is_not_stored_is_not_called_accepted(
    bank: Celery, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(runtime_of(bank).engine) as session:
        handle = b.deposit.enqueue(session, "a", 5, idempotency_key="a")
        assert handle.status() == "not_found"  # not yet
        session.rollback()
        assert handle.status() == "not_found"
        b.deposit.enqueue(session, "a", 5, idempotency_key="a")
        session.commit()
    assert handle.status() == "accepted"
    with pytest.raises(InvalidKey, match="key: must be text or a UUID, got int"):
        lookup(bank, b.deposit.name, 17)  # type: ignore[arg-type]

    def ends_meanwhile(*_: Any) -> None:
        monkeypatch.undo()
        op.completed(connection, handle.id)
        connection.exec_driver_sql("UPDATE idempotency.outbox SET settled_at = clock_timestamp()")

    monkeypatch.setattr(operations, "lookup", ends_meanwhile)
    assert Handle(bank, handle.id).status() == "completed"


def test_a_name_is_checked_once_for_however_long_a_wait(
    bank: Celery, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(bank.loader, "import_default_modules", lambda: checked.append("checked"))
    elsewhere = Handle(bank, OperationId("default", "another.applications", "a"))

    with pytest.raises(OperationBusy):
        elsewhere.wait(0.3)
    assert checked == ["checked"]

    async def wait() -> None:
        await asyncio.wait_for(_awaited(elsewhere), 0.3)

    with pytest.raises(TimeoutError):
        asyncio.run(wait())
    assert checked == ["checked"] * 2


async def _awaited(handle: Handle[Any]) -> Any:
    return await handle


def test_waiting_no_time_looks_once(bank: Celery, connection: Connection) -> None:
    watched = Watched(runtime_of(bank)._kept)
    holder = op.started(connection)
    with pytest.raises(OperationBusy):
        Handle(bank, holder.id).wait(0)
    assert watched.taken == 1


# ---------------------------------------------------------------- from an event loop


def test_a_handle_is_awaited_for_its_result(bank: Celery, deliveries: Deliveries) -> None:
    async def main() -> object:
        handle = Handle(bank, op.new_id())
        waiting = asyncio.create_task(result_of(handle))
        assert await handle.alookup() is None
        await asyncio.to_thread(deliveries.deliver, b.deposit, "a1", key=handle.id.key)
        return await waiting, await handle, (await handle.alookup()).status  # type: ignore[union-attr]

    result = {"account": "a1", "amount": 1}
    assert asyncio.run(main()) == (result, result, "completed")


async def result_of(handle: Handle) -> object:
    return await handle


def test_awaiting_a_failed_operation_raises_its_stored_error(bank: Celery, deliveries: Deliveries) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")

    async def main() -> None:
        await Handle(bank, OperationId("default", b.failing.name, "a1"))

    with pytest.raises(OperationFailed, match="no such account") as failed:
        asyncio.run(main())
    assert failed.value.code == "no_account"


def test_a_timeout_of_asyncio_ends_the_waiting_and_not_the_operation(bank: Celery, connection: Connection) -> None:
    holder = op.started(connection)

    async def main() -> object:
        handle = Handle(bank, holder.id)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await handle
        ends.complete(connection, holder, "17", retention=3600, lease=60)
        return await handle

    assert asyncio.run(main()) == 17


def test_a_hundred_awaited_handles_share_a_few_threads_and_connections(bank: Celery, connection: Connection) -> None:
    watched = Watched(runtime_of(bank)._kept)
    holders = [op.started(connection) for _ in range(WAITERS)]

    async def main() -> list[object]:
        waiting = [asyncio.create_task(result_of(Handle(bank, holder.id))) for holder in holders]
        await Handle(bank, holders[0].id).alookup()
        for number, holder in enumerate(holders):
            ends.complete(connection, holder, str(number), retention=3600, lease=60)
        return await asyncio.gather(*waiting)

    assert asyncio.run(main()) == list(range(WAITERS))
    assert 0 < watched.most <= READERS
    readers = [thread for thread in threading.enumerate() if thread.name.startswith("idempotency-reader")]
    assert 0 < len(readers) <= READERS


def test_the_event_loop_goes_on_while_postgres_does_not_answer(
    bank: Celery, environment: dict[str, str], database: str
) -> None:
    url = make_url(database)
    proxy = Proxy(str(url.host), url.port or 5432)
    through = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
    b.configure(environment | {"DATABASE_URL": through})
    handle = Handle(bank, op.new_id())

    async def main() -> None:
        assert await handle.alookup() is None
        proxy.black_hole("replies")
        waiting = [asyncio.create_task(result_of(handle)) for _ in range(2 * READERS)]
        while proxy.swallowed == 0:
            await asyncio.sleep(0.01)
        # neither the loop nor the threads of asyncio itself, which resolve names, are used up
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "answered"), 5) == "answered"
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    try:
        asyncio.run(main())
    finally:
        proxy.close()
        close_runtime(bank)
