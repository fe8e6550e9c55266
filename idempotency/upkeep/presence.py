"""Signs of life: each worker, relay and beat keeps a row that says when it was last seen.

A thread of its own writes the row every `sign_of_life` seconds over a connection of its own, so a Postgres that is away
or slow delays no work. A process that ends in order removes its row; one that is killed, or whose loop hangs, falls
silent. That is an alarm until a person forgets it or `retention_processes` is over. A process of the same kind, name and
host is its successor and takes its place.

Importing the library installs the hooks; applications without an idempotent task are left alone.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from celery import Celery, bootsteps
from celery.platforms import EX_FAILURE
from sqlalchemy import Connection, Row, create_engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from ..application import settings_of
from ..attempt.heartbeat import native
from ..observe.logs import log
from ..worker.task import idempotent_tasks

# Seconds to connect, and for the statement. The end of a process waits this long at most for its row to be removed.
PATIENCE = 2
# A turn of a loop that publishes to a broker which hangs takes this long: a connect, a batch of confirms, a sweep.
LONGEST_TURN = 60.0

# The process's own row is spared: one statement must not delete and update the same row.
_SIGN = """
WITH forgotten AS (
    DELETE FROM idempotency.processes WHERE (kind, name, host, pid) IN (
        SELECT kind, name, host, pid FROM idempotency.processes
        WHERE seen_at < clock_timestamp() - make_interval(secs => %(retention)s)
          AND (kind, name, host, pid) <> (%(kind)s, %(name)s, %(host)s, %(pid)s)
        FOR UPDATE SKIP LOCKED)
)
INSERT INTO idempotency.processes AS p (kind, name, host, pid, service, version, queues, started_at, seen_at)
VALUES (%(kind)s, %(name)s, %(host)s, %(pid)s, %(service)s, %(version)s, %(queues)s,
        clock_timestamp() - make_interval(secs => %(age)s), clock_timestamp())
ON CONFLICT (kind, name, host, pid) DO UPDATE SET seen_at = clock_timestamp(), queues = excluded.queues
"""

_SUCCEED = """
DELETE FROM idempotency.processes
WHERE kind = %(kind)s AND name = %(name)s AND host = %(host)s AND pid <> %(pid)s
"""

_REMOVE = """
DELETE FROM idempotency.processes
WHERE kind = %(kind)s AND name = %(name)s AND host = %(host)s AND pid = %(pid)s
"""

# There are as many rows as processes; the limit is for a set-up that starts one per task.
_ALL = """
SELECT kind, name, host, pid, service, version, queues, started_at, seen_at,
       extract(epoch FROM clock_timestamp() - seen_at)::float8 AS silent_seconds
FROM idempotency.processes ORDER BY kind, name, host, pid LIMIT 1000
"""

_FORGET = """
DELETE FROM idempotency.processes
WHERE name = %(name)s AND seen_at < clock_timestamp() - make_interval(secs => %(silence)s)
RETURNING kind, host, pid
"""


class SignOfLife:
    """The sign of life of this process: `start()`, `progressed()` in each turn of each of its loops, and `end()`."""

    def __init__(
        self, app: Celery, kind: str, name: str | None = None, *, queues: Callable[[], Sequence[str]] = tuple
    ) -> None:
        given = settings_of(app)
        host = socket.gethostname()
        self._interval = given.sign_of_life
        self._queues = queues
        self._fields = {
            "kind": kind,
            "name": name or f"{kind}@{host}",
            "host": host,
            "pid": os.getpid(),
            "service": given.service,
            "version": _version(),
            "retention": given.retention_processes,
        }
        self._engine = create_engine(
            given.database_url.get_secret_value(),
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",
            hide_parameters=True,
            connect_args={
                "connect_timeout": PATIENCE,
                "tcp_user_timeout": PATIENCE * 1000,
                "options": f"-c statement_timeout={PATIENCE * 1000} -c lock_timeout={PATIENCE * 1000}",
            },
        )
        self._began = time.monotonic()
        self._expected_until: dict[str, float] = {}
        self._hung: list[str] = []
        self._is_known = self._is_ended = False
        # Held until the end. A native lock, as in the heartbeat: under gevent it asks no hub.
        self._running = native("allocate_lock")()
        self._ended = native("allocate_lock")()

    def start(self) -> None:
        """Sign now and then every `sign_of_life` seconds, from a thread of its own."""
        self._running.acquire()
        self._ended.acquire()
        native("start_new_thread")(self._run, ())

    def progressed(self, pause: float = 0.0, *, loop: str = "main") -> None:
        """Say that a loop of the process works and that its next turn begins in `pause` seconds.

        A process that calls this falls silent when any of its loops hangs; one that never does, when the process stops.
        """
        self._expected_until[loop] = time.monotonic() + pause + LONGEST_TURN

    def hanging(self) -> list[str]:
        """The loops whose last turn is longer ago than any takes."""
        now = time.monotonic()
        return sorted(loop for loop, until in list(self._expected_until.items()) if now > until)

    def end(self) -> None:
        """Remove the row: the process ends in order. Takes `PATIENCE` seconds or two when Postgres is away."""
        if self._is_ended or os.getpid() != self._fields["pid"]:
            return
        self._is_ended = True
        self._running.release()
        # the sign that is being written, if any, must not come after the removal
        self._ended.acquire(timeout=2 * PATIENCE)
        try:
            self._execute(_REMOVE)
        except SQLAlchemyError as error:
            log.warning("sign_of_life_not_removed", error=type(error).__name__)

    def sign(self) -> bool:
        """Write the row once; whether it was written. A process of which a loop hangs does not sign."""
        hanging = self.hanging()
        if hanging and hanging != self._hung:  # once, not with every sign that is left out
            log.error("loop_hangs", kind=self._fields["kind"], loops=hanging)
        self._hung = hanging
        if hanging:
            return False
        try:
            if not self._is_known:
                self._execute(_SUCCEED)
            self._execute(_SIGN)
        except SQLAlchemyError as error:
            log.warning("sign_of_life_not_written", error=type(error).__name__)
            return False
        self._is_known = True
        return True

    def _execute(self, statement: str) -> None:
        variable = {"age": time.monotonic() - self._began, "queues": sorted(self._queues())}
        with self._engine.connect() as connection:
            connection.exec_driver_sql(statement, self._fields | variable)

    def _run(self) -> None:
        try:
            while True:
                try:
                    self.sign()
                except Exception:  # a thread that dies would make a living process look dead
                    log.exception("sign_of_life_failed")
                if self._running.acquire(timeout=self._interval):
                    return
        finally:
            self._ended.release()


def processes(connection: Connection) -> Sequence[Row[Any]]:
    """The processes that signed and have not ended in order, with the seconds since their last sign."""
    return connection.exec_driver_sql(_ALL).all()


def forget(connection: Connection, name: str, silence: float) -> Sequence[Row[Any]]:
    """Remove the rows of processes of this name that have been silent for so many seconds; returns them."""
    return connection.exec_driver_sql(_FORGET, {"name": name, "silence": silence}).all()


# ---------------------------------------------------------------- Celery's processes


class WorkerSign(bootsteps.StartStopStep):
    """Signs from when the pool has started, so that no pool process is forked beside the thread at the start."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        self._life: SignOfLife | None = None

    def start(self, worker: Any) -> None:
        # which queues it consumes may change while it runs: add_consumer and cancel_consumer
        life = SignOfLife(
            worker.app, "worker", worker.hostname, queues=lambda: list(worker.app.amqp.queues.consume_from)
        )
        life.start()
        self._life = life

    def stop(self, worker: Any) -> None:
        # an error that ended the worker is no end in order
        if self._life is not None and worker.exitcode != EX_FAILURE:
            self._life.end()

    def terminate(self, worker: Any) -> None:
        if self._life is not None:
            self._life.end()


def sign_as_worker(sender: Any, **_: Any) -> None:
    """Give the worker its step; its steps are put together after this signal."""
    if idempotent_tasks(sender.app):
        sender.app.steps["worker"].add(WorkerSign)


def sign_as_beat(sender: Any, **_: Any) -> None:
    """Sign for as long as beat's loop ticks, and end with it."""
    if not idempotent_tasks(sender.app):
        return
    life, scheduler = SignOfLife(sender.app, "beat"), sender.scheduler
    tick, close = scheduler.tick, scheduler.close

    def tick_and_say_so(*arguments: Any, **options: Any) -> Any:
        pause = tick(*arguments, **options)
        life.progressed(pause or 0.0)
        return pause

    def close_and_end() -> None:
        close()
        if not isinstance(sys.exc_info()[1], Exception):  # beat closes its schedule after an error, too
            life.end()

    scheduler.tick, scheduler.close = tick_and_say_so, close_and_end
    life.progressed()
    life.start()


def _version() -> str:
    try:
        return version("celery-idempotency")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"
