"""One sandbox of the provider for all tests of a module."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import requests

from sandbox import process
from sandbox.process import Sandbox


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with process.running("provider", tmp_path_factory.mktemp("provider"), "--faults", "hold_ms=3000") as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(shared: Sandbox) -> Iterator[Sandbox]:
    yield shared
    response = requests.post(shared.url + "/_sandbox/faults", json={"rates": {}, "hold_ms": 3000}, timeout=30)
    assert response.json()["queued"] == [], "a queued fault found no request"


@pytest.fixture
def purchase() -> str:
    return f"purchase-{uuid.uuid4().hex}"
