"""The stage of one run: a fresh database with its ledgers, a fresh queue, an empty Redis, and worker processes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import kombu.pools
import redis
from amqp.exceptions import ChannelError
from sqlalchemy import Connection, Row, create_engine, text
from sqlalchemy.orm import Session

import services
from idempotency.application import close_runtime
from idempotency.relay.relay import Relay
from idempotency.wire.headers import OUTBOX_HEADER
from tests.chaos import ledgers
from tests.chaos.checker import Accepted, Evidence, Violation, check
from tests.controls import app as controlled
from tests.controls.safeguards import without
from tests.support import bank
from tests.support.processes import PYTHONPATH, Processes, Worker, eventually

# Longer than any run: no timer fires, time passes by UPDATE.
LEASE, MAX_RUN = 900, 3600
TENANT = "default"


class Stage:
    """What a scenario acts on. Use `stage(...)`."""

    def __init__(self, servers: services.Services, database_url: str, environment: dict[str, str]) -> None:
        self.servers = servers
        self.app = bank.app
        self.environment = environment
        self.crashes = Path(environment["CRASH_DIRECTORY"])
        self.engine = create_engine(database_url, isolation_level="AUTOCOMMIT")
        self.redis = redis.Redis.from_url(environment["REDIS_URL"], decode_responses=True)
        self.processes = Processes(environment)
        self.relay = Relay(bank.app)
        self.accepted: list[Accepted] = []

    @property
    def queue(self) -> str:
        return self.environment["BANK_QUEUE"]

    # ------------------------------------------------------------ operations

    def send(self, task: Any, account: str, *args: Any, **options: Any) -> None:
        """Send a deposit past the outbox, as `delay` does."""
        task.apply_async((account, *args), **options)
        self._accept(task, account, options.get("tenant", TENANT))

    def enqueue(self, session: Session, account: str) -> None:
        """Write a deposit into the outbox with the session's transaction."""
        bank.deposit.enqueue(session, account)
        self._accept(bank.deposit, account, TENANT)

    def _accept(self, task: Any, account: str, tenant: str) -> None:
        self.accepted.append(Accepted(tenant, task.name, account, rows=((account, 1),)))

    @contextmanager
    def session(self) -> Iterator[Session]:
        """A session of the application, committed at the end."""
        with Session(self.engine.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
            yield session

    def worker(self, **environment: str) -> Worker:
        """A worker with one pool process; call `wait_until_ready` on it."""
        return self.processes.start("--concurrency", "1", app="tests.controls.app", **environment)

    def wait_for_everything_sent(self, worker: Worker) -> None:
        """Send one more deposit and wait for its end: the only worker has seen whatever was sent before."""
        account = f"last-{uuid4().hex[:8]}"
        self.send(bank.deposit, account)
        self.wait_for(account, "completed", worker)

    def wait_for(self, account: str, status: str, *workers: Worker) -> Row[Any]:
        """Wait until the record of an account has this status."""

        def reached() -> Row[Any] | None:
            assert all(worker.process.poll() is None for worker in workers), "a worker ended"
            row = self.record(account)
            return row if row is not None and row.status == status else None

        row = eventually(reached, timeout=45, what=f"{account} {status}")
        assert row is not None
        return row

    # ------------------------------------------------------------ what is there

    def sql(self, statement: str, **values: Any) -> Any:
        """Run a statement; nothing sleeps here, rows are aged."""
        with self.connect() as connection:
            return connection.execute(text(statement), values)

    def connect(self) -> Connection:
        return self.engine.connect()

    def record(self, account: str) -> Row[Any] | None:
        with self.connect() as connection:
            query = text("SELECT * FROM idempotency.records WHERE key = :key")
            return connection.execute(query, {"key": account}).one_or_none()

    def relay_everything(self) -> None:
        """Publish until no row is due."""
        while self.relay.run_once().published:
            pass

    def held_by_broker(self) -> int:
        """How many messages of the outbox are in the queue, told from the messages themselves."""
        held = 0
        with self.app.connection_for_write() as connection:
            channel = connection.channel()
            try:
                while (raw := channel.basic_get(self.queue, no_ack=False)) is not None:
                    held += OUTBOX_HEADER in channel.message_to_python(raw).headers
            except ChannelError:
                return 0
        return held

    def check(self, **evidence: Any) -> Sequence[Violation]:
        """Everything that the checker finds wrong."""
        return check(Evidence(self.engine, self.accepted, **evidence)).violations

    def close(self) -> None:
        self.processes.kill_all()
        self.relay.close()
        close_runtime(self.app)
        with self.app.connection_for_write() as connection:
            for name in (self.queue, f"{self.queue}-dead"):
                connection.default_channel.queue_delete(name)
        kombu.pools.reset()
        self.redis.close()
        self.engine.dispose()
        shutil.rmtree(self.crashes, ignore_errors=True)


@contextmanager
def stage(servers: services.Services, *removed: str, **environment: str) -> Iterator[Stage]:
    """Set up everything for one run without these safeguards, and take it down."""
    name = f"control_{uuid4().hex[:12]}"
    database_url = servers.create_database(name)
    with redis.Redis.from_url(servers.redis_url) as client:
        client.flushdb()
    environment = {
        **os.environ,
        "DATABASE_URL": database_url,
        "REDIS_URL": servers.redis_url,
        "BROKER_URL": servers.broker_url,
        "BANK_QUEUE": f"control-{uuid4().hex[:8]}",
        "CRASH_DIRECTORY": tempfile.mkdtemp(prefix="control-"),
        "LEASE": str(LEASE),
        "MAX_RUN": str(MAX_RUN),
        "WITHOUT": ",".join(removed),
        "PYTHONPATH": PYTHONPATH,
        **environment,
    }
    try:
        _prepare(database_url)
        controlled.configure(environment)
        with without(*removed):
            stage = Stage(servers, database_url, environment)
            try:
                yield stage
            finally:
                stage.close()
    finally:
        servers.drop_database(name)


def _prepare(database_url: str) -> None:
    bank.prepare(database_url)
    engine = create_engine(database_url)
    ledgers.install(engine)
    engine.dispose()
