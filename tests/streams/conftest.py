"""A stream of its own for each test: of RabbitMQ, of a Kafka in memory, or of both in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine

import services
from idempotency.application import close_runtime
from services.kafka import KafkaCluster
from tests.support import bank
from tests.support.streaming import KafkaBroker, RabbitBroker, StreamBroker, Streaming

Make = Callable[..., Streaming]


@pytest.fixture(scope="session")
def kafka_cluster() -> Iterator[KafkaCluster]:
    cluster = KafkaCluster()
    yield cluster
    cluster.close()


@pytest.fixture
def make_streaming(
    servers: services.Services, kafka_cluster: KafkaCluster, environment: dict[str, str], engine: Engine
) -> Iterator[Make]:
    """Makes a stream and what handles it; `apart`: in a database and a directory of its own, so that there may be several."""
    # a service, a standby's lag and Kafka's address, which bank.configure leaves as they are
    before = dict(bank.app.conf.changes)
    made: list[Streaming] = []
    databases: list[tuple[str, Engine]] = []

    def make(kind: str, partitions: int = 1, *, apart: bool = False, **arguments: Any) -> Streaming:
        topic = f"t{uuid4().hex[:10]}"
        broker: StreamBroker = (
            KafkaBroker(kafka_cluster, topic, partitions)
            if kind == "kafka"
            else RabbitBroker(arguments.pop("broker_url", servers.broker_url), topic, partitions, **arguments)
        )
        own, its_engine = environment | {"KAFKA_SERVERS": kafka_cluster.servers}, engine
        if apart:
            url = servers.create_database(f"test_{topic}")
            bank.prepare(url)
            its_engine = create_engine(url, isolation_level="AUTOCOMMIT")
            databases.append((f"test_{topic}", its_engine))
            directory = Path(environment["CRASH_DIRECTORY"]) / topic
            directory.mkdir()
            own |= {"DATABASE_URL": url, "CRASH_DIRECTORY": str(directory)}
        made.append(Streaming(broker, own, its_engine))
        return made[-1]

    yield make
    for each in made:
        each.close()
        each.broker.close()
    close_runtime(bank.app)
    bank.app.conf.changes.clear()
    bank.app.conf.changes.update(before)
    for name, its_engine in databases:
        its_engine.dispose()
        servers.drop_database(name)


@pytest.fixture(params=["rabbitmq", "kafka"])
def streaming(request: pytest.FixtureRequest, make_streaming: Make) -> Streaming:
    """One partition, of each kind of broker in turn."""
    return make_streaming(request.param)


@pytest.fixture
def rabbit(make_streaming: Make) -> Streaming:
    """One partition of a stream of RabbitMQ: for what does not depend on the broker."""
    return make_streaming("rabbitmq")
