"""The stored answer of a request is erased: the key stays spent, and its repetition is 410."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from celery import Celery
from sqlalchemy import Engine

from idempotency.application import runtime_of
from idempotency.errors import NotAuthenticated
from idempotency.operate.change import Change
from idempotency.operate.erase import erase
from idempotency.wire.keys import OperationId
from tests.support.dump import holding
from tests.support.edge import Edge, Handler, new_key
from tests.support.operators import ANN

CANARY = "canary-7f3a"


def test_an_erased_answer_is_gone_and_its_key_stays_spent(bank: Celery, engine: Engine) -> None:
    edge, key = Edge(runtime_of(bank), engine), new_key()
    handler = Handler(201, f'{{"name": "{CANARY}"}}'.encode(), (b"location", f"/people/{CANARY}".encode()))

    def ask(body: str = CANARY) -> httpx.Response:
        async def send(client: httpx.AsyncClient) -> httpx.Response:
            return await client.post("/people", content=body, headers={"idempotency-key": key})

        return edge.use(handler, send)

    assert (ask().status_code, ask().json()) == (201, {"name": CANARY})
    assert holding(engine, CANARY) == {"records"}
    record: Any = edge.record(key)
    id = OperationId(record.tenant, record.task, key)
    with pytest.raises(NotAuthenticated, match="or its task is not known here"):  # what a handler does is not said
        erase(bank, id, Change("ann", "request 17"))
    erase(bank, id, ANN)
    assert holding(engine, CANARY) == set()

    again = ask()
    assert (again.status_code, again.headers["content-type"]) == (410, "application/problem+json")
    assert again.json()["title"] == "Done before; its data was erased"
    assert (ask("another body").status_code, handler.runs, edge.entries(key)) == (422, 1, 1)
