"""Each consumer killed at every step, delivered twice and overtaken: its rows and its events are those of one plain run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text

import services
from idempotency.application import close_runtime
from tests.orders.shop import ORDER

DATA = {**ORDER, "order_id": "o1", "checkout_session_id": "cs1", "sku": "s1", "quantity": 2, "payment_id": "o1"}
TABLES = (
    "stock_movements",
    "stock",
    "reservations",
    "orders",
    "ledger",
    "support_cases",
    "disputes",
    "refunds",
    "payments",
)
STOCK = "INSERT INTO stock (sku, available, reserved) VALUES ('s1', {available}, {reserved})"
RESERVATION = "INSERT INTO reservations (order_id, sku, quantity, status) VALUES ('o1', 's1', 2, 'STOCK_CONFIRMED')"
PLACED = """
INSERT INTO orders (checkout_session_id, id, customer_id, amount, currency, sku, quantity)
VALUES ('cs1', 'o1', 'c1', 1000, 'EUR', 's1', 2)
"""
CAPTURED = """
INSERT INTO payments (id, customer_id, amount, currency, status, charge_id, refunded, order_status)
VALUES ('o1', 'c1', 1000, 'EUR', 'captured', 'ch_1', 0, 'placed')
"""
CASES = {
    "warehouse.confirm_stock": ("order.placement_requested", [STOCK.format(available=3, reserved=0)]),
    "warehouse.reserve_stock": ("order.paid", [STOCK.format(available=3, reserved=0)]),
    "warehouse.release_stock": ("order.cancelled", [STOCK.format(available=1, reserved=2), RESERVATION]),
    "orders.request_payment": ("stock.confirmed", []),
    "orders.mark_paid": ("payment.captured", [PLACED]),
    "orders.cancel_out_of_stock": ("stock.unavailable", [PLACED]),
    "payments.charge_order": ("order.pending_payment", []),
    "payments.cancel_payment": ("order.cancelled", [CAPTURED]),
}

USUAL = ("payments.cancel_payment",)


@pytest.fixture
def application(servers: services.Services, database: str, engine: Engine) -> Iterator[Celery]:
    with pytest.MonkeyPatch.context() as patch:
        for variable, address in (("DATABASE_URL", database), ("BROKER_URL", servers.broker_url)):
            if variable not in os.environ:
                patch.setenv(variable, address)
        import tasks
        from tasks.migrate import migrate

        configuration: dict[str, Any] = {
            "broker_url": servers.broker_url,
            "idempotency_database_url": database,
            "idempotency_redis_url": None,
            "idempotency_retry_base": 0.0,
        }
        tasks.app.conf.update(configuration)
        close_runtime(tasks.app)
        migrate(engine.execution_options(isolation_level="READ COMMITTED"))
        tasks.app.loader.import_default_modules()
        yield tasks.app
        close_runtime(tasks.app)


# `make saga-crashes` kills all of them, at every point of whole orders
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in USUAL)) for name in CASES],
)
def test_a_consumer_is_idempotent_wherever_it_is_killed(
    application: Celery, engine: Engine, assert_idempotent: Any, name: str
) -> None:
    event_type, rows = CASES[name]

    def setup() -> None:
        with engine.connect() as connection:
            for row in rows:
                connection.execute(text(row))

    event = {"specversion": "1.0", "id": "e1", "source": "/tasks", "type": event_type, "data": DATA}
    call = application.tasks[name].s(event).set(idempotency_key="e1")
    assert_idempotent(call, setup=setup, tables=TABLES)
