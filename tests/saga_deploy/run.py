"""One run: sagas begun by old code, new code beside it and then alone, and a repaired deploy; then the books."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from celery import Celery
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from idempotency import publish
from idempotency.application import close_runtime, runtime_of
from idempotency.store.statements import DEADLOCK
from tests.saga_deploy import books
from tests.saga_deploy.application import NEW, OLD, REPAIRED, make, prepare
from tests.saga_deploy.books import EVENT_OF, Book
from tests.support.applications import delete_queues
from tests.support.processes import PYTHONPATH, Processes, Worker, eventually

APP = "tests.saga_deploy.application"
# Begun and published so many in one transaction.
BATCH = 50
# Sagas that begin during the deploy, for each that has begun before.
LATER = 0.15

_WAITING = """
SELECT count(*) FROM idempotency.sagas g JOIN idempotency.records r USING (tenant, task, key)
WHERE g.task <> 'deploys.inner' AND g.status = 'RUNNING' AND r.status = 'released'
  AND r.available_at > clock_timestamp() + interval '1 hour'
"""
_SLEEPING = """
SELECT count(*) FROM idempotency.sagas
WHERE task = 'deploys.timed' AND key LIKE 'before-%' AND status NOT IN ('COMPLETED', 'FAILED')
"""
# Time passes for what sleeps, and for what is tried again after a pause; workers run meanwhile, so it waits for no lock.
_PASS = """
WITH sleeping AS (
    SELECT tenant, task, key FROM idempotency.records WHERE status = 'released' FOR UPDATE SKIP LOCKED
), records AS (
    UPDATE idempotency.records r SET available_at = available_at - make_interval(hours => :hours)
    FROM sleeping s WHERE (r.tenant, r.task, r.key) = (s.tenant, s.task, s.key)
), waits AS (
    UPDATE idempotency.saga_steps w SET due_at = due_at - make_interval(hours => :hours)
    FROM idempotency.sagas g JOIN sleeping USING (tenant, task, key)
    WHERE w.saga_id = g.id AND w.state = 'begun' AND w.kind IN ('wait', 'timer')
)
UPDATE idempotency.outbox o SET available_at = o.available_at - make_interval(hours => :hours)
FROM sleeping s WHERE (o.tenant, o.task, o.key) = (s.tenant, s.task, s.key) AND o.status = 'pending'
"""


@dataclass(frozen=True)
class Result:
    """What has become of all sagas. `ended`: how many were ended by which code."""

    sagas: int
    begun_later: int
    stopped_by_mismatch: int
    ended: Counter[str]
    wrong: list[str]

    @property
    def has_shown_all(self) -> bool:
        """Whether every kind of code has ended sagas, and some were stopped by code that did not fit."""
        return bool(self.stopped_by_mismatch and self.begun_later and all(self.ended[c] for c in (OLD, NEW, REPAIRED)))


def run(environment: Mapping[str, str], database: str, sagas: int, tell: Callable[[str, int], None]) -> Result:
    """Carry out one run in a migrated database; `tell` is told what goes on, and how many sagas have ended."""
    engine = create_engine(database, isolation_level="AUTOCOMMIT")
    deploy = Deploy(dict(environment), engine, sagas, tell)
    try:
        prepare(engine)
        return deploy.run()
    finally:
        deploy.close()
        engine.dispose()


class Deploy:
    """The processes of a run, and the sagas in it."""

    def __init__(
        self, environment: dict[str, str], engine: Engine, sagas: int, tell: Callable[[str, int], None]
    ) -> None:
        self.environment, self.engine, self.sagas, self._tell = environment, engine, sagas, tell
        self.app: Celery = make(environment | {"SAGA_CODE": OLD})
        self.processes = Processes(environment)
        self.things: dict[str, str] = {}
        self._published: set[str] = set()
        self._patience = 90.0 + 0.5 * sagas

    def run(self) -> Result:
        old, relay = self.workers(OLD), self.relay(OLD)
        self.begin(self.sagas, "before")
        self.until(lambda: self.count(_WAITING) == self.sagas, "begun by old code")

        new = self.workers(NEW)  # while the old ones run
        before = self.waking()
        half = len(before) // 2
        later = max(1, round(self.sagas * LATER))
        self.begin(later, "later", leaves_out="mismatched")
        self.publish(before[:half])
        self.until(lambda: self.ended() >= half // 2, "old and new code side by side")
        self.stop(old)
        self.stop_relay(relay)
        relay = self.relay(NEW)

        self.publish(self.waking())
        self.pass_time(25)  # what the old code has told to sleep for a day is over, whatever the new code says
        self.until(lambda: self.count(_SLEEPING) == 0, "what slept")
        stopped = self.until(lambda: self.stopped_for_good(), "new code alone")
        untouched = books.not_stopped_well(stopped)
        number = sum(book.kind == "mismatched" and book.status == "RUNNING" for book in stopped.values())

        repaired = self.workers(REPAIRED)
        self.stop(new)
        self.until(lambda: (self.pass_time(1), self.ended() == len(self.things))[1], "a repaired deploy")
        self.stop(repaired)
        self.stop_relay(relay)
        read = self.read()
        begun_later = {thing for thing in read if thing.startswith("later")}
        wrong = untouched + books.wrong(read, begun_later)
        if len(read) != len(self.things):
            wrong.append(f"{len(self.things)} sagas were begun, and {len(read)} are there")
        return Result(self.sagas, len(begun_later), number, books.summary(read), wrong)

    def close(self) -> None:
        self.processes.kill_all()
        for relay in self._relays:
            relay.kill()
            relay.wait(20)
        delete_queues(self.app)
        close_runtime(self.app)

    # ------------------------------------------------------------ processes

    _relays: Sequence[subprocess.Popen[bytes]] = ()

    def workers(self, code: str) -> list[Worker]:
        """Two workers of a release."""
        workers = [self.processes.start("--concurrency", "2", app=APP, SAGA_CODE=code) for _ in range(2)]
        return [worker.wait_until_ready() for worker in workers]

    def relay(self, code: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "idempotency.cli", "relay", "-A", APP]
        relay = subprocess.Popen(
            command, env=self.environment | {"SAGA_CODE": code}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._relays = [*self._relays, relay]
        return relay

    def stop(self, workers: Sequence[Worker]) -> None:
        """A warm shutdown, as a deploy has it."""
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.process.wait(self._patience)

    @staticmethod
    def stop_relay(relay: subprocess.Popen[bytes]) -> None:
        relay.terminate()
        relay.wait(60)

    # ------------------------------------------------------------ sagas and events

    def begin(self, number: int, when: str, *, leaves_out: str = "") -> None:
        kinds = [kind for kind in EVENT_OF if kind != leaves_out]
        begun = {f"{when}-{each:05}": kinds[each % len(kinds)] for each in range(number)}
        for batch in _batches(list(begun)):
            with Session(runtime_of(self.app).engine) as session:
                for thing in batch:
                    self.app.tasks[f"deploys.{begun[thing]}"].enqueue(session, thing)
                session.commit()
        self.things |= begun

    def waking(self) -> list[str]:
        """What waits for an event that was not published yet."""
        return [thing for thing, kind in self.things.items() if EVENT_OF[kind] and thing not in self._published]

    def publish(self, things: Sequence[str]) -> None:
        for batch in _batches(things):
            with Session(runtime_of(self.app).engine) as session:
                for thing in batch:
                    publish(session, EVENT_OF[self.things[thing]], {"thing": thing}, app=self.app)
                session.commit()
        self._published.update(things)

    def pass_time(self, hours: int) -> None:
        def passes() -> bool:
            with self.engine.connect() as connection:
                try:
                    connection.execute(text(_PASS), {"hours": hours})
                except OperationalError as error:
                    if getattr(error.orig, "sqlstate", None) != DEADLOCK:
                        raise
                    return False  # with a relay, which locks rows of the outbox in another order
            return True

        eventually(passes, what="time passes")

    # ------------------------------------------------------------ what is seen

    def read(self) -> dict[str, Book]:
        with self.engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
            return books.read(connection)

    def ended(self) -> int:
        return self.count(
            "SELECT count(*) FROM idempotency.sagas WHERE task <> 'deploys.inner' AND status IN ('COMPLETED', 'FAILED')"
        )

    def count(self, query: str) -> int:
        with self.engine.connect() as connection:
            return int(connection.execute(text(query)).scalar_one())

    def stopped_for_good(self) -> dict[str, Book] | None:
        """All sagas once those that have not ended have stopped, because the code does not fit; time passes for others."""
        self.pass_time(12)
        time.sleep(1)
        found = self.read()
        left = [book for book in found.values() if book.status in ("RUNNING", "COMPENSATING")]
        is_over = all(book.kind == "mismatched" and book.stopped == "saga_mismatch" for book in left)
        return found if is_over and len(found) == len(self.things) else None

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for a condition, and tell how far the sagas are."""
        self._tell(what, self.ended())

        def holds() -> Any:
            self._tell(what, self.ended())
            return condition()

        return eventually(holds, timeout=self._patience, what=what)


def _batches(things: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(things), BATCH):
        yield things[start : start + BATCH]


@contextmanager
def opened() -> Iterator[tuple[dict[str, str], str]]:
    """Servers and a migrated database of a run's own: the environment of its processes, and the database's address."""
    import os
    from uuid import uuid4

    import services
    from tests.support import bank

    with services.running() as running:
        name = f"deploy_{uuid4().hex[:8]}"
        database = running.create_database(name)
        bank.prepare(database)
        environment = {**os.environ, **running.environment(), "DATABASE_URL": database}
        yield environment | {"BANK_QUEUE": f"deploy-{uuid4().hex[:8]}", "PYTHONPATH": PYTHONPATH}, database
        running.drop_database(name)
