"""One operation on its way through real servers: brought to a phase, hit by a fault there, let go, and looked at.

The outcome is read off what is left behind: the record, the outbox, the provider's ledger, the workers' logs, and the
trace of who reached which crash point.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Connection as BrokerConnection
from kombu.exceptions import OperationalError as BrokerError
from sqlalchemy import NullPool, Row, create_engine, text
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.orm import Session

from idempotency.attempt.liveness import start_time
from idempotency.observe import crash_points
from idempotency.queues import dead_letter_queues
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.upkeep import maintenance
from tests.support import bank, crashing
from tests.support.outside import OutsideWorld
from tests.support.processes import Processes, Worker, eventually
from tests.support.proxy import Proxy

# Where an attempt is held for a phase. P5, COMMIT sent and its reply not received, is made by a proxy.
POINTS = {
    "P0": "hint.left",
    "P1": "claimed",
    "P2": "body.entered",
    "P3": "effect.called",
    "P4": "finish.written",
    "P5": "finish.written",
    "P6": "finish.committed",
    "P7": "relay.selected",
    "P8": "relay.published",
    "P9": "relay.confirmed",
    "P10": "webhook.posted",
    "S0": "step.recorded",
    "S1": "saga.waiting",
    "S2": "wait.decided",
    "S3": "saga.compensating",
    "B0": "body.entered",
    "B1": "finish.committed",
    "B2": "finish.written",
    "B3": "finish.written",
    "B4": "finish.committed",
}
# Bounds a failure; a success does not wait for it.
PATIENCE = 60.0


class Scene:
    """One operation of `bank.transfer`: a step, a call outside and a final row."""

    def __init__(
        self, app: Celery, environment: dict[str, str], processes: Processes, outside: OutsideWorld, database: str
    ) -> None:
        self.app = app
        self.environment = environment
        self.outside = outside
        self.account = f"a-{uuid4().hex[:8]}"
        self.directory = Path(environment["CRASH_DIRECTORY"])
        self.workers: list[Worker] = []
        # of the test's own, straight to the server, and never from a pool that a fault has emptied
        self.engine: Engine = create_engine(database, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        self.proxy: Proxy
        self._database, self._broker = database, environment["BROKER_URL"]
        self._processes = processes
        self._proxies: list[Proxy] = []
        self._stop = threading.Event()
        self._relay: threading.Thread | None = None
        self._planned: dict[str, Callable[[], object]] = {}

    # ------------------------------------------------------------ the stage

    def postgres_proxy(self) -> Proxy:
        """Workers started from now on reach Postgres through this; the test itself does not."""
        url = make_url(self._database)
        proxy = self._proxy(url.host or "", url.port or 5432)
        through = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        self.environment["DATABASE_URL"] = through
        return proxy

    def redis_proxy(self) -> Proxy:
        """Workers started from now on reach Redis through this."""
        return self._through("REDIS_URL")

    def broker_proxy(self) -> Proxy:
        """Workers started from now on, and relays in this process, reach the broker through this."""
        self.proxy = self._through("BROKER_URL")
        bank.configure(self.environment)
        return self.proxy

    def _through(self, variable: str) -> Proxy:
        proxy, self.environment[variable] = Proxy.before(self.environment[variable])
        self._proxies.append(proxy)
        return proxy

    def _proxy(self, host: str, port: int) -> Proxy:
        self._proxies.append(Proxy(host, port))
        return self._proxies[-1]

    def worker(self, children: int = 2, **environment: str) -> Worker:
        """A prefork worker: one child to be held, another one for whatever comes meanwhile."""
        self.workers.append(self._processes.worker("--concurrency", str(children), **environment))
        return self.workers[-1]

    def relay(self) -> None:
        """Relay from now on in a thread of this process. It neither recovers nor resends: `sweep` does."""
        relay = Relay(self.app, confirm_timeout=2.0)
        self._relay = threading.Thread(target=relay.run, args=(self._stop,), daemon=True)
        self._relay.start()

    def at(self, point: str, act: Callable[[], object]) -> None:
        """Do something, once, when a relay in this process reaches a point."""

        def reached(name: str) -> None:
            if (planned := self._planned.pop(name, None)) is not None:
                planned()

        self._planned[point] = act
        crash_points.install(reached)

    def close(self) -> None:
        crash_points.install(None)
        self._stop.set()
        for proxy in self._proxies:
            proxy.heal()
        if self._relay is not None:
            self._relay.join(20)
        for worker in self.workers:
            worker.kill()
        for proxy in self._proxies:
            proxy.close()
        self.environment["BROKER_URL"] = self._broker
        bank.configure(self.environment)
        self.engine.dispose()

    # ------------------------------------------------------------ the operation

    def accept(self) -> None:
        """Accept the operation: one commit, as the application's own."""
        with Session(self.engine.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
            bank.transfer.enqueue(session, self.account, self.outside.url)

    def bring_to(self, phase: str, postgres: Proxy | None = None) -> None:
        """Accept the operation and hold its attempt in a phase. P5 takes the proxy that swallows the reply."""
        crashing.plan(self.directory, POINTS[phase], crashing.HOLD)
        if self._relay is None:
            self.relay()
        self.accept()
        self.held(phase)
        # Its child is faster: a worker that loses its broker now would not end this attempt, because it does not know of it yet. What it
        # knows may be the attempt before, whose end it has not read: that is gone when it is asked again.
        eventually(
            lambda: (known := self.active()) and known == self.active(), timeout=PATIENCE, what="the worker knows it"
        )
        if phase == "P5":
            assert postgres is not None, "P5 needs the proxy before Postgres"
            postgres.black_hole("replies")
            self.let_go(phase)
            eventually(lambda: self.status() == "completed", timeout=PATIENCE, what="committed, reply swallowed")

    def active(self) -> list[str]:
        """The ids of the messages that workers know to be running."""
        found = self.app.control.inspect(timeout=5, limit=1).active() or {}
        return [each["id"] for some in found.values() for each in some]

    def held(self, phase: str) -> int:
        """Wait until the attempt is held in a phase; returns the pid of its process."""
        path = self.directory / f"{POINTS[phase]}.held"
        eventually(path.exists, timeout=PATIENCE, what=f"{POINTS[phase]} reached")
        return int(path.read_text())

    def cancelled(self, phase: str) -> None:
        """Wait until a worker that has lost its broker has ended the attempt it can no longer acknowledge."""
        (worker,) = self.workers
        # it says so after it has sent SIGTERM to the attempt's process
        went_on = ("Cannot connect to", "Connected to")
        eventually(lambda: "Terminating it instead" in worker.log, timeout=PATIENCE, what="the attempt is terminated")
        eventually(lambda: any(line in worker.log.partition("Terminating")[2] for line in went_on), timeout=PATIENCE)
        for proxy in self._proxies:
            proxy.heal()  # a COMMIT whose reply was swallowed hears that its connection is gone
        eventually(lambda: not start_time(self.held(phase)), timeout=PATIENCE, what="the attempt's process ended")

    def let_go(self, phase: str) -> None:
        (self.directory / f"{POINTS[phase]}.go").touch()

    def duplicate(self) -> None:
        """Send the same request once more, past the outbox."""
        bank.transfer.delay(self.account, self.outside.url)

    def sweep(self, up_to: int | None = None) -> None:
        """What beat does once a lease and the patience for lost messages are over, without waiting for either.

        `up_to`: only leases up to this fence are over; a later attempt is alive, and keeps its own.
        """
        self.age(up_to=up_to)
        maintenance.recover(self.app)
        resend_lost(self.app)

    def age(self, hours: int = 2, *, up_to: int | None = None) -> None:
        """Let time pass: leases are over, and what was published long ago is overdue."""
        self.execute(
            "UPDATE idempotency.records SET locked_until = locked_until - make_interval(hours => :hours) "
            "WHERE status = 'started' AND fence <= coalesce(:up_to, fence)",
            hours=hours,
            up_to=up_to,
        )
        self.execute(
            "UPDATE idempotency.outbox SET published_at = published_at - make_interval(hours => :hours) "
            "WHERE status = 'published' AND settled_at IS NULL",
            hours=hours,
        )
        self.execute("UPDATE idempotency.outbox SET relayed_until = NULL")
        self.pass_pauses()

    def pass_pauses(self) -> None:
        """Let everything in the outbox be due now."""
        self.execute("UPDATE idempotency.outbox SET available_at = least(available_at, clock_timestamp())")

    def completed(self) -> Row[Any]:
        """Wait until the operation is completed; returns its record."""
        eventually(lambda: self.status() == "completed", timeout=PATIENCE, what=f"{self.account} completed")
        return self.record()

    # ------------------------------------------------------------ what can be seen

    def execute(self, statement: str, **parameters: Any) -> Any:
        with self.engine.connect() as connection:
            return connection.execute(text(statement), parameters)

    def rows(self, statement: str, **parameters: Any) -> list[Row[Any]]:
        with self.engine.connect() as connection:
            return list(connection.execute(text(statement), {"key": self.account} | parameters))

    def record(self) -> Row[Any]:
        return self.rows("SELECT * FROM idempotency.records WHERE key = :key")[0]

    def fence(self) -> int:
        """The record's fence; 0 before the first claim."""
        rows = self.rows("SELECT fence FROM idempotency.records WHERE key = :key")
        return int(rows[0].fence) if rows else 0

    def status(self) -> str | None:
        rows = self.rows("SELECT status FROM idempotency.records WHERE key = :key")
        return rows[0].status if rows else None

    def outbox(self) -> list[Row[Any]]:
        return self.rows("SELECT * FROM idempotency.outbox WHERE key = :key ORDER BY id")

    def entries(self) -> tuple[int, int]:
        """Rows of the final commit and rows of the step; nothing keeps them from being there twice."""
        counted = self.rows(
            "SELECT count(*) FILTER (WHERE account = :key) AS final, count(*) FILTER (WHERE account = :key || '/step') "
            "AS step FROM entries"
        )[0]
        return counted.final, counted.step

    def messages(self) -> int:
        """Messages ready in the queue; 0 when it is gone, or the broker is away."""
        with contextlib.suppress(BrokerError, ConnectionError), self._to_broker() as broker:
            declare = broker.channel().queue_declare
            with contextlib.suppress(*broker.channel_errors):
                return int(declare(self.app.conf.task_default_queue, passive=True).message_count)
        return 0

    def declare_queues(self) -> None:
        """Declare the queues, and give the broker time to be ready for being killed.

        RabbitMQ 3.10 brings back without a leader what was declared a moment before it died.
        """
        with self._to_broker() as broker:
            queues = list(self.app.amqp.queues.values())
            for queue in [*dead_letter_queues(queues), *queues]:
                queue(broker.default_channel).declare()
        time.sleep(1.5)

    def delete_queues(self) -> None:
        """The broker loses everything of this operation: both queues and all their messages."""
        with self._to_broker() as broker:
            for name in (self.app.conf.task_default_queue, f"{self.app.conf.task_default_queue}-dead"):
                broker.default_channel.queue_delete(name)

    @contextlib.contextmanager
    def _to_broker(self) -> Iterator[Any]:
        """Past every proxy."""
        with BrokerConnection(self._broker) as broker:
            yield broker

    def trace(self, point: str) -> list[crashing.Reached]:
        return [each for each in crashing.trace(self.directory) if (each.point, each.key) == (point, self.account)]

    def logged(self, text: str) -> int:
        return sum(worker.log.count(text) for worker in self.workers)

    # ------------------------------------------------------------ the outcome

    def outcome(self) -> str:
        """The matrix' letter for what has become of the operation, from the evidence."""
        row = self.record()
        assert row.status == "completed", row
        assert (list(self.outside.acts.values()), self.entries()) == ([1], (1, 1))
        letter = self._letter(row)
        if any(each.origin in ("recover", "resend") for each in self.outbox()):
            return "S" if letter == "–" else f"{letter},S"
        return letter

    def _letter(self, row: Row[Any]) -> str:
        trace = [each for each in crashing.trace(self.directory) if each.key == self.account]
        taken, claimed = self.trace("hint.left"), self.trace("claimed")
        if sum(self.outside.calls.values()) > 1:
            return "G"
        if len(claimed) > 1:
            return "R+" if self.logged("event=fenced") or self.logged("event=lease_lost") else "R"
        if taken[0].pid != claimed[0].pid and not row.duplicates:
            return "R"  # the first delivery ended before it had claimed
        finish = max(number for number, each in enumerate(trace) if each.point == "finish.written")
        after = [each for each in trace[finish + 1 :] if each.point in ("hint.left", "finish.committed")]
        if self.logged("event=commit_in_doubt") and not any(each.point == "finish.committed" for each in after):
            if not after:
                return "U,S" if all(each.settled_at for each in self.outbox()) else "U"
            return "U" if after[0].pid == trace[finish].pid else "D"
        if any(each.point == "hint.left" for each in after):
            return "D"
        if self.logged("event=claim_waits"):
            return "U" if row.fence > 1 else "W"  # the first fence of a fresh database is 1: it was claimed twice
        return "–"


@pytest.fixture
def scene(
    bank: Celery, environment: dict[str, str], processes: Processes, outside: OutsideWorld, database: str
) -> Iterator[Scene]:
    """One operation, and everything to bring it somewhere and to see what becomes of it."""
    scene = Scene(bank, environment, processes, outside, database)
    yield scene
    scene.close()
