"""Customers' endpoints when an application is renamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from idempotency.operate.rename import rename_service
from idempotency.testing import Outbox
from tests.integration.test_renaming import rename
from tests.support.operators import ANN


@pytest.fixture(autouse=True)
def named_as_before(bank: Celery) -> Iterator[None]:
    yield
    rename(bank, None)


@pytest.mark.long
def test_endpoints_hear_of_events_after_a_rename(
    shop: Celery, register: Any, happen: Any, rows: Any, receiver: Any
) -> None:
    register("acme", "order.*")
    happen("order.paid", "acme", id="1")
    Outbox(shop).run()
    before = [r for r in receiver.requests if r.document.get("type") == "order.paid"]
    assert (len(before), len(rows("deliveries"))) == (1, 1)
    rename(shop, "ledger")
    rename_service(shop, "bank", "ledger", ANN)
    happen("order.paid", "acme", id="2")
    Outbox(shop).run()
    after = [r for r in receiver.requests if r.document.get("type") == "order.paid"]
    assert (len(after), len(rows("deliveries"))) == (2, 2)
