"""examples/http_django, with a real server."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
from sqlalchemy import text
from sqlalchemy.engine import make_url

from tests.support.edge import Edge, Server
from tests.support.processes import PYTHONPATH

EXAMPLE = Path(__file__).parents[2] / "examples" / "http_django"


def test_a_django_views_orm_writes_are_committed_with_its_answer(edge: Edge, edge_database: str) -> None:
    url = make_url(edge_database)
    with edge.engine.connect() as connection:
        connection.execute(text("CREATE TABLE payments (id text PRIMARY KEY, amount int)"))
    environment = os.environ | {
        "PGHOST": str(url.host),
        "PGPORT": str(url.port),
        "PGDATABASE": str(url.database),
        "PGUSER": str(url.username),
        "PGPASSWORD": str(url.password),
        "PYTHONPATH": f"{EXAMPLE}{os.pathsep}{PYTHONPATH}",
    }
    server = Server(environment, "shop:application")
    try:
        answers = [
            httpx.post(f"{server.url}/payments", headers={"Idempotency-Key": key}, json={"amount": amount}, timeout=30)
            for key, amount in [("d1", 5), ("d1", 5), ("d1", 6), ("d2", 2000), ("d2", 2000)]
        ]
    finally:
        server.stop()
    assert [answer.status_code for answer in answers] == [201, 201, 422, 402, 402]
    assert answers[1].content == answers[0].content
    assert answers[1].headers["idempotency-replayed"] == "true"
    with edge.engine.connect() as connection:
        assert [tuple(row) for row in connection.execute(text("SELECT id, amount FROM payments"))] == [("d1", 5)]
