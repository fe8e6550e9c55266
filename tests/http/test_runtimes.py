"""The runtime of the middleware: an open one, in each life of its application."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from idempotency.attempt.runtime import Runtime
from idempotency.http import IdempotencyMiddleware
from idempotency.settings import Settings
from tests.support.edge import Handler, new_key, within


@contextmanager
def opened(edge_database: str) -> Iterator[Runtime]:
    runtime = Runtime(Settings.read({"database_url": edge_database}))
    try:
        yield runtime
    finally:
        runtime.close()


def post(app: IdempotencyMiddleware) -> int:
    async def send(client: httpx.AsyncClient) -> int:
        return (await client.post("/pay", headers={"idempotency-key": new_key()})).status_code

    return asyncio.run(within(app, send))


def test_an_application_that_is_started_a_second_time_uses_its_second_runtime(edge_database: str) -> None:
    """Its lifespan closes the first, whose heartbeat renews nothing any more."""
    lives: list[Runtime] = []
    app = IdempotencyMiddleware(Handler(), runtime=lambda: lives[-1])
    for _ in range(2):
        with opened(edge_database) as runtime:
            lives.append(runtime)
            assert post(app) == 201
            assert runtime.heartbeat._thread is not None


def test_a_closed_runtime_holds_nothing(edge_database: str) -> None:
    handler = Handler()
    with opened(edge_database) as runtime:
        app = IdempotencyMiddleware(handler, runtime=runtime)
        assert post(app) == 201

    async def send() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge") as client:
            await client.post("/pay", headers={"idempotency-key": new_key()})

    with pytest.raises(RuntimeError, match="the runtime is closed"):
        asyncio.run(send())
    assert handler.runs == 1
