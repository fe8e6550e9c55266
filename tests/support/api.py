"""The application over HTTP: the shop, a server in front of it, and clients of two tenants."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
from sqlalchemy import text

import services
from sandbox import ledger
from tests.support import shop
from tests.support.processes import PYTHONPATH
from tests.support.server import Server, api_key, client, serving
from tests.support.shop import Shop

PAYMENT: dict[str, Any] = {"customer_id": "c1", "amount": 1000, "currency": "EUR"}
ORDER = {**PAYMENT, "checkout_session_id": "cs-bad"}


@dataclass
class Api:
    """The shop, a server in front of it, and clients of two tenants."""

    shop: Shop
    server: Server
    acme: httpx.Client
    globex: httpx.Client

    def pay(self, key: str | None = None, *, by: httpx.Client | None = None, **changes: Any) -> httpx.Response:
        headers = {"Idempotency-Key": key or new_key()} | changes.pop("headers", {})
        return (by or self.acme).post("/payments", json=PAYMENT | changes, headers=headers)

    def captured(self, amount: int = 1000) -> str:
        """The id of a payment that is captured."""
        answer = self.pay(amount=amount, headers=WAIT)
        assert answer.json()["result"]["status"] == "captured", answer.text
        return str(answer.json()["key"])

    def refund(self, payment_id: str, amount: int, key: str | None = None, **headers: str) -> httpx.Response:
        body = {"payment_id": payment_id, "amount": amount, "reason": "test"}
        return self.acme.post("/refunds", json=body, headers={"Idempotency-Key": key or new_key()} | WAIT | headers)

    def charges(self, payment_id: str, tenant: str = "acme") -> list[int]:
        found = ledger.read(self.shop.data / "provider").charges
        named = (payment_id, tenant)
        return [each.amount for each in found if (each.metadata["purchase_id"], each.metadata.get("tenant")) == named]

    def count(self, table: str, where: str = "true", **values: Any) -> int:
        with self.shop.engine.connect() as connection:
            return int(connection.execute(text(f"SELECT count(*) FROM {table} WHERE {where}"), values).scalar_one())


WAIT = {"Prefer": "wait=25"}


def new_key() -> str:
    return f"k-{uuid4().hex[:10]}"


def problem(answer: httpx.Response) -> str:
    """The short name of the problem that an answer is."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return str(answer.json()["type"].rpartition(":")[2])


def forget(api: Api, *keys: str) -> None:
    """What the purge does."""
    with api.shop.engine.begin() as connection:
        for table in ("outbox", "sagas", "records"):
            connection.execute(text(f"DELETE FROM idempotency.{table} WHERE key = ANY (:keys)"), {"keys": list(keys)})


@contextmanager
def running(servers: services.Services, template: str, data: Path) -> Iterator[Api]:
    with shop.running(servers, template, data) as running_shop:
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "CRASH_DIRECTORY": str(data), "IDEMPOTENCY_LEASE": "4"}
        environment["IDEMPOTENCY_HEARTBEAT"] = "1"
        with serving(environment) as server:
            keys = [api_key(running_shop.engine, tenant) for tenant in ("acme", "globex")]
            acme, globex = (client(server, key) for key in keys)
            with acme, globex:
                yield Api(running_shop, server, acme, globex)
