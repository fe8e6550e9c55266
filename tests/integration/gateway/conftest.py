"""The gateway against the real sandbox, which one module shares."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from sandbox import process
from sandbox.process import Sandbox
from tasks.gateway import StripeGateway
from tests.integration.gateway.purchases import KEY


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with process.running("provider", tmp_path_factory.mktemp("provider"), "--faults", "hold_ms=5000") as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(shared: Sandbox) -> Iterator[Sandbox]:
    yield shared
    response = requests.post(shared.url + "/_sandbox/faults", json={"rates": {}, "hold_ms": 5000}, timeout=30)
    assert response.json()["queued"] == [], "a queued fault found no request"


@pytest.fixture
def gateway(sandbox: Sandbox) -> Iterator[StripeGateway]:
    gateway = StripeGateway(KEY, url=sandbox.url, read_timeout=10)
    yield gateway
    gateway.close()


@pytest.fixture
def purchase() -> dict[str, Any]:
    return {"payment_id": f"p-{uuid.uuid4().hex}", "customer_id": "c-1", "amount": 1250, "currency": "eur"}


@pytest.fixture
def key() -> str:
    return f"idem-{uuid.uuid4().hex}"
