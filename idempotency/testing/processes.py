"""Deliveries in forked processes, each like a child of Celery's pool: it handles one message and may be killed.

Only a killed process cleans nothing up, so they are processes, killed by SIGKILL. They are forked because the task under
test may be defined inside a test function.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn

from celery import Celery
from celery.signals import worker_process_init
from kombu import Producer
from kombu.utils.json import dumps
from sqlalchemy import Connection, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import Pool

from ..application import close_runtime, runtime_of
from ..attempt.runtime import Runtime
from ..observe import crash_points
from ..store import ends, statements
from ..store.statements import describe
from ..wire.message import Message
from .tracing import trace

# Seconds between two looks at whether a child has ended; one attempt takes about 50 ms.
POLL = 0.003
# The most attempts that one scenario uses up by its interruptions.
INTERRUPTIONS = 2
# The server itself ends the connection: the error is that of any lost connection and does not say what was done.
BREAK = "SELECT pg_terminate_backend(pg_backend_pid())"


class Action(StrEnum):
    """What is done to a process at a point."""

    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP, until `resume`
    LOSE_ANSWER = "lose answer"  # the next COMMIT is carried out, and its answer lost
    LOSE_COMMIT = "lose commit"  # the connection breaks before the next COMMIT


@dataclass(frozen=True, slots=True)
class Interruption:
    """What is done when the point is reached for the `number`-th time."""

    action: Action
    point: str
    number: int = 1


@dataclass(slots=True)
class Journal:
    """What a process has written down, as far as it came."""

    points: list[tuple[str, int]] = field(default_factory=list)
    sent: list[dict[str, Any]] = field(default_factory=list)
    outcome: str = ""
    error: str = ""
    broken: str = ""


class Delivery:
    """One message in one forked process. Every process is ended by its own pid at the latest in `end`."""

    def __init__(
        self,
        app: Celery,
        task: Any,
        message: Message,
        *,
        interruption: Interruption | None = None,
        barrier: int | None = None,
    ) -> None:
        # unlinked at once; the child inherits it, and what it wrote survives its death
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  closed in `end`
        # so that what the parent has printed is not printed again by the child
        _flush()
        with warnings.catch_warnings():
            # Python 3.12 warns of forks with threads: ours is the recording server's, whose locks the child never takes
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _live(app, task, message, self._file.fileno(), interruption, barrier)
        self.status: int | None = None

    def wait(self, timeout: float, *, stopped: bool = False) -> bool:
        """Wait until it ends, or with `stopped` until it ends or stops. False: not within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | (os.WUNTRACED if stopped else 0))
            if pid:
                if os.WIFSTOPPED(status):
                    return True
                self.status = status
                break
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL)
        return True

    def resume(self) -> None:
        """Let it go on if it was stopped."""
        if self.status is None:
            os.kill(self.pid, signal.SIGCONT)

    def journal(self) -> Journal:
        journal = Journal()
        self._file.seek(0)
        for line in self._file.read().splitlines():
            entry = json.loads(line)
            if "point" in entry:
                journal.points.append((entry["point"], entry["number"]))
            elif "sent" in entry:
                journal.sent.append(entry["sent"])
            elif "broken" in entry:
                journal.broken = entry["broken"]
            else:
                journal.outcome, journal.error = entry["outcome"], entry["error"]
        if self.status is not None and os.WIFSIGNALED(self.status):
            journal.outcome = f"killed by {signal.Signals(os.WTERMSIG(self.status)).name}"
        return journal

    def end(self) -> None:
        """Kill the process if it still runs, and close its file."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            _, self.status = os.waitpid(self.pid, 0)
        self._file.close()


# ---------------------------------------------------------------- in the child


def _live(
    app: Celery, task: Any, message: Message, journal: int, interruption: Interruption | None, barrier: int | None
) -> NoReturn:
    def write(**entry: Any) -> None:
        os.write(journal, (json.dumps(entry) + "\n").encode())

    # a garbage collection would touch, and so copy, every page of the parent
    gc.freeze()
    try:
        _take_nothing_along()
        _record_messages(app, write)
        _install(app, interruption, write)
        # the attempts that interruptions use up must not decide how the operation ends
        task.max_attempts = (task.max_attempts or runtime_of(app).settings.max_attempts) + INTERRUPTIONS
        worker_process_init.send(sender=None)
        if barrier is not None:
            os.read(barrier, 1)
        write(**_deliver(app, task, message))
        close_runtime(app)
    except BaseException:
        write(broken=traceback.format_exc()[-4000:])
    finally:
        _flush()
        # without pytest's exit handlers, which are the parent's
        os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _deliver(app: Celery, task: Any, message: Message) -> dict[str, str]:
    """Deliver the message. Returns the entry for the journal."""
    seen = trace(app, task, message)
    if seen.state in ("SUCCESS", "REJECTED"):
        return {"outcome": seen.state, "error": str(seen.value) if seen.state == "REJECTED" else ""}
    cause = getattr(seen.value, "exc", None) or seen.value
    return {"outcome": seen.state, "error": describe(cause) if isinstance(cause, BaseException) else repr(cause)}


def _take_nothing_along() -> None:
    """Never use a connection of the parent's pools: a new one takes its place when it is checked out."""

    def connected(_: Any, record: Any) -> None:
        record.info["idempotency_testing_pid"] = os.getpid()

    def taken(_: Any, record: Any, proxy: Any) -> None:
        if record.info.get("idempotency_testing_pid") != os.getpid():
            record.dbapi_connection = proxy.dbapi_connection = None
            raise DisconnectionError("opened by another process")

    event.listen(Pool, "connect", connected)
    event.listen(Pool, "checkout", taken, insert=True)


def _record_messages(app: Celery, write: Any) -> None:
    """Note messages that do not go through the outbox, and send them to a broker in this process's memory."""
    for name in ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL"):
        os.environ.pop(name, None)
    app.conf.update(
        broker_url="memory://",
        broker_read_url=None,
        broker_write_url=None,
        broker_use_ssl=None,
        broker_transport_options={},
        broker_failover_strategy="round-robin",
        # a test configuration may run calls eagerly; in production they are sent
        task_always_eager=False,
    )
    app._pool = None
    app.amqp._producer_pool = None

    publish = Producer.publish

    # not by a signal: those are sent for what goes through the outbox, too
    def noting(self: Any, body: Any, *given: Any, headers: Mapping[str, Any] | None = None, **options: Any) -> Any:
        # protocol 1 has the name in the body
        name = (headers or (body if isinstance(body, dict) else {})).get("task")
        if name is not None:
            arguments = body if isinstance(body, dict) else {"args": body[0], "kwargs": body[1]}
            entry = {"task": str(name), "args": arguments.get("args"), "kwargs": arguments.get("kwargs")}
            write(sent=json.loads(dumps(entry)))
        return publish(self, body, *given, headers=headers, **options)

    Producer.publish = noting


def _install(app: Celery, interruption: Interruption | None, write: Any) -> None:
    reached: Counter[str] = Counter()

    def reach(point: str) -> None:
        reached[point] += 1
        write(point=point, number=reached[point])
        if interruption is None or (point, reached[point]) != (interruption.point, interruption.number):
            return
        match interruption.action:
            case Action.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case _:
                carried_out = interruption.action is Action.LOSE_ANSWER
                # an attempt that never opens its session finishes in one statement, without COMMIT
                breaks = _break_statement if point == "body.entered" else _break_commit
                breaks(runtime_of(app), carried_out=carried_out)

    crash_points.install(reach)


def _break_commit(runtime: Runtime, *, carried_out: bool) -> None:
    """Break the connection of the attempt's next COMMIT."""
    dialect: Any = runtime.engine.dialect
    commit = dialect.do_commit

    def break_once(connection: Any) -> None:
        dialect.do_commit = commit
        if carried_out:
            commit(connection)
        connection.driver_connection.execute(BREAK)

    dialect.do_commit = break_once


def _break_statement(runtime: Runtime, *, carried_out: bool) -> None:
    """Break the connection of a finish that is one statement."""
    complete = ends.complete

    def break_once(connection: Connection, *args: Any, **kwargs: Any) -> None:
        ends.complete = complete
        if carried_out:
            complete(connection, *args, **kwargs)
        statements.execute(connection, BREAK)

    ends.complete = break_once
