"""Behind real servers, from a real client: many requests at once, two processes, and servers that are killed."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import crashing
from tests.support.edge import Edge, Server, end_lease, new_key
from tests.support.outside import OutsideWorld
from tests.support.processes import PYTHONPATH, eventually

PARALLEL = 50


@pytest.fixture(scope="module")
def provider() -> Iterator[OutsideWorld]:
    world = OutsideWorld()
    yield world
    world.close()


@pytest.fixture(scope="module")
def environment(edge_database: str, provider: OutsideWorld) -> dict[str, str]:
    return {**os.environ, "DATABASE_URL": edge_database, "OUTSIDE_URL": provider.url, "PYTHONPATH": PYTHONPATH}


@pytest.fixture(scope="module")
def two(environment: dict[str, str]) -> Iterator[tuple[Server, Server]]:
    servers = (Server(environment), Server(environment))
    yield servers
    for server in servers:
        server.stop()


Answered = tuple[int, bytes]


async def until_answered(client: httpx.AsyncClient, urls: list[str], key: str, path: str, first: int) -> Answered:
    """Send a request until it is answered for good, to each server in turn, as clients behind a proxy do."""
    async with asyncio.timeout(60):
        for number in itertools.count(first):
            url = f"{urls[number % len(urls)]}{path}"
            try:
                answer = await client.post(url, headers={"idempotency-key": key}, json={"account": key})
            except httpx.TransportError:
                await asyncio.sleep(0.02)
                continue
            if answer.status_code not in (409, 503):
                return answer.status_code, answer.content
            assert answer.headers["retry-after"]
            await asyncio.sleep(0.02)
    raise AssertionError("unreachable")


async def all_at_once(urls: list[str], key: str, path: str) -> list[Answered]:
    limits = httpx.Limits(max_connections=PARALLEL)
    async with httpx.AsyncClient(limits=limits, timeout=30) as client:
        return await asyncio.gather(*(until_answered(client, urls, key, path, first) for first in range(PARALLEL)))


def is_one_answer(answers: list[Answered]) -> bool:
    return {status for status, _ in answers} == {201} and len({body for _, body in answers}) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("path", ["/entries", "/payments"])
def test_of_fifty_requests_at_once_behind_two_processes_one_runs(
    edge: Edge, two: tuple[Server, Server], path: str
) -> None:
    key = new_key()
    answers = asyncio.run(all_at_once([server.url for server in two], key, path))
    assert is_one_answer(answers)
    assert edge.entries(key) == 1
    record: Any = edge.record(key)
    assert (record.status, record.attempts) == ("completed", 1)


@pytest.mark.long
def test_fifty_requests_get_one_answer_though_their_server_is_killed_and_started_again(
    edge: Edge, environment: dict[str, str], provider: OutsideWorld, tmp_path: Path
) -> None:
    """The server dies before its COMMIT; its successor takes the operation over after the lease."""
    key = new_key()
    crashing.plan(tmp_path, "finish.written", crashing.KILL_CHILD)
    first = Server(environment, crash_directory=tmp_path)
    urls, servers = [first.url], [first]

    async def main() -> list[Answered]:
        requests = asyncio.create_task(all_at_once(urls, key, "/payments"))
        await asyncio.to_thread(eventually, (tmp_path / "finish.written.reached").exists)
        servers.append(Server(environment))
        urls[:] = [servers[1].url]
        end_lease(edge.engine, key)
        return await requests

    try:
        answers = asyncio.run(main())
    finally:
        for server in servers:
            server.kill()
    assert is_one_answer(answers)
    assert (edge.entries(key), edge.entries(f"{key}/step")) == (1, 1)
    record: Any = edge.record(key)
    assert (record.status, record.attempts, record.taken_over) == ("completed", 2, True)
    assert set(provider.calls.values()) == {1}
