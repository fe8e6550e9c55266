"""The runbook of docs/restore.md: an older backup is restored, and nothing is charged twice."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

import services
from idempotency.store.rights import RELAY
from sandbox import ledger, process
from tests.orders.conftest import opened
from tests.orders.shop import Shop
from tests.support.documents import blocks


@contextmanager
def shop_on(database: str, servers: services.Services, provider: str) -> Iterator[Shop]:
    """The shop on this database, with the provider's sandbox."""
    with pytest.MonkeyPatch.context() as patch, opened(database, servers.broker_url, patch, Shop) as shop:
        from tasks import payments, reconciliation
        from tasks.gateway import StripeGateway

        gateway = StripeGateway("sk_test_sandbox", url=provider, search_lag=0.0)
        for module in (payments, reconciliation):
            patch.setattr(module, "gateway", gateway)
        yield shop
        gateway.close()


def pay(shop: Shop, payment_id: str) -> None:
    from tasks.payments import submit_payment

    with shop.transaction() as session:
        submit_payment(session, payment_id=payment_id, customer_id="c1", amount=1000, currency="EUR")


def copied(servers: services.Services, of: str) -> str:
    """A new database with what another one has."""
    admin = create_engine(servers.database_url, isolation_level="AUTOCOMMIT")
    name = f"restored_{uuid4().hex[:8]}"
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {of}"))
    admin.dispose()
    return make_url(servers.database_url).set(database=name).render_as_string(hide_password=False)


def charges(data: Path) -> dict[str, int]:
    """How often each payment was charged."""
    found: dict[str, int] = {}
    for charge in ledger.read(data).charges:
        name = charge.metadata["purchase_id"]
        found[name] = found.get(name, 0) + 1
    return found


def forget_keys(data: Path) -> None:
    """What the provider does after a day."""
    with sqlite3.connect(data / ledger.PROVIDER_FILE, timeout=10) as provider:
        provider.execute("DELETE FROM answers")


# Without asking they are: the test can tell.
@pytest.mark.parametrize("asks_first", [True, pytest.param(False, marks=pytest.mark.long)])
def test_what_the_backup_has_forgotten_is_asked_for_and_not_charged_again(
    servers: services.Services, template: str, tmp_path: Path, asks_first: bool
) -> None:
    with process.running("provider", tmp_path) as provider:
        first = copied(servers, template)
        with shop_on(first, servers, provider.url) as shop:
            pay(shop, "before")
            shop.run()
            pay(shop, "accepted")
        restored = copied(servers, str(make_url(first).database))
        with shop_on(first, servers, provider.url) as shop:
            shop.run()
            pay(shop, "after")
            shop.run()
            fence = shop.one("SELECT max(fence) FROM idempotency.records")[0]
        forget_keys(tmp_path)
        assert charges(tmp_path) == {"before": 1, "accepted": 1, "after": 1}

        with shop_on(restored, servers, provider.url) as shop:
            statements = blocks("docs/restore.md", "sql")
            assert len(statements) == 2
            owner = create_engine(restored)
            with owner.begin() as connection:
                for statement in statements:
                    connection.exec_driver_sql(statement)
            owner.dispose()
            until = datetime.now(UTC) + timedelta(days=3) if asks_first else None
            configured(shop, idempotency_ask_first_until=until)
            try:
                pay(shop, "after")  # its client has heard of it, and asks again
                pay(shop, "new")
                shop.run()
                twice = 1 if asks_first else 2
                assert charges(tmp_path) == {"before": 1, "accepted": twice, "after": twice, "new": 1}
                rows = "SELECT count(*), min(fence) FROM idempotency.records WHERE status = 'completed' AND key <> 'before'"
                number, lowest = shop.one(rows + " AND task = 'payments.capture_payment'")
                assert (number, lowest > fence) == (3, True)
                assert shop.one("SELECT count(*), sum(amount) FROM ledger")[:] == (4, 4000)
                if asks_first:
                    assert differences(shop) == []
            finally:
                configured(shop, idempotency_ask_first_until=None)
        for database in (first, restored):
            servers.drop_database(str(make_url(database).database))


def configured(shop: Shop, **settings: Any) -> None:
    from idempotency.application import close_runtime

    close_runtime(shop.app)
    shop.app.conf.update(settings)


def differences(shop: Shop) -> list[Any]:
    from tasks import reconciliation

    now = datetime.now(UTC)
    with shop.operating(RELAY):
        return reconciliation.reconcile(now - timedelta(days=1), now + timedelta(minutes=1)).differences
