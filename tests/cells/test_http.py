"""Requests with an Idempotency-Key where tenants are in cells: one edge for all, or one for each."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from sqlalchemy import Engine, text

from idempotency import SettingsError, runtime_for
from idempotency.application import runtime_of
from idempotency.http import IdempotencyMiddleware
from tests.cells.conftest import Count, Serve
from tests.support.bank import INSERT
from tests.support.celled import app


def edge(**options: object) -> FastAPI:
    """Adds a row for the tenant that a header names."""
    web = FastAPI()

    @web.post("/deposits")
    def add(request: Request) -> dict[str, str]:
        attempt = request.state.idempotency
        attempt.session.execute(INSERT, {"account": f"{attempt.tenant}/{attempt.key}", "amount": 1})
        return {"tenant": attempt.tenant}

    def tenant(scope: dict[str, Any]) -> str:
        (named,) = [value for name, value in scope["headers"] if name == b"x-tenant"]
        return str(named.decode())

    web.add_middleware(IdempotencyMiddleware, tenant=tenant, **options)  # type: ignore[arg-type]
    return web


def post(web: FastAPI, *tenants: str) -> list[httpx.Response]:
    async def requests() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=web), base_url="http://edge") as client:
            return [
                await client.post("/deposits", headers={"idempotency-key": '"k1"', "x-tenant": tenant})
                for tenant in tenants
            ]

    return asyncio.run(requests())


@pytest.mark.long
def test_one_edge_for_all_cells(serve: Serve, count: Count) -> None:
    serve(None)
    web = edge(runtime=partial(runtime_for, app))
    answers = post(web, "eu-acme", "us-bolt", "eu-acme", "us-bolt", "nobody")
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 421]
    assert [count(cell, f"{tenant}/k1") for tenant in ("eu-acme", "us-bolt") for cell in ("eu", "us")] == [1, 0, 0, 1]


def test_an_edge_of_one_cell_answers_no_other(serve: Serve, engines: dict[str, Engine], count: Count) -> None:
    serve("eu")
    web = edge(runtime=lambda: runtime_of(app))
    mine, others = post(web, "eu-acme", "us-bolt")
    assert (mine.status_code, others.status_code) == (200, 421)
    assert others.json()["type"] == "urn:idempotency:problem:other_cell"
    assert "us" not in others.json()["detail"].split()  # whose it is, is no client's to know
    for cell, expected in (("eu", 1), ("us", 0)):
        with engines[cell].connect() as connection:
            assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == expected
    assert count("us", "us-bolt/k1") == 0


def test_a_runtime_by_tenant_needs_the_tenant(serve: Serve) -> None:
    serve(None)
    with pytest.raises(SettingsError, match="tenant: has to be given"):
        IdempotencyMiddleware(FastAPI(), runtime=partial(runtime_for, app))
