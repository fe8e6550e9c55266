"""The application of tasks/ on real servers: one worker, a relay, the provider's sandbox and a mail sink."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import requests
from celery import Celery
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

import services
from idempotency.application import close_runtime
from sandbox import ledger
from sandbox import process as sandbox_process
from tests.support.processes import PYTHONPATH, Processes, eventually


class Shop:
    """The application in this process and in one worker, and what the outside world has seen."""

    def __init__(
        self,
        stack: ExitStack,
        database: str,
        environment: dict[str, str],
        data: Path,
        of_provider: Sequence[str] = (),
        configured: Callable[[Celery], None] = lambda app: None,
    ) -> None:
        self.provider = stack.enter_context(sandbox_process.running("provider", data / "provider", *of_provider))
        mail = stack.enter_context(sandbox_process.running("mail", data / "mail"))
        carrier = stack.enter_context(sandbox_process.running("carrier", data / "carrier"))
        self.data = data
        addresses = {
            "DATABASE_URL": database,
            "REDIS_URL": environment["REDIS_URL"],
            "BROKER_URL": environment["BROKER_URL"],
            "STRIPE_API_BASE": self.provider.url,
            "STRIPE_SEARCH_LAG": "0.2",
            "STRIPE_TIMEOUT": "1",
            "SMTP_URL": mail.url,
            "CARRIER_URL": carrier.url,
            "IDEMPOTENCY_RETRY_BASE": "0.1",
        }
        os.environ.update(addresses)
        stack.callback(lambda: [os.environ.pop(name) for name in addresses])
        import tasks
        from idempotency.relay.relay import Relay
        from idempotency.upkeep.maintenance import recover
        from tasks import migrate, payments, refunds

        # for a process in which another test has loaded the configuration
        tasks.app.conf.update(
            broker_url=addresses["BROKER_URL"],
            idempotency_database_url=database,
            idempotency_redis_url=addresses["REDIS_URL"],
            idempotency_retry_base=0.1,
        )
        configured(tasks.app)  # before the relay, which reads its settings once
        self.app, self.payments, self.refunds = tasks.app, payments, refunds
        self.engine = create_engine(database)
        stack.callback(self.engine.dispose)
        migrate.migrate(self.engine)
        stack.callback(close_runtime, tasks.app)
        self.processes = Processes({**os.environ, "PYTHONPATH": PYTHONPATH})
        stack.callback(self.processes.kill_all)
        queues = "payments,refunds,orders,notifications,webhooks,maintenance"
        self.worker = self.processes.worker("--concurrency", "4", "-Q", queues, app="tasks")
        stop = threading.Event()
        periodic = lambda: (recover(tasks.app), None)[1]  # noqa: E731
        thread = threading.Thread(target=Relay(tasks.app).run, args=(stop, periodic), daemon=True)
        thread.start()
        stack.callback(lambda: (stop.set(), thread.join(10)))

    def buy(self, amount: int = 1000, *, faults: list[str] | None = None) -> str:
        payment_id = f"p-{uuid4().hex[:10]}"
        if faults:
            body = {"next": faults, "only": {"purchase_id": payment_id}}
            requests.post(f"{self.provider.url}/_sandbox/faults", json=body, timeout=5).raise_for_status()
        with Session(self.engine) as session, session.begin():
            self.payments.submit_payment(
                session, payment_id=payment_id, customer_id="c1", amount=amount, currency="USD"
            )
        return payment_id

    def give_back(self, payment_id: str, amount: int) -> str:
        refund_id = f"r-{uuid4().hex[:10]}"
        with Session(self.engine) as session, session.begin():
            self.refunds.submit_refund(
                session, refund_id=refund_id, payment_id=payment_id, amount=amount, reason="test"
            )
        return refund_id

    def row(self, table: str, id: str) -> Any:
        with self.engine.connect() as connection:
            return connection.execute(text(f"SELECT * FROM {table} WHERE id = :id"), {"id": id}).one()

    def record(self, key: str) -> Any:
        with self.engine.connect() as connection:
            return connection.execute(
                text("SELECT * FROM idempotency.records WHERE key = :key"), {"key": key}
            ).one_or_none()

    def ended(self, table: str, id: str, *, timeout: float = 40) -> Any:
        def ended() -> Any:
            record = self.record(id)
            return record is not None and record.status in ("completed", "failed")

        eventually(ended, timeout=timeout, what=f"{table} {id} ended")
        return self.row(table, id)

    def charges(self, payment_id: str) -> list[int]:
        charges = ledger.read(self.data / "provider").charges
        return [charge.amount for charge in charges if charge.metadata["purchase_id"] == payment_id]

    def refunds_of(self, payment_id: str) -> list[int]:
        read = ledger.read(self.data / "provider")
        ids = {charge.id for charge in read.charges if charge.metadata["purchase_id"] == payment_id}
        return [refund.amount for refund in read.refunds if refund.payment_intent in ids]


@contextmanager
def running(
    servers: services.Services,
    template: str,
    data: Path,
    *,
    of_provider: Sequence[str] = (),
    configured: Callable[[Celery], None] = lambda app: None,
) -> Iterator[Shop]:
    """The shop on a copy of the template database. `of_provider`: options of the provider's sandbox.

    `configured` changes the application's configuration before anything reads it.
    """
    name = f"shop_{uuid4().hex[:8]}"
    admin = create_engine(servers.database_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY"))
    database = admin.url.set(database=name).render_as_string(hide_password=False)
    admin.dispose()
    with ExitStack() as stack:
        stack.callback(servers.drop_database, name)
        yield Shop(stack, database, servers.environment(), data, of_provider, configured)
