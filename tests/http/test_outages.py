"""Postgres is away, or the answer to a COMMIT is lost: the client is told to ask again, or gets the one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from idempotency.attempt.runtime import Runtime
from idempotency.settings import Settings
from tests.support.edge import Edge, Handler, new_key
from tests.support.proxy import Proxy

# as psycopg sends it
COMMIT = b"\x0bCOMMIT\x00"


@pytest.fixture
def proxy(edge_database: str) -> Iterator[Proxy]:
    url = make_url(edge_database)
    assert url.host is not None
    assert url.port is not None
    proxy = Proxy(url.host, url.port)
    yield proxy
    proxy.close()


@pytest.fixture
def through(proxy: Proxy, edge: Edge, edge_database: str) -> Iterator[Edge]:
    """The application reaches Postgres through the proxy."""
    url = make_url(edge_database).set(host="127.0.0.1", port=proxy.port)
    runtime = Runtime(Settings.read({"database_url": url.render_as_string(hide_password=False)}))
    yield Edge(runtime, edge.engine)
    runtime.close()


def test_a_lost_answer_to_the_commit_is_answered_once_and_runs_nothing_twice(proxy: Proxy, through: Edge) -> None:
    key, handler = new_key(), Handler(201, b"x" * 5_000, (b"set-cookie", b"s=1"))

    async def send(client: httpx.AsyncClient) -> httpx.Response:
        await client.post("/pay", headers={"idempotency-key": new_key()})
        proxy.cut_reply_to(COMMIT)
        return await client.post("/pay", headers={"idempotency-key": key})

    answer = through.use(handler, send)
    assert proxy.cuts == 1
    # the handler's own answer, and not a replay, which would have no cookie
    assert (answer.status_code, answer.content, answer.headers["set-cookie"]) == (201, handler.body, "s=1")
    assert "idempotency-replayed" not in answer.headers
    record: Any = through.record(key)
    assert (record.status, record.attempts, through.entries(key), handler.runs) == ("completed", 1, 1, 2)


@pytest.mark.long
def test_after_a_restart_of_postgres_no_request_finds_a_dead_connection(proxy: Proxy, through: Edge) -> None:
    """An idle connection learns of the restart when it is used; one does for all, and that claim is made again."""
    handler = Handler()

    async def send(client: httpx.AsyncClient) -> list[int]:
        async def many() -> list[int]:
            sent = [client.post("/pay", headers={"idempotency-key": new_key()}) for _ in range(8)]
            return [answer.status_code for answer in await asyncio.gather(*sent)]

        before = await many()
        with through.engine.connect() as connection:
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    # not those of autovacuum, which only a superuser may end
                    "WHERE datname = current_database() AND usename = current_user AND pid <> pg_backend_pid()"
                )
            )
        return before + await many() + await many()

    assert set(through.use(handler, send)) == {201}


def test_without_postgres_a_request_is_sent_again_later(proxy: Proxy, through: Edge) -> None:
    key, handler = new_key(), Handler()

    async def send(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/pay", headers={"idempotency-key": key})

    proxy.close()
    answer = through.use(handler, send)
    assert (answer.status_code, answer.headers["retry-after"], handler.runs) == (503, "1", 0)
    assert answer.json()["type"].endswith("unavailable")
