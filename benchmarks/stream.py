"""A stream's messages and a plain consumer's, in turns: the same rows, from the same topics of a Kafka in memory.

The plain one does what its users write: a session and a commit for each message, and then the offset, without waiting for the
broker's answer. It may double what it handles, and ours may not.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from confluent_kafka import Consumer as PlainConsumer
from rich.progress import track
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from idempotency.attempt.runtime import Runtime
from idempotency.settings import Settings
from idempotency.streams import Handling, kafka, stream
from idempotency.streams.consumer import Consumer
from idempotency.streams.declaring import Stream
from idempotency.streams.kafka_reader import KafkaReader
from services.kafka import KafkaCluster

INSERT = text("INSERT INTO jobs (job, number) VALUES (:job, :number)")
# Of our side: as many messages share a transaction.
BATCH = 200
# Seconds until a turn has to be over.
PATIENCE = 300.0


@dataclass(frozen=True)
class Rates:
    """Messages per second, by round."""

    plain: list[float]
    stream: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.stream) / statistics.median(self.plain)


def measure(engine: Engine, *, rounds: int, messages: int) -> Rates:
    """Both handle as many messages in turns; the first round is a warm-up and not counted."""
    cluster, rates = KafkaCluster(), Rates([], [])
    sides: list[tuple[Callable[[KafkaCluster, str, Engine, int], float], list[float]]] = [
        (plain, rates.plain),
        (ours, rates.stream),
    ]
    for round_ in track(range(rounds + 1), description="stream: a plain consumer and ours in turns"):
        for measured, into in sides:
            topic = f"t{uuid4().hex[:10]}"
            cluster.create_topic(topic, 1)
            for number in range(messages):
                cluster.publish(topic, 0, b'{"job": "%s-%d", "number": %d}' % (topic.encode(), number, number))
            cluster.flush()
            rate = measured(cluster, topic, engine, messages)
            if round_:
                into.append(rate)
    cluster.close()
    return rates


def plain(cluster: KafkaCluster, topic: str, engine: Engine, messages: int) -> float:
    """A loop over `poll()`, as most consumers are."""
    import json

    options = {"bootstrap.servers": cluster.servers, "group.id": topic, "auto.offset.reset": "earliest"}
    consumer: Any = PlainConsumer({**options, "enable.auto.commit": False, "isolation.level": "read_committed"})
    consumer.subscribe([topic])
    own = create_engine(os.environ["DATABASE_URL"])
    began, handled = 0.0, 0
    while handled < messages:
        message = consumer.poll(1.0)
        if message is None or message.error() is not None:
            continue
        began = began or time.perf_counter()
        with Session(own) as session:
            session.execute(INSERT, json.loads(message.value()))
            session.commit()
        consumer.commit(message, asynchronous=True)
        handled += 1
    took = time.perf_counter() - began
    consumer.close()
    own.dispose()
    _check(engine, topic, messages)
    return messages / took


def ours(cluster: KafkaCluster, topic: str, engine: Engine, messages: int) -> float:
    """The loop of `idempotency stream`."""
    settings = Settings.read({"database_url": os.environ["DATABASE_URL"], "kafka_servers": cluster.servers})
    runtime, stop = Runtime(settings), threading.Event()
    handled, times = 0, [0.0, 0.0]

    def handle(given: Handling, event: dict[str, Any]) -> None:
        nonlocal handled
        times[0] = times[0] or time.perf_counter()
        given.session.execute(INSERT, event)
        handled += 1

    declared: Stream = stream(topic, key="{event[job]}", source=kafka(topic), batch=BATCH)(handle)
    make = partial(KafkaReader, declared.source, instance=None)  # type: ignore[arg-type]

    def progressed() -> None:
        if handled >= messages and not times[1]:
            times[1] = time.perf_counter()
            stop.set()

    Consumer(runtime, declared, lambda holdings: make(holdings), stop).run(progressed)
    runtime.close()
    _check(engine, topic, messages)
    return messages / (times[1] - times[0])


def _check(engine: Engine, topic: str, messages: int) -> None:
    with engine.connect() as connection:
        query = text("SELECT count(*), count(DISTINCT job) FROM jobs WHERE job LIKE :topic || '-%'")
        found = tuple(connection.execute(query, {"topic": topic}).one())
    if found != (messages, messages):
        raise SystemExit(f"stream: {messages} messages have become {found[0]} rows for {found[1]} keys")
