"""One difference has one open letter, also when the number after its key would begin anew."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text

from idempotency.application import runtime_of, settings_of
from idempotency.store import purge
from idempotency.store.rights import RELAY
from tests.orders.shop import Shop
from tests.orders.test_discarded_letters import AGED, LETTERS, discard_by_two
from tests.orders.test_reconciliation import found, paid


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


@pytest.mark.long
def test_a_difference_has_one_open_letter_also_once_its_first_operation_is_purged(
    shop: Shop, gateway: Any, servers: Any
) -> None:
    """The letter was discarded; the next day has another, which stays open. A month later the first operation is purged, and its key
    is free again (`--days 90`, or a refund pending at the site, which is asked about without an end).
    """
    order, charge = paid(shop)
    task, key = "payments.check_difference", f"charge:{charge}:%"
    with shop.books.begin() as connection:
        connection.execute(text("UPDATE ledger SET amount = 1 WHERE payment_id = :id"), {"id": order})
    found(shop)
    shop.run()
    first = shop.one("SELECT key FROM idempotency.records WHERE task = :task AND key LIKE :key", task=task, key=key)[0]
    discard_by_two(shop, task, key)
    found(shop)
    shop.run()
    assert shop.one(LETTERS, task=task, key=key)[0] == 1
    owner = create_engine(make_url(servers.database_url).set(database=shop.engine.url.database))
    with (
        owner.begin() as connection
    ):  # `a_month_later` says that all was published yesterday; the first one was a month ago
        for statement in AGED[:2]:
            connection.execute(text(statement), {"task": task, "key": first})
        connection.execute(
            text(
                "UPDATE idempotency.outbox SET status = 'published', settled_at = clock_timestamp() - interval '30 d',"
                " published_at = clock_timestamp() - interval '30 d' WHERE task = :task AND key = :key"
            ),
            {"task": task, "key": first},
        )
    owner.dispose()
    settings = settings_of(shop.app)
    with shop.operating(RELAY), runtime_of(shop.app).autocommit() as connection:
        purge.operations(connection, settings.service, horizon=settings.redelivery_horizon, limit=10_000)
    found(shop)
    shop.run()
    assert shop.one(LETTERS, task=task, key=key)[0] == 1
