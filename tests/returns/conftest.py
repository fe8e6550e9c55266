"""The shop of tests/orders, and a carrier that is a server of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import services
from sandbox import process
from sandbox.process import Sandbox
from tests.orders.conftest import a_shop
from tests.orders.conftest import fresh as fresh

if TYPE_CHECKING:
    from tests.returns.shop import Returns


@pytest.fixture(scope="module")
def carrier_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with process.running("carrier", tmp_path_factory.mktemp("carrier"), "--faults", "hold_ms=1") as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def shop(servers: services.Services, template: str, carrier_server: Sandbox) -> Iterator[Returns]:
    from tests.returns.shop import Returns

    for shop in a_shop(servers, template, Returns):
        with pytest.MonkeyPatch.context() as patch:
            shop.use(carrier_server, patch)
            yield shop
