"""A tenant that keeps too much gets 429 for new keys, and its old answers as before."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from idempotency.http import quota
from tests.support.edge import Edge, Handler, new_key, within


def posts(edge: Edge, tenant: str, keys: list[str], handler: Handler, **limits: Any) -> list[httpx.Response]:
    """The answers to these requests, one after the other, of a process that has this quota."""
    before = edge.runtime.settings
    edge.runtime.settings = before.model_copy(update=limits)

    async def send(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await client.post("/pay", json={}, headers={"idempotency-key": key}) for key in keys]

    try:
        return asyncio.run(within(edge.middleware(handler, tenant=lambda _: tenant), send))
    finally:
        edge.runtime.settings = before


@pytest.mark.parametrize(
    ("limits", "unit"),
    [({"tenant_keys_limit": 2}, "keys"), ({"tenant_bytes_limit": 1500}, "bytes")],
    ids=["keys", "bytes"],
)
def test_new_keys_beyond_the_quota_are_refused_and_old_ones_answered(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], unit: str
) -> None:
    monkeypatch.setattr(quota, "AGE", 0.0)  # counted anew for each request
    tenant, keys, handler = new_key(), [new_key() for _ in range(4)], Handler(201, b"x" * 300)
    answers = posts(edge, tenant, [*keys, keys[0]], handler, **limits)
    assert [answer.status_code for answer in answers] == [201, 201, 429, 429, 201]
    assert (handler.runs, answers[-1].headers["idempotency-replayed"]) == (2, "true")
    assert answers[2].headers["retry-after"] == "60"
    problem = answers[2].json()
    assert (problem["type"].rpartition(":")[2], problem["unit"]) == ("quota_exceeded", unit)
    assert problem["limit"] == next(iter(limits.values()))
    assert edge.record(keys[2]) is None  # nothing was begun
    assert posts(edge, new_key(), [new_key()], handler, **limits)[0].status_code == 201  # another tenant has its own


def test_a_count_is_believed_for_a_while(edge: Edge) -> None:
    handler = Handler()
    answers = posts(edge, new_key(), [new_key() for _ in range(3)], handler, tenant_keys_limit=1)
    assert [answer.status_code for answer in answers] == [201, 201, 201]


def test_what_was_released_keeps_no_answer_and_uses_up_no_quota(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "AGE", 0.0)
    tenant, handler = new_key(), Handler(500)
    answers = posts(edge, tenant, [new_key() for _ in range(3)], handler, tenant_keys_limit=1)
    handler.status = 201
    answers += posts(edge, tenant, [new_key() for _ in range(2)], handler, tenant_keys_limit=1)
    assert [answer.status_code for answer in answers] == [500, 500, 500, 201, 429]


def test_an_answer_past_its_retention_uses_up_no_quota(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """In partitions it stays for a period and an hour more, until all of its partition goes."""
    monkeypatch.setattr(quota, "AGE", 0.0)
    tenant, handler = new_key(), Handler(201)
    answers = posts(edge, tenant, [new_key() for _ in range(2)], handler, tenant_keys_limit=1)
    with edge.engine.connect() as connection:
        connection.execute(
            text(
                "UPDATE idempotency.records SET expires_at = clock_timestamp() - interval '1 s' WHERE tenant = :tenant"
            ),
            {"tenant": tenant},
        )
    answers += posts(edge, tenant, [new_key() for _ in range(2)], handler, tenant_keys_limit=1)
    assert [answer.status_code for answer in answers] == [201, 429, 201, 429]
