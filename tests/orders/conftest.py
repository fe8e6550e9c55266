"""One database and one shop for each module: orders do not know each other, except for the stock that a test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, text

import services
from idempotency.store import roles
from idempotency.store.rights import APPLICATION, RELAY
from sandbox import process
from tests.support.roles import PASSWORDS, url_of

if TYPE_CHECKING:
    from tests.orders.shop import Shop

ShopT = TypeVar("ShopT", bound="Shop")


@pytest.fixture(scope="module")
def shop(servers: services.Services, template: str) -> Iterator[Shop]:
    from tests.orders.shop import Shop

    yield from a_shop(servers, template, Shop)


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[process.Sandbox]:
    with process.running("provider", tmp_path_factory.mktemp("provider")) as sandbox:
        yield sandbox


@pytest.fixture
def gateway(shop: Shop, provider: process.Sandbox, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The provider's sandbox, and nothing in our books from other tests."""
    from tasks import payments, reconciliation, refunds, settlement
    from tasks.gateway import StripeGateway

    shop.forget()
    with shop.books.begin() as connection:
        for table in ("ledger", "refunds", "support_cases", "payments"):
            connection.execute(text(f"DELETE FROM {table}"))
    gateway = StripeGateway("sk_test_sandbox", url=provider.url, search_lag=0.0)
    for module in (payments, refunds, settlement, reconciliation):
        monkeypatch.setattr(module, "gateway", gateway)
    yield gateway
    gateway.close()


@pytest.fixture
def fresh(shop: Shop) -> Iterator[None]:
    """A test sees only what is accepted after it has begun, and afterwards the stock is what its movements say."""
    from tests.orders.books import check_stock

    shop.forget()
    yield
    check_stock(shop)


def a_shop(servers: services.Services, template: str, make: type[ShopT]) -> Iterator[ShopT]:
    """The application on a database of its own, for a module's tests."""
    name = f"orders_{uuid4().hex[:8]}"
    admin = create_engine(servers.database_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY"))
    database = admin.url.set(database=name).render_as_string(hide_password=False)
    admin.dispose()
    with pytest.MonkeyPatch.context() as patch, opened(database, servers.broker_url, patch, make) as shop:
        yield shop
    servers.drop_database(name)


@contextmanager
def opened(database: str, broker: str, patch: pytest.MonkeyPatch, make: type[ShopT]) -> Iterator[ShopT]:
    """A shop in a migrated database."""
    # the application reads its addresses when it is imported
    for variable, address in (("DATABASE_URL", database), ("BROKER_URL", broker)):
        if variable not in os.environ:
            patch.setenv(variable, address)
    import tasks
    from idempotency.application import close_runtime
    from tasks import notifications, payments, refunds
    from tasks.migrate import grant, migrate
    from tests.orders.outside import Mailer, Provider
    from tests.orders.shop import every_event_is_kept

    # for a process in which another test has loaded the configuration
    configuration: dict[str, Any] = {
        "broker_url": broker,
        "idempotency_database_url": url_of(APPLICATION, database),
        "idempotency_redis_url": None,
        "idempotency_retry_base": 0.0,
    }
    tasks.app.conf.update(configuration)
    close_runtime(tasks.app)
    provider = Provider()
    patch.setattr(payments, "gateway", provider)
    patch.setattr(refunds, "gateway", provider)
    patch.setattr(notifications, "mailer", Mailer())
    owner = create_engine(database)
    engine, books = (create_engine(url_of(role, database)) for role in (APPLICATION, RELAY))
    migrate(owner)
    roles.create(owner, PASSWORDS)
    grant(owner)
    with every_event_is_kept(tasks.app):
        yield make(engine, books, provider)
    for each in (owner, engine, books):
        each.dispose()
    close_runtime(tasks.app)
