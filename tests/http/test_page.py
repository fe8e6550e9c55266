"""The page on HTTP and its examples, run as they are."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from sqlalchemy import text
from typer.testing import CliRunner

from idempotency.cli.root import cli
from tests.support.documents import ROOT, python_blocks
from tests.support.edge import Edge, new_key, within


@pytest.mark.long
def test_the_page_on_http_runs_as_it_is(edge: Edge, edge_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", edge_database)
    with edge.engine.connect() as connection:
        connection.execute(text("CREATE TABLE payments (id text PRIMARY KEY, amount int)"))
    _, example = python_blocks("docs/http.md")
    assert (ROOT / "examples" / "http_fastapi" / "shop.py").read_text() == example
    # a module of its own, where FastAPI finds the names of the annotations
    shop: Any = ModuleType("shop")
    exec(example, shop.__dict__)

    async def send(client: httpx.AsyncClient) -> list[tuple[int, Any]]:
        sent = [("/payments", "p1", 5), ("/payments", "p1", 5), ("/payments", "p1", 6), ("/payments", "p2", 2000)]
        sent += [("/payments", "p2", 2000), ("/refunds", "r1", 3), ("/refunds", "r1", 3), ("/payments", "r1", 3)]
        answers = [
            await client.post(path, headers={"Idempotency-Key": key}, json={"amount": amount})
            for path, key, amount in sent
        ]
        answers.append(await client.post("/payments", json={"amount": 5}))
        return [(answer.status_code, answer.json().get("amount")) for answer in answers]

    try:
        assert asyncio.run(within(shop.app, send)) == [
            *[(201, 5), (201, 5), (422, None), (402, None)],
            *[(402, None), (201, -3), (201, -3), (422, None), (400, None)],
        ]
    finally:
        shop.runtime.close()
    with edge.engine.connect() as connection:
        month_ago = "expires_at = expires_at - interval '30 days'"
        connection.execute(text(f"UPDATE idempotency.records SET {month_ago} WHERE service = 'shop'"))
        rows = connection.execute(text("SELECT id, amount FROM payments ORDER BY id")).all()
    assert [tuple(row) for row in rows] == [("p1", 5), ("r1", -3)]
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "http_fastapi"))
    for command, said in (("recover", "recovered: 0"), ("purge", "purged: 3"), ("dead-letters list", "")):
        done = CliRunner().invoke(cli, [*command.split(), "-A", "upkeep"])
        assert (done.exit_code, said in done.output) == (0, True), done.output


def test_users_get_no_answer_of_each_others_and_strangers_none(edge: Edge) -> None:
    """FastAPI's own way to know the user, a dependency, is never asked for a replay: authentication stands outside."""
    outside, _ = python_blocks("docs/http.md")
    page: Any = ModuleType("outside")
    exec(outside, page.__dict__)
    app, key = FastAPI(), new_key()
    page.protect(app, edge.runtime)

    @app.post("/pay", status_code=201)
    def pay(request: Request) -> dict[str, str]:
        return {"card": f"card of {request.state.user}"}

    async def send(client: httpx.AsyncClient) -> list[tuple[int, str]]:
        tokens = ["a-secret", "b-secret", "wrong", "a-secret"]
        headers = [{"idempotency-key": key, "authorization": f"Bearer {token}"} for token in tokens]
        answers = [await client.post("/pay", headers=each) for each in headers]
        return [(answer.status_code, answer.text) for answer in answers]

    alice, bob = '{"card":"card of alice"}', '{"card":"card of bob"}'
    assert asyncio.run(within(app, send)) == [(201, alice), (201, bob), (401, ""), (201, alice)]
