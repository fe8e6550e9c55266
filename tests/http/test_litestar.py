"""Behind Litestar, around the whole application and as its own middleware."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from idempotency.http import IdempotencyMiddleware
from tests.support.edge import INSERT, Edge, new_key, within

litestar = pytest.importorskip("litestar")
pytestmark = pytest.mark.ecosystem


def handlers() -> list[Any]:
    async def deposit(request: Any) -> dict[str, str]:
        attempt, data = request.state.idempotency, await request.json()
        await attempt.run_sync(lambda session: session.execute(INSERT, data))
        return {"key": attempt.key}

    def deposit_in_thread(request: Any) -> dict[str, str]:
        attempt = request.state.idempotency
        attempt.session.execute(INSERT, {"account": attempt.key})
        return {"key": attempt.key}

    for each in (deposit, deposit_in_thread):
        each.__annotations__ = {"request": litestar.Request, "return": dict[str, str]}
    return [
        litestar.post("/deposits")(deposit),
        litestar.post("/deposits-in-thread", sync_to_thread=True)(deposit_in_thread),
    ]


@pytest.mark.parametrize("path", ["/deposits", "/deposits-in-thread"])
@pytest.mark.parametrize("place", ["around", "inside"])
def test_litestar_carries_out_a_request_once(edge: Edge, place: str, path: str) -> None:
    if place == "around":
        app = edge.middleware(litestar.Litestar(handlers()), required=True)
    else:
        inside = litestar.middleware.DefineMiddleware(IdempotencyMiddleware, runtime=edge.runtime, required=True)
        app = litestar.Litestar(handlers(), middleware=[inside])

    async def send(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [
            await client.post(path, headers={"idempotency-key": key}, json={"account": body})
            for body in (key, key, f"other {key}")
        ] + [await client.post(path, json={"account": key})]

    key = new_key()
    first, repeat, reused, without = run(app, send)
    assert (first.status_code, first.json()) == (201, {"key": key})
    assert (repeat.status_code, repeat.content) == (201, first.content)
    assert repeat.headers["idempotency-replayed"] == "true"
    assert (reused.status_code, without.status_code) == (422, 400)
    assert edge.entries(key) == 1


def run(app: Any, send: Any) -> Any:
    return asyncio.run(within(app, send))
