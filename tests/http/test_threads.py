"""Which request gets one of the threads, and what is answered without one."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import text

from idempotency.http import IdempotencyMiddleware
from idempotency.http.asgi import Receive, Scope, Send
from tests.http.test_handlers import post
from tests.support.edge import Edge, Handler, new_key

Client = httpx.AsyncClient


def tenant_of(scope: Scope) -> str:
    return str(dict(scope["headers"])[b"x-tenant"].decode())


def scoped(tenant: str, key: str) -> list[tuple[str, str]]:
    return [("x-tenant", tenant), ("idempotency-key", key)]


def told(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json().get("type", "").rpartition(":")[2]


class Slow(Handler):
    """Requests of the tenant `loud` wait for `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = 0, asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if tenant_of(scope) == "loud":
            self.entered += 1
            await self.go.wait()
        await self.answer(send)

    async def are_inside(self, count: int) -> None:
        async with asyncio.timeout(30):
            while self.entered < count:
                await asyncio.sleep(0.01)


@pytest.mark.long
def test_a_tenant_alone_gets_half_of_the_threads_and_others_are_carried_out(edge: Edge) -> None:
    async def main() -> None:
        handler = Slow()
        middleware = edge.middleware(handler, tenant=tenant_of, concurrency=4, patience=0.05)
        async with Client(transport=httpx.ASGITransport(middleware), base_url="http://edge") as client:
            slow = [asyncio.create_task(client.post("/pay", headers=scoped("loud", new_key()))) for _ in range(4)]
            await handler.are_inside(2)
            other = await client.post("/pay", headers=scoped("quiet", new_key()))
            done, _ = await asyncio.wait(slow, timeout=1)
            handler.go.set()
            answers = await asyncio.gather(*slow)
        assert other.status_code == 201
        assert sorted(answer.status_code for answer in answers) == [201, 201, 503, 503]
        assert len(done) == 2

    asyncio.run(main())


def test_what_is_recorded_is_answered_while_every_thread_is_taken(edge: Edge) -> None:
    """Replays, conflicts, other requests under the key: none of them needs a thread."""
    done, held = new_key(), new_key()

    async def main() -> None:
        handler = Slow()
        middleware = edge.middleware(handler, tenant=tenant_of, concurrency=1, patience=0.05)
        async with Client(transport=httpx.ASGITransport(middleware), base_url="http://edge") as client:
            await client.post("/pay", headers=scoped("quiet", done))
            slow = asyncio.create_task(client.post("/pay", headers=scoped("loud", held)))
            await handler.are_inside(1)
            replay = await client.post("/pay", headers=scoped("quiet", done))
            others = [
                await client.post(path, headers=scoped(tenant, key))
                for path, tenant, key in (
                    ("/refund", "quiet", done),
                    ("/pay", "loud", held),
                    ("/refund", "loud", held),
                    ("/pay", "quiet", new_key()),
                )
            ]
            handler.go.set()
            assert (await slow).status_code == 201
        assert (replay.status_code, replay.headers["idempotency-replayed"]) == (201, "true")
        assert [told(answer) for answer in others] == [
            (422, "idempotency_key_reused"),
            (409, "request_in_progress"),
            (422, "idempotency_key_reused"),
            (503, "unavailable"),
        ]

    asyncio.run(main())


def test_the_repeats_of_a_request_whose_record_is_locked_leave_threads_to_others(edge: Edge) -> None:
    """Each claim waits for the lock, for a lease at most; clients whose time is over send again."""
    key = new_key()
    post(edge.middleware(Handler(500)), key)
    with edge.engine.connect() as locker:
        locker.execute(text("BEGIN"))
        locker.execute(text("SELECT FROM idempotency.records WHERE key = :key FOR UPDATE"), {"key": key})

        async def send(client: Client) -> list[int]:
            same = [asyncio.create_task(client.post("/pay", headers={"idempotency-key": key})) for _ in range(5)]
            await asyncio.sleep(0)
            others = [(await client.post("/pay", headers={"idempotency-key": new_key()})).status_code for _ in range(3)]
            await asyncio.to_thread(locker.execute, text("ROLLBACK"))
            answers = await asyncio.gather(*same)
            assert 201 in {answer.status_code for answer in answers} <= {201, 409}
            return others

        assert edge.use(Handler(), send, concurrency=4, patience=30) == [201] * 3


@pytest.mark.long
def test_requests_of_several_event_loops_wait_for_one_thread(edge: Edge) -> None:
    """Starlette's TestClient has a loop for each request."""
    app, seen = FastAPI(), Event()
    app.add_middleware(IdempotencyMiddleware, runtime=edge.runtime, concurrency=1, patience=30)

    @app.post("/pay", status_code=201)
    def pay() -> None:
        seen.wait(0.05)

    def ask(_: int) -> int:
        return post(app, new_key())[0].status_code  # in a loop of its own

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(ask, range(8))) == {201}


def test_a_client_that_goes_while_it_waits_takes_no_thread(edge: Edge) -> None:
    async def main() -> None:
        handler = Slow()
        middleware: Any = edge.middleware(handler, tenant=tenant_of, concurrency=1, patience=30)
        async with Client(transport=httpx.ASGITransport(middleware), base_url="http://edge") as client:
            slow = asyncio.create_task(client.post("/pay", headers=scoped("loud", new_key())))
            await handler.are_inside(1)
            gone = asyncio.create_task(client.post("/pay", headers=scoped("quiet", new_key())))
            async with asyncio.timeout(30):
                while not middleware._threads[None]._waiting:
                    await asyncio.sleep(0.01)
            gone.cancel()
            await asyncio.wait([gone])
            handler.go.set()
            await slow
            assert (await client.post("/pay", headers=scoped("quiet", new_key()))).status_code == 201
        assert (
            middleware._threads[None]._waiting,
            middleware._threads[None]._free,
            len(middleware._threads[None]._held),
        ) == ([], 1, 0)

    asyncio.run(main())
