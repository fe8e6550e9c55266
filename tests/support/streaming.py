"""Processes that handle a stream: forked from one that has imported everything, and killed, frozen and stopped by their pid."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import amqp
from kombu.utils.url import url_to_parts
from sqlalchemy import Engine, Row, text

from idempotency import PermanentError, streams
from idempotency.application import runtime_of
from idempotency.attempt.runtime import Runtime
from idempotency.cli.terminal import stopped_by_signals
from idempotency.store import streams as store
from idempotency.streams import Handling
from idempotency.streams.consumer import Consumer
from idempotency.streams.declaring import Stream
from idempotency.streams.process import make_reader, run_streams
from idempotency.streams.sources import KafkaTopics, RabbitStream, Source
from services.kafka import KafkaCluster
from tests.support import bank, crashing
from tests.support.processes import eventually

NAME = "deposits"
# Seconds. Long enough that a busy machine does not lose one by itself.
LEASE = 4.0


def deposit(stream: Handling, event: Mapping[str, Any]) -> str:
    """One row for each event, and what else the event tells it to do."""
    stream.session.execute(bank.INSERT, {"account": event["account"], "amount": stream.message.offset})
    match event.get("how"):
        case "permanent":
            raise PermanentError("no such account", "no_account")
        case "permanent unless told":
            if not Path(os.environ["CRASH_DIRECTORY"], "told").exists():
                raise PermanentError("not yet", "not_yet")
        case "error":  # in the transaction of many, and in the first one of its own
            with Path(os.environ["CRASH_DIRECTORY"], f"tried-{event['account']}").open("a+") as tried:
                tried.write(".")
                if tried.tell() < 3:
                    raise ValueError("the first two times")
        case "hold":
            crashing.reach("held")
        case "kill":  # as a crash of the interpreter, or the kernel when memory is short
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit("told to")
        case "effect":
            stream.session.rollback()
            stream.effect("call", bank.call, event["url"])
            stream.session.execute(bank.INSERT, {"account": event["account"], "amount": stream.message.offset})
    return str(event["account"])


def insert(stream: Handling, account: str) -> None:
    """One row, as a deposit makes one."""
    stream.session.execute(bank.INSERT, {"account": account, "amount": stream.message.offset})


HANDLERS: dict[str, Callable[[Handling, Any], Any]] = {"deposit": deposit}


@dataclass(frozen=True)
class Handler:
    """A stream to handle in another process: where its messages come from, and its options."""

    source: Source
    name: str = NAME
    handler: str = "deposit"
    options: Mapping[str, Any] = field(default_factory=dict)

    def declared(self) -> Stream:
        options = {"key": "{event[account]}", **self.options}
        return streams.stream(self.name, source=self.source, **options)(HANDLERS[self.handler])


def configure(environment: Mapping[str, str]) -> None:
    bank.configure(dict(environment))
    bank.app.conf.update(
        idempotency_service=environment.get("SERVICE", bank.app.main),
        idempotency_kafka_servers=environment.get("KAFKA_SERVERS"),
        idempotency_kafka_options={"session.timeout.ms": "1500", "heartbeat.interval.ms": "100"},
        idempotency_heartbeat=float(environment["LEASE"]) / 4,
        idempotency_stream_standby_lag=float(environment["STANDBY_LAG"]) if "STANDBY_LAG" in environment else None,
    )


def _run(environment: dict[str, str], handlers: Sequence[Handler], log: str) -> None:
    """What the process does, until SIGTERM."""
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(environment)
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s", force=True)
    configure(environment)
    crashing.install()
    if environment.get("POSITIONS_APART"):
        commit_positions_apart()
    run_streams(bank.app, {each.name: each.declared() for each in handlers}, stopped_by_signals())


def commit_positions_apart() -> None:
    """What a consumer does that knows of nothing but offsets: first the rows, then, in another commit, the position."""
    from idempotency.streams import consumer, together

    consuming: Any = consumer
    handling: Any = together
    handle = together.handle_together

    def handled(runtime: Runtime, stream: Stream, policy: Any, partition: Any, prepared: Any) -> Any:
        done = handle(runtime, stream, policy, partition, prepared)
        with runtime.autocommit() as connection:
            assert store.pass_over(connection, partition.held, done.position, lease=LEASE)
        return done

    def recorded(connection: Any, deliveries: Sequence[Any], *_: Any, **__: Any) -> set[str]:
        return {each.id.key for each in deliveries}

    handling.streams = SimpleNamespace(advance=lambda *_, **__: None)
    handling.batches.complete_new = recorded
    consuming.handle_together = handled


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["tests.support.streaming", "idempotency.streams.kafka_reader", "idempotency.streams.rabbitmq_reader"]
)


class StreamProcess:
    """One process."""

    def __init__(self, environment: dict[str, str], handlers: Sequence[Handler]) -> None:
        self._log = Path(environment["CRASH_DIRECTORY"]) / f"stream-{uuid4().hex[:8]}.log"
        self._process = _context.Process(target=_run, args=(environment, handlers, str(self._log)), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def has_ended(self) -> bool:
        return not self._process.is_alive()

    @property
    def status(self) -> int | None:
        return self._process.exitcode

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if not self.has_ended:
            with suppress(ProcessLookupError):  # it has just killed itself, which its parent has not been told yet
                self.signal(signal.SIGKILL)
        self._process.join(10)

    def end(self, timeout: float = 15.0) -> int | None:
        """A clean stop; the exit status."""
        self.signal(signal.SIGTERM)
        self._process.join(timeout)
        return self.status


class StreamBroker:
    """Where a test publishes: a topic of its own, with some partitions."""

    def __init__(self, topic: str, partitions: int) -> None:
        self.topic = topic
        self.partitions = partitions
        self.published = [0] * partitions

    def source(self, **options: Any) -> Source:
        raise NotImplementedError

    def publish(self, event: Any, partition: int = 0, **headers: Any) -> None:
        """One event as JSON, or bytes as they are."""
        value = event if isinstance(event, bytes) else json.dumps(event).encode()
        self._publish(partition, value, headers)
        self.published[partition] += 1

    def publish_many(self, many: int, first: int = 0) -> list[str]:
        """Plain deposits, to each partition in turn; returns their accounts."""
        accounts = [f"a{number}" for number in range(first, first + many)]
        for number, account in enumerate(accounts):
            self.publish({"account": account}, number % self.partitions)
        self.flush()
        return accounts

    def _publish(self, partition: int, value: bytes, headers: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        pass

    def recreate(self) -> None:
        """Delete what there is, and begin again with nothing under the same name."""
        raise NotImplementedError

    def close(self) -> None:
        pass


class RabbitBroker(StreamBroker):
    """Streams of RabbitMQ, over AMQP."""

    def __init__(self, url: str, topic: str, partitions: int, **arguments: Any) -> None:
        super().__init__(topic, partitions)
        parts = url_to_parts(url)
        self._connection = amqp.Connection(
            host=f"{parts.hostname}:{parts.port}",
            userid=parts.username,
            password=parts.password,
            virtual_host=parts.path,
        )
        self._connection.connect()
        self._channel = self._connection.channel()
        self._arguments = {"x-queue-type": "stream", **arguments}
        self._declare()

    def _declare(self) -> None:
        for number in range(self.partitions):
            self._channel.queue_declare(
                f"{self.topic}-{number}", durable=True, auto_delete=False, arguments=self._arguments
            )

    def holds_any(self) -> bool:
        """Whether the first partition has a message, as far as its broker sends one within a second."""
        found: list[bool] = []
        with self._connection.channel() as channel:
            channel.auto_decode = False
            channel.basic_qos(0, 1, False)
            channel.basic_consume(
                f"{self.topic}-0", callback=lambda _: found.append(True), arguments={"x-stream-offset": "first"}
            )
            with suppress(TimeoutError):
                self._connection.drain_events(timeout=1.0)
        return bool(found)

    def recreate(self) -> None:
        for number in range(self.partitions):
            self._channel.queue_delete(f"{self.topic}-{number}")
        self._declare()
        self.published = [0] * self.partitions

    def source(self, **options: Any) -> RabbitStream:
        return streams.rabbitmq_stream(self.topic, **{"partitions": self.partitions, **options})

    def _publish(self, partition: int, value: bytes, headers: Mapping[str, Any]) -> None:
        named = {name.replace("_", "-"): each for name, each in headers.items()}
        self._channel.basic_publish(
            amqp.Message(value, application_headers=named), routing_key=f"{self.topic}-{partition}"
        )

    def close(self) -> None:
        for number in range(self.partitions):
            self._channel.queue_delete(f"{self.topic}-{number}")
        self._connection.close()


class KafkaBroker(StreamBroker):
    """A topic of a Kafka in memory."""

    def __init__(self, cluster: KafkaCluster, topic: str, partitions: int) -> None:
        super().__init__(topic, partitions)
        self.cluster = cluster
        cluster.create_topic(topic, partitions)

    def source(self, **options: Any) -> KafkaTopics:
        return streams.kafka(self.topic, group=self.topic, **options)

    def _publish(self, partition: int, value: bytes, headers: Mapping[str, Any]) -> None:
        named = [(name.replace("_", "-"), str(each).encode()) for name, each in headers.items()]
        self.cluster.publish(self.topic, partition, value, named)

    def flush(self) -> None:
        self.cluster.flush()


class Streaming:
    """What a test of a stream has: its broker, its processes, and a look past them into the database."""

    def __init__(self, broker: StreamBroker, environment: dict[str, str], engine: Engine) -> None:
        self.broker = broker
        self.environment = environment | {"LEASE": str(LEASE)}
        self.engine = engine
        self.directory = Path(environment["CRASH_DIRECTORY"])
        self._processes: list[StreamProcess] = []

    def start(self, *handlers: Handler, **options: Any) -> StreamProcess:
        process = StreamProcess(self.environment, handlers or [self.handler(**options)])
        self._processes.append(process)
        return process

    def start_from(self, begin: str, **options: Any) -> StreamProcess:
        """Begin at `earliest` or `latest`."""
        return self.start(Handler(self.broker.source(start=begin), options=options))

    def handler(self, **options: Any) -> Handler:
        return Handler(self.broker.source(), options=options)

    def consumer(self, stop: threading.Event, *, configured: bool = False, **options: Any) -> Consumer:
        """A consumer in this process, whose turns the test takes. `configured`: the application is as the test wants it."""
        if not configured:
            configure(self.environment)
        stream, runtime = self.handler(**options).declared(), self.runtime
        return Consumer(runtime, stream, lambda holdings: make_reader(bank.app, runtime, stream, None, holdings), stop)

    @contextmanager
    def consuming(self, **options: Any) -> Iterator[None]:
        """While entered, a thread of this process handles the stream."""
        stop = threading.Event()
        thread = threading.Thread(target=self.consumer(stop, **options).run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(20)

    @contextmanager
    def handled_by(
        self, fn: Callable[[Handling, Any], Any], name: str | None = None, source: Source | None = None, **options: Any
    ) -> Iterator[Consumer]:
        """While entered, a thread of this process handles the stream by this handler; without a name, under a new one."""
        name = name or f"s{uuid4().hex[:6]}"
        HANDLERS[name] = fn
        configure(self.environment)
        stream, runtime, stop = (
            Handler(source or self.broker.source(), name, name, options).declared(),
            self.runtime,
            threading.Event(),
        )
        consumer = Consumer(runtime, stream, lambda held: make_reader(bank.app, runtime, stream, None, held), stop)
        thread = threading.Thread(target=consumer.run)
        thread.start()
        try:
            yield consumer
        finally:
            stop.set()
            thread.join(20)

    @property
    def runtime(self) -> Runtime:
        return runtime_of(bank.app)

    def query(self, statement: str, **parameters: Any) -> Sequence[Row[Any]]:
        with self.engine.connect() as connection:
            return connection.execute(text(statement), parameters).all()

    def entries(self) -> list[str]:
        """The accounts that have been written, in that order: once each, if all is well."""
        return [row.account for row in self.query("SELECT account FROM entries ORDER BY id")]

    def positions(self) -> dict[int, int | None]:
        rows = self.query("SELECT partition, position FROM idempotency.stream_positions ORDER BY partition")
        return {row.partition: row.position for row in rows}

    def owners(self) -> dict[int, int | None]:
        """The process that has each partition, by its pid."""
        rows = self.query("SELECT partition, owner FROM idempotency.stream_positions ORDER BY partition")
        return {row.partition: None if row.owner is None else int(row.owner.split("|")[3]) for row in rows}

    def stopped(self) -> str:
        """Why a partition does not go on; empty: all do."""
        rows = self.query("SELECT stopped FROM idempotency.stream_positions WHERE stopped IS NOT NULL")
        return "; ".join(row.stopped for row in rows)

    def wait_until_stopped(self, why: str, *, timeout: float = 20.0) -> None:
        """Until a partition says that it does not go on, with these words."""
        try:
            eventually(lambda: why in self.stopped(), timeout=timeout)
        except AssertionError:
            raise AssertionError(f"{self.stopped()!r}, {self.positions()}\n{self.logs()[-3000:]}") from None

    def letters(self) -> list[tuple[str, str]]:
        """Reasons and states of the dead letters."""
        rows = self.query("SELECT reason, status FROM idempotency.dead_letters ORDER BY id")
        return [(row.reason, row.status) for row in rows]

    def wait_for(self, name: str) -> Path:
        """Until this file of the plans is there."""
        path = self.directory / name
        eventually(path.exists, what=f"{path}: {self.logs()[-3000:]}")
        return path

    def ending(self, process: StreamProcess) -> Callable[[], int | None]:
        """Ask a process to stop. Returns what waits for that."""
        process.signal(signal.SIGTERM)
        return lambda: process.end()

    def plan(self, point: str, action: str) -> Path:
        return crashing.plan(self.directory, point, action)

    def wait_until_handled(self, *, timeout: float = 30.0) -> None:
        """Until the positions are at the ends of what was published. Of RabbitMQ's, entries of its own are among them."""

        def is_there() -> bool:
            found = self.positions()
            return all((found.get(number) or 0) >= many for number, many in enumerate(self.broker.published) if many)

        try:
            eventually(is_there, timeout=timeout)
        except AssertionError:
            raise AssertionError(f"{self.positions()} of {self.broker.published}\n{self.logs()[-3000:]}") from None

    def wait_until_entered(self, accounts: Set[str], *, timeout: float = 30.0) -> None:
        """Until these accounts have been written, whatever others have."""
        try:
            eventually(lambda: accounts <= set(self.entries()), timeout=timeout)
        except AssertionError:
            raise AssertionError(f"{self.entries()}\n{self.logs()[-3000:]}") from None

    def logs(self) -> str:
        return "\n".join(each.log for each in self._processes)

    def close(self) -> None:
        for each in self._processes:
            with_stop = not each.has_ended
            if with_stop:
                each.signal(signal.SIGCONT)
            each.kill()


def until_gone(path: Path, process: StreamProcess | None = None) -> None:
    """Until a plan was carried out."""
    eventually(lambda: not path.exists(), what=f"{path} reached: {'' if process is None else process.log[-2000:]}")
