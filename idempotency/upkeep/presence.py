"""Signs of life: each worker, relay and beat keeps a row that says when it was last seen.

A separate thread writes the row every `sign_of_life` seconds over its own connection, so that a slow or unavailable
Postgres delays no work. A process that shuts down cleanly removes its row; one that is killed, or has a hung loop, falls
silent. That raises an alarm until `idempotency forget` or the end of `retention_processes`. A new process with the same
kind, name and host replaces it.

`installation.py` connects the hooks; applications without an idempotent task are left alone.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import Celery, bootsteps
from celery.platforms import EX_FAILURE
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from ..application import settings_of
from ..attempt.heartbeat import native
from ..extras import installed_version
from ..observe.logs import log
from ..store import processes
from ..store.connections import make_engine
from ..store.statements import is_news
from ..text import storable
from ..worker.task import idempotent_tasks
from .sign_file import SignFile
from .started import kept

# Seconds to connect, and for each statement. Removing the row delays the end of a process by a few times this at most.
TIMEOUT = 2
# Seconds. The longest turn of a healthy loop: connect to a hung broker, wait for a batch of confirms, sweep.
LONGEST_TURN = 60.0


class SignOfLife:
    """The sign of life of this process. Call `start()`, `progressed()` in each turn of each loop, and `end()`."""

    def __init__(
        self, app: Celery, kind: str, name: str | None = None, *, queues: Callable[[], Sequence[str]] = tuple
    ) -> None:
        given = settings_of(app)
        host = socket.gethostname()
        self.interval = given.sign_of_life
        self._queues = queues
        self._fields = {
            "kind": kind,
            "name": name or f"{kind}@{host}",
            "host": host,
            "pid": os.getpid(),
            "service": given.service,
            "version": installed_version(),
            "retention": given.retention_processes,
            "command": kept(sys.argv),
            "directory": _here(),
        }
        self._engine = make_engine(
            given,
            session={"statement_timeout": TIMEOUT * 1000, "lock_timeout": TIMEOUT * 1000},
            connect={"connect_timeout": TIMEOUT, "tcp_user_timeout": TIMEOUT * 1000},
            patience=TIMEOUT,
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",
        )
        self._file = SignFile(given.sign_of_life_file) if given.sign_of_life_file else None
        self._began = time.monotonic()
        self._expected_until: dict[str, float] = {}
        self._hung: list[str] = []
        self._is_known = self._is_ended = False
        # Held until the end. Native locks, as in the heartbeat, which work without gevent's hub.
        self._running = native("allocate_lock")()
        self._ended = native("allocate_lock")()

    def start(self) -> None:
        """Sign now and then every `sign_of_life` seconds, from a separate thread."""
        self._running.acquire()
        self._ended.acquire()
        native("start_new_thread")(self._run, ())

    def progressed(self, pause: float = 0.0, *, loop: str = "main") -> None:
        """Report that a loop is alive and that its next turn begins in `pause` seconds.

        A process that calls this falls silent if one of its loops hangs; one that never does, only when it stops.
        """
        self._expected_until[loop] = time.monotonic() + pause + LONGEST_TURN

    def rests(self, loop: str) -> None:
        """Report that no turn of a loop is expected until `progressed` is called again."""
        self._expected_until.pop(loop, None)

    def hung_loops(self) -> list[str]:
        """The loops whose turn has taken longer than any should."""
        now = time.monotonic()
        return sorted(loop for loop, until in list(self._expected_until.items()) if now > until)

    def end(self) -> None:
        """Remove the row, because the process shuts down cleanly. Takes a few seconds if Postgres is unavailable."""
        if self._is_ended or os.getpid() != self._fields["pid"]:
            return
        self._is_ended = True
        self._running.release()
        # a sign that is being written must not land after the removal
        self._ended.acquire(timeout=2 * TIMEOUT)
        if self._file is not None:
            self._file.remove()
        try:
            self._write(processes.remove)
        except SQLAlchemyError as error:
            log.warning("sign_of_life_not_removed", error=type(error).__name__)

    def sign(self) -> bool:
        """Write the row, and the file first; returns whether the row was written. A process with a hung loop does not sign."""
        hanging = self.hung_loops()
        if hanging and hanging != self._hung:  # logged once, not for every missed sign
            log.error("loop_hangs", kind=self._fields["kind"], loops=hanging)
        self._hung = hanging
        if hanging:
            return False
        if self._file is not None:
            self._file.write()
        try:
            if not self._is_known:
                self._write(processes.succeed)
            self._write(processes.sign)
        except SQLAlchemyError as error:
            if is_news(error):
                log.warning("sign_of_life_not_written", error=type(error).__name__)
            return False
        self._is_known = True
        return True

    def _write(self, change: Callable[[Connection, Mapping[str, Any]], None]) -> None:
        variable = {"age": time.monotonic() - self._began, "queues": sorted(self._queues())}
        with self._engine.connect() as connection:
            change(connection, self._fields | variable)

    def _run(self) -> None:
        try:
            while True:
                try:
                    self.sign()
                except Exception:  # a thread that dies would make a living process look dead
                    log.exception("sign_of_life_failed")
                if self._running.acquire(timeout=self.interval):
                    return
        finally:
            self._ended.release()


def _here() -> str | None:
    try:
        return storable(os.getcwd())
    except OSError:  # it is gone
        return None


# ---------------------------------------------------------------- Celery's processes


class WorkerSign(bootsteps.StartStopStep):
    """Signs once the pool has started, so that the pool's first processes are not forked while the thread runs."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        self._life: SignOfLife | None = None

    def start(self, worker: Any) -> None:
        # a function, since add_consumer and cancel_consumer change the queues
        life = SignOfLife(
            worker.app, "worker", worker.hostname, queues=lambda: list(worker.app.amqp.queues.consume_from)
        )
        life.start()
        self._life = worker.sign_of_life = life

    def stop(self, worker: Any) -> None:
        # not if an error ended the worker
        if self._life is not None and worker.exitcode != EX_FAILURE:
            self._life.end()

    def terminate(self, worker: Any) -> None:
        if self._life is not None:
            self._life.end()


class ConsumerTurns(bootsteps.StartStopStep):
    """Watches the main loop of a worker with pool processes while it is connected to its broker.

    Otherwise nothing is expected of it: connecting anew may take any time, and in other pools a body, or a thread of its
    own, decides when the timer runs.
    """

    requires = ("celery.worker.consumer.connection:Connection",)
    LOOP = "consumer"

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._turns: Any = None

    def include_if(self, consumer: Any) -> bool:
        return consumer.hub is not None and consumer.pool.uses_semaphore

    def start(self, consumer: Any) -> None:
        life: SignOfLife = consumer.controller.sign_of_life

        def turned() -> None:
            life.progressed(life.interval, loop=self.LOOP)

        turned()
        self._turns = consumer.timer.call_repeatedly(life.interval, turned)

    def stop(self, consumer: Any) -> None:
        if self._turns is not None:
            self._turns.cancel()
            self._turns = None
        consumer.controller.sign_of_life.rests(self.LOOP)


def sign_as_worker(sender: Any, **_: Any) -> None:
    """Add the steps to the worker, which builds its steps after this signal."""
    if idempotent_tasks(sender.app):
        sender.app.steps["worker"].add(WorkerSign)
        sender.app.steps["consumer"].add(ConsumerTurns)


def sign_as_beat(sender: Any, **_: Any) -> None:
    """Sign while beat's loop ticks, and end with it."""
    if not idempotent_tasks(sender.app):
        return
    life, scheduler = SignOfLife(sender.app, "beat"), sender.scheduler
    tick, close = scheduler.tick, scheduler.close

    def tick_and_report(*arguments: Any, **options: Any) -> Any:
        pause = tick(*arguments, **options)
        life.progressed(pause or 0.0)
        return pause

    def close_and_end() -> None:
        close()
        if not isinstance(sys.exc_info()[1], Exception):  # beat also closes its schedule after an error
            life.end()

    scheduler.tick, scheduler.close = tick_and_report, close_and_end
    life.progressed()
    life.start()
