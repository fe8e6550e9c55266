"""A stream of its own for each test: of RabbitMQ, of a Kafka in memory, or of both in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine

import services
from idempotency.application import close_runtime
from tests.support import bank
from tests.support.kafka_cluster import KafkaCluster
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
    made: list[Streaming] = []

    def make(kind: str, partitions: int = 1, **arguments: Any) -> Streaming:
        topic = f"t{uuid4().hex[:10]}"
        broker: StreamBroker = (
            KafkaBroker(kafka_cluster, topic, partitions)
            if kind == "kafka"
            else RabbitBroker(servers.broker_url, topic, partitions, **arguments)
        )
        made.append(Streaming(broker, environment | {"KAFKA_SERVERS": kafka_cluster.servers}, engine))
        return made[-1]

    yield make
    for each in made:
        each.close()
        each.broker.close()
    close_runtime(bank.app)


@pytest.fixture(params=["rabbitmq", "kafka"])
def streaming(request: pytest.FixtureRequest, make_streaming: Make) -> Streaming:
    """One partition, of each kind of broker in turn."""
    return make_streaming(request.param)


@pytest.fixture
def rabbit(make_streaming: Make) -> Streaming:
    """One partition of a stream of RabbitMQ: for what does not depend on the broker."""
    return make_streaming("rabbitmq")
