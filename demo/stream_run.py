"""A stream under faults: its processes are killed at every crash point, frozen beyond their leases, and come and go.

Then what the handler has written is compared with what was published: each key once, nothing missing, each partition in order.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import amqp
from kombu.utils.url import url_to_parts
from rich.console import Console
from sqlalchemy import Engine, create_engine, text

import services
from demo.processes import ProcessError
from demo.stream_application import BATCH, NAME, TABLE
from idempotency.store import schema
from services.kafka import KafkaCluster

Source = Literal["rabbitmq", "kafka"]
# In the order of one turn of a partition; see `idempotency/observe/crash_points.py`.
POINTS = (
    "stream.assigned",
    "stream.fetched",
    "stream.run",
    "stream.recorded",
    "stream.advanced",
    "stream.committed",
    "stream.copied",
    "stream.given_up",
)
# Where a process is frozen: its transaction is open, or just committed.
FREEZES = ("stream.run", "stream.advanced", "stream.committed")
PARTITIONS, PROCESSES = 4, 3
# Each of so many messages is published once more, later.
COPIED = 50
# Seconds: longer than a lease of the application, and than a session of its group.
FROZEN = 5.0
# Seconds without a message handled after which nothing more will happen.
STALLED = 60.0
# Seconds until a fault that was planned has to have happened.
FAULT_WITHIN = 30.0
# Seconds in which a process that has come may be given a partition.
BETWEEN = 8.0
_HANDLED = "SELECT count(*) FROM readings"
_BOOKS = """
SELECT count(*) AS written, count(DISTINCT reading) AS readings,
       count(*) FILTER (WHERE "offset" < before) AS disordered
FROM (SELECT reading, "offset", lag("offset") OVER (PARTITION BY partition ORDER BY id) AS before FROM readings) AS each
"""


@dataclass
class StreamReport:
    """What a run has found. The counts of faults are of those that took place."""

    source: Source
    messages: int
    began: float
    handled: int = 0
    doubled: int = 0
    lost: int = 0
    disordered: int = 0
    rebalances: int = 0
    kills: int = 0
    zombies: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return not (self.doubled or self.lost or self.disordered or self.problems)

    @property
    def line(self) -> str:
        """The last line of the run."""
        return (
            f"RESULT flow=stream source={self.source} messages={self.messages} handled={self.handled} "
            f"doubled={self.doubled} lost={self.lost} disordered={self.disordered} rebalances={self.rebalances} "
            f"kills={self.kills} zombies={self.zombies} seconds={time.time() - self.began:.0f}"
        )


def run_stream(source: Source, messages: int, started: float, console: Console) -> StreamReport:
    """Publish, handle under faults, and compare. Raises `ProcessError` and `services.ServiceError`."""
    report = StreamReport(source, messages, started)
    with ExitStack() as stack:
        servers = stack.enter_context(services.running(needs=["postgres", "rabbitmq"]))
        url = servers.create_database("readings")
        engine = create_engine(url, isolation_level="AUTOCOMMIT")
        stack.callback(engine.dispose)
        schema.migrate(engine)
        with engine.connect() as connection:
            connection.execute(text(TABLE))
        faults = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stream-faults-")))
        environment = {"DATABASE_URL": url, "BROKER_URL": servers.broker_url, "TOPIC": NAME, "FAULTS": str(faults)}
        publish: Callable[[int, bytes], None]
        if source == "kafka":
            cluster = KafkaCluster()
            stack.callback(cluster.close)
            cluster.create_topic(NAME, PARTITIONS)
            environment["KAFKA_SERVERS"] = cluster.servers
            publish, flush = lambda partition, value: cluster.publish(NAME, partition, value), cluster.flush
        else:
            publish, flush = _rabbit(servers.broker_url), lambda: None
        console.print(
            f"servers: Postgres, {source}; {PROCESSES} processes, {PARTITIONS} partitions, batches of {BATCH}"
        )
        feed = _Feed(messages)
        fleet = _Fleet(environment | {"PARTITIONS": str(PARTITIONS)}, faults, feed)
        stack.callback(fleet.end)
        for _ in range(PROCESSES):
            fleet.start()
        publishing = threading.Thread(target=_publish, args=(publish, flush, messages, feed), daemon=True)
        publishing.start()
        _disturb(fleet, engine, report, console)
        feed.allowed = messages
        publishing.join()
        _wait(engine, messages, report)
        fleet.end()
        _compare(engine, report)
        if report.problems:
            console.print(f"the processes' log:\n{fleet.log()[-3000:]}", highlight=False)
    return report


class _Feed:
    """How many messages may be published by now: a share of them with each fault, which would find nothing to do otherwise."""

    def __init__(self, messages: int) -> None:
        self._share = messages // (len(POINTS) + len(FREEZES) + 1)
        self.allowed = self._share

    def more(self) -> None:
        self.allowed += self._share


def _publish(publish: Callable[[int, bytes], None], flush: Callable[[], None], messages: int, feed: _Feed) -> None:
    """Every message once, and some of them again."""
    for number in range(messages):
        while number >= feed.allowed:
            time.sleep(0.01)
        publish(number % PARTITIONS, json.dumps({"reading": f"r{number}"}).encode())
        if number % COPIED == 0 and number >= COPIED:
            again = number - COPIED
            publish(again % PARTITIONS, json.dumps({"reading": f"r{again}"}).encode())
    flush()


def _rabbit(url: str) -> Callable[[int, bytes], None]:
    parts = url_to_parts(url)
    connection = amqp.Connection(
        host=f"{parts.hostname}:{parts.port}",
        userid=parts.username,
        password=parts.password,
        virtual_host=parts.path or "/",
    )
    connection.connect()
    channel = connection.channel()
    for number in range(PARTITIONS):
        arguments = {"x-queue-type": "stream"}
        channel.queue_declare(f"{NAME}-{number}", durable=True, auto_delete=False, arguments=arguments)

    def publish(partition: int, value: bytes) -> None:
        channel.basic_publish(amqp.Message(value), routing_key=f"{NAME}-{partition}")

    return publish


class _Fleet:
    """The processes, each ended by its pid."""

    def __init__(self, environment: dict[str, str], faults: Path, feed: _Feed) -> None:
        self._feed = feed
        self._environment = {**os.environ, **environment}
        self._log = faults / "log"
        self.faults = faults
        self.running: list[subprocess.Popen[bytes]] = []
        # asked to stop, and not waited for
        self.stopping: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        command = [sys.executable, "-m", "idempotency.cli", "stream", "-A", "demo.stream_application"]
        with self._log.open("ab") as log:
            self.running.append(subprocess.Popen(command, env=self._environment, stdout=log, stderr=log))

    def planned(self, point: str, what: str, again: Callable[[], None] | None = None) -> int:
        """Let one process be killed or frozen at a point; returns its pid. Raises `ProcessError` if none comes there.

        `again`: what brings one there, from time to time.
        """
        plan, known = self.faults / f"{point}.{what}", set(self.faults.glob(f"*.{what}"))
        plan.touch()
        self._feed.more()
        deadline, next_at = time.monotonic() + FAULT_WITHIN, time.monotonic()
        while plan.exists():
            if again is not None and time.monotonic() > next_at:
                again()
                next_at = time.monotonic() + BETWEEN
            if time.monotonic() > deadline:
                plan.unlink(missing_ok=True)
                raise ProcessError(f"no process came to {point}; the end of the log:\n{self.log()[-2000:]}")
            time.sleep(0.02)
        (done,) = set(self.faults.glob(f"*.{what}")) - known
        return int(done.name.partition(".")[0])

    def replace(self, pid: int) -> None:
        """Wait for the end of a process, and start another one if none has taken its place."""
        (gone,) = [each for each in [*self.running, *self.stopping] if each.pid == pid]
        gone.wait(30)
        if gone in self.running:
            self.running.remove(gone)
            self.start()

    def relieve(self) -> None:
        """Start a process, and ask the oldest one to stop, without waiting for it: it gives back what it holds."""
        self.start()
        self.stopping.append(self.running.pop(0))
        self.stopping[-1].send_signal(signal.SIGTERM)

    def stop_one(self) -> None:
        """Ask a process to stop; it ends what it has begun."""
        process = self.running.pop(0)
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(30)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            raise ProcessError(f"a process that was asked to stop has not:\n{self.log()[-4000:]}") from None
        if status not in (0, -signal.SIGTERM):  # which it may get while it starts
            raise ProcessError(f"a process that was asked to stop ended with {status}:\n{self.log()[-2000:]}")

    def check(self) -> None:
        """Raise `ProcessError` if a process has ended by itself."""
        for each in self.running:
            if each.poll() is not None:
                raise ProcessError(f"a process ended with {each.returncode}:\n{self.log()[-2000:]}")

    def end(self) -> None:
        self.running += self.stopping
        while self.running:
            process = self.running.pop()
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def _disturb(fleet: _Fleet, engine: Engine, report: StreamReport, console: Console) -> None:
    """A kill at every point, with a rebalance and then a zombie in between."""
    _until(engine, BATCH, fleet)
    for number, point in enumerate(POINTS):
        if point == "stream.assigned":  # reached by what takes partitions: a process that comes
            fleet.start()
        # another one by what gives them back; what holds none is no use
        again = fleet.relieve if point == "stream.given_up" else None
        fleet.replace(fleet.planned(point, "kill", again))
        while len(fleet.running) > PROCESSES:
            fleet.stop_one()
            report.rebalances += 1
        report.kills += 1
        report.rebalances += 1
        console.print(f"killed at {point}")
        if number < len(FREEZES):
            pid = fleet.planned(FREEZES[number], "freeze")
            time.sleep(FROZEN)
            os.kill(pid, signal.SIGCONT)
            report.zombies += 1
            report.rebalances += 1
            console.print(f"frozen at {FREEZES[number]} for {FROZEN:g} s, while others took over")
        fleet.start()
        fleet.stop_one()
        report.rebalances += 1
        fleet.check()


def _until(engine: Engine, many: int, fleet: _Fleet) -> None:
    deadline = time.monotonic() + STALLED
    while _handled(engine) < many:
        if time.monotonic() > deadline:
            raise ProcessError(f"no {many} messages were handled within {STALLED:g} s:\n{fleet.log()[-2000:]}")
        fleet.check()
        time.sleep(0.1)


def _wait(engine: Engine, messages: int, report: StreamReport) -> None:
    """Until all is handled, or nothing changes any more."""
    last, changed_at = -1, time.monotonic()
    while (now := _handled(engine)) < messages:
        if now != last:
            last, changed_at = now, time.monotonic()
        elif time.monotonic() - changed_at > STALLED:
            report.problems.append(f"no change for {STALLED:g} s at {now} of {messages}")
            return
        time.sleep(0.3)
    time.sleep(2 * FROZEN / 5)  # what would be doubled may come last


def _handled(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text(_HANDLED)).scalar_one())


def _compare(engine: Engine, report: StreamReport) -> None:
    with engine.connect() as connection:
        books: Any = connection.execute(text(_BOOKS)).one()
    report.handled = books.readings
    report.doubled = books.written - books.readings
    report.lost = report.messages - books.readings
    report.disordered = books.disordered
