"""Waiting for operations to end: told by NOTIFY, found by looking where that was missed, without a connection each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from idempotency.application import runtime_of
from idempotency.errors import SettingsError
from idempotency.store import waiters
from idempotency.upkeep import maintenance
from idempotency.waiting import Ends
from idempotency.wire.keys import OperationId
from tests.support import operations as op
from tests.support.operations import new_id

T = TypeVar("T")
LISTENERS = text(
    "SELECT pid FROM pg_stat_activity WHERE query = 'LISTEN idempotency_ended' AND datname = current_database()"
)


@pytest.fixture
def ends(bank: Celery) -> Iterator[Ends]:
    waiting = Ends(runtime_of(bank))
    yield waiting
    waiting.close()


def rows(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM idempotency.waiters")).scalar_one())


def listeners(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.execute(LISTENERS).scalars())


async def until(condition: Callable[[], T]) -> T:
    """The first true answer, asked off the loop."""
    async with asyncio.timeout(15):
        while not (found := await asyncio.to_thread(condition)):
            await asyncio.sleep(0.01)
        return found


def complete(engine: Engine, *ids: OperationId) -> None:
    with engine.connect() as connection:
        for id in ids:
            op.completed(connection, id)


def waited(
    ends: Ends, engine: Engine, id: OperationId, then: Callable[[], Awaitable[None]], seconds: float = 15
) -> bool | None:
    """Wait for the operation, and once its row is there do `then`."""

    async def both() -> bool | None:
        waiting = asyncio.create_task(ends.wait(id, seconds))
        await until(lambda: rows(engine))
        await then()
        return await waiting

    return asyncio.run(both())


@pytest.mark.direct
def test_an_end_wakes_its_waiters_without_polling(ends: Ends, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ends, "_poll", lambda self: None)
    id = new_id()

    async def end() -> None:
        await until(lambda: listeners(engine))
        await asyncio.to_thread(complete, engine, id)

    assert waited(ends, engine, id, end)


def test_an_end_whose_notify_was_missed_is_found_by_looking(ends: Ends, engine: Engine) -> None:
    id = new_id()

    async def end() -> None:
        with engine.connect() as connection:
            connection.execute(text("DELETE FROM idempotency.waiters"))
        complete(engine, id)

    assert waited(ends, engine, id, end)


@pytest.mark.direct
def test_a_listener_that_is_cut_off_listens_again(ends: Ends, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ends, "_poll", lambda self: None)
    id = new_id()

    async def end() -> None:
        (before,) = await until(lambda: listeners(engine))
        with engine.connect() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": before})
        await until(lambda: [pid for pid in listeners(engine) if pid != before])
        complete(engine, id)

    assert waited(ends, engine, id, end)


def test_what_has_ended_before_is_not_waited_for_and_what_does_not_end_is_given_up(ends: Ends, engine: Engine) -> None:
    done, never = new_id(), new_id()
    complete(engine, done)
    assert asyncio.run(ends.wait(done, 60))
    assert not asyncio.run(ends.wait(never, 0.05))
    assert asyncio.run(until(lambda: rows(engine) == 1))


def test_a_hundred_waiters_hold_no_connection_and_their_rows_go(ends: Ends, bank: Celery, engine: Engine) -> None:
    ids = [new_id() for _ in range(100)]
    runtime = runtime_of(bank)
    assert len(ids) > 2 * runtime.settings.pool_size

    async def all_of_them() -> list[bool | None]:
        waiting = asyncio.gather(*(ends.wait(id, 30) for id in ids))
        await until(lambda: rows(engine) == len(ids))
        pools = [pool for each in runtime._engines if hasattr(pool := each.pool, "checkedout")]
        await until(lambda: sum(pool.checkedout() for pool in pools) == 0)
        await asyncio.to_thread(complete, engine, *ids)
        return await waiting

    assert asyncio.run(all_of_them()) == [True] * len(ids)
    asyncio.run(until(lambda: rows(engine) == 0))


@pytest.mark.long
def test_the_waiting_goes_on_after_an_error_that_is_no_outage(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, refusals = runtime_of(bank), [SettingsError("default_transaction_isolation: wrong for a moment")]
    listen = runtime.listen

    def refused_once(channel: str) -> Any:
        if refusals:
            raise refusals.pop()
        return listen(channel)

    monkeypatch.setattr(runtime, "listen", refused_once)
    ends = Ends(runtime)
    id = new_id()

    async def end() -> None:
        await asyncio.to_thread(complete, engine, id)

    assert waited(ends, engine, id, end)
    ends.close()
    assert refusals == []


def test_beyond_the_limit_of_a_process_calls_do_not_wait(bank: Celery, engine: Engine) -> None:
    full = Ends(runtime_of(bank), limit=0)
    assert not asyncio.run(full.wait(new_id(), 60))
    assert rows(engine) == 0
    full.close()


def test_one_tenant_does_not_take_the_places_of_the_others(bank: Celery, engine: Engine) -> None:
    shared = Ends(runtime_of(bank), limit_of_a_tenant=1)

    async def wait() -> list[bool | None]:
        noisy = [OperationId("noisy", "t", key) for key in "abc"]
        return await asyncio.gather(*(shared.wait(id, 0.2) for id in (*noisy, OperationId("quiet", "t", "a"))))

    assert asyncio.run(wait()) == [False, None, None, False]
    shared.close()


def test_a_purge_forgets_those_whose_time_is_over(bank: Celery, engine: Engine) -> None:
    with engine.connect() as connection:
        waiters.add(connection, new_id(), -1.0)
        waiters.add(connection, new_id(), 60.0)
    maintenance.purge(bank)
    assert rows(engine) == 1
