"""An application that sends webhooks, and a customer's receiver."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from idempotency import events, publish
from idempotency.application import close_runtime, runtime_of
from idempotency.attempt.runtime import Runtime
from idempotency.hosts import Allowed
from idempotency.operate import webhooks as operate
from idempotency.operate.change import Change
from idempotency.testing import Outbox
from idempotency.webhooks import posting, send_webhooks
from idempotency.webhooks.posting import Sender
from idempotency.webhooks.signing import Scheme
from idempotency.wire.keys import OperationId
from tests.support import receiver as receivers
from tests.support.commands import Run, runner
from tests.support.receiver import Receiver
from tests.support.tasks import transactional

ANN = Change("ann", "test")


@pytest.fixture(scope="session")
def certificate() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tls-") as directory:
        yield receivers.certificate(Path(directory))


@pytest.fixture
def receiver(certificate: Path) -> Iterator[Receiver]:
    running = receivers.start(certificate)
    yield running
    running.close()


@pytest.fixture
def sender(receiver: Receiver) -> Sender:
    return Sender(Allowed.of(["127.0.0.0/8", "localhost"]), posting._authorities(str(receiver.ca_file)), timeout=2.0)


@pytest.fixture
def shop(bank: Celery, receiver: Receiver) -> Iterator[Celery]:
    """The application: it may send to this machine, which the receiver's authority is trusted for."""
    close_runtime(bank)
    before = dict(bank.conf.changes)
    bank.conf.update(
        idempotency_webhook_allowed_hosts=("127.0.0.1",),
        idempotency_webhook_ca_file=str(receiver.ca_file),
        idempotency_webhook_timeout=2.0,
    )
    send_webhooks("order.*", "payment.*", app=bank)
    yield bank
    events._subscriptions.pop(bank)
    for name in ("webhooks.fan_out", "webhooks.deliver"):
        bank.tasks.pop(name)
    bank.conf.changes.clear()
    bank.conf.changes.update(before)


@pytest.fixture
def runtime(shop: Celery) -> Runtime:
    return runtime_of(shop)


@pytest.fixture
def outbox(shop: Celery) -> Outbox:
    """What is enqueued runs here; pauses pass at once."""
    return Outbox(shop)


@pytest.fixture
def happen(shop: Celery, engine: Engine) -> Callable[..., str]:
    """Publish an event of a tenant; returns its id."""

    def happen(type: str = "order.paid", tenant: str = "acme", **data: Any) -> str:
        with transactional(engine).begin() as connection:
            return publish(connection, type, data, tenant=tenant, app=shop)

    return happen


@pytest.fixture
def register(runtime: Runtime, receiver: Receiver) -> Callable[..., operate.NewEndpoint]:
    """Register the receiver as an endpoint of a tenant, and enable it."""

    def register(
        tenant: str = "acme", *events: str, path: str = "/hooks", scheme: Scheme = Scheme.SHARED
    ) -> operate.NewEndpoint:
        url = receiver.url + path
        made = operate.add_endpoint(runtime, ANN, tenant, url=url, events=events or ["*"], scheme=scheme)
        operate.enable_endpoint(runtime, ANN, made.id)
        return made

    return register


@pytest.fixture
def waiting(
    happen: Callable[..., str], register: Callable[..., Any], outbox: Outbox, rows: Callable[[str], Any]
) -> Callable[..., tuple[OperationId, OperationId]]:
    """An event whose delivery has not begun; returns the operations of its fan-out and its delivery."""

    def waiting(**data: Any) -> tuple[OperationId, OperationId]:
        register()
        event = happen(**data)
        row = outbox._next()
        assert row is not None
        outbox._deliver(row)
        (delivery,) = rows("deliveries")
        fan_out = OperationId("acme", "webhooks.fan_out", event)
        return fan_out, OperationId("acme", "webhooks.deliver", f"{delivery.id}:0")

    return waiting


@pytest.fixture
def run(shop: Celery, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


@pytest.fixture
def rows(engine: Engine) -> Callable[[str], Any]:
    """The rows of a table of webhooks, the oldest first."""

    def read(table: str) -> Any:
        order = "created_at" if table in ("endpoints", "deliveries") else "id"
        with engine.connect() as connection:
            return connection.execute(text(f"SELECT * FROM idempotency.webhook_{table} ORDER BY {order}")).all()

    return read
