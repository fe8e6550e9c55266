"""A Kafka of librdkafka's own: its mock cluster, which speaks the protocol from this process's memory.

Made by its C functions (`rdkafka_mock.h`), which confluent-kafka brings: by its configuration alone (`test.mock.num.brokers`) a
group would take three seconds to form, and no message could be deleted as retention does. It keeps 100,000 messages or 5 MiB of a
partition, nothing on disk, and no member of a group under a static name that comes again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import confluent_kafka
from confluent_kafka import Producer

# RD_KAFKA_PRODUCER of rdkafka.h.
PRODUCER = 0
# Milliseconds that a group waits for further members.
FORMING = 50


class KafkaCluster:
    """One broker, in memory, until `close()`."""

    def __init__(self) -> None:
        place = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
        self._library: Any = ctypes.CDLL(str(next(place.glob("librdkafka*.so*"))))
        for name in ("rd_kafka_new", "rd_kafka_conf_new", "rd_kafka_mock_cluster_new"):
            getattr(self._library, name).restype = ctypes.c_void_p
        self._library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        error = ctypes.create_string_buffer(512)
        conf = ctypes.c_void_p(self._library.rd_kafka_conf_new())
        self._handle = ctypes.c_void_p(self._library.rd_kafka_new(PRODUCER, conf, error, 512))
        assert self._handle.value, error.value
        self._cluster = ctypes.c_void_p(self._library.rd_kafka_mock_cluster_new(self._handle, 1))
        assert self._cluster.value
        self._library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, FORMING)
        self.servers: str = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        self._producer = Producer({"bootstrap.servers": self.servers, "linger.ms": 5})

    def create_topic(self, name: str, partitions: int) -> None:
        failed = self._library.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1)
        assert failed == 0, failed

    def publish(
        self,
        topic: str,
        partition: int,
        value: bytes | None,
        headers: Sequence[tuple[str, Any]] = (),
        key: bytes | None = None,
    ) -> None:
        self._producer.produce(topic, value, key, partition, headers=list(headers))
        self._producer.poll(0)

    def flush(self) -> None:
        assert self._producer.flush(30) == 0

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        """What retention does: messages before this offset are gone."""
        failed = self._library.rd_kafka_mock_partition_delete_records(
            self._cluster, topic.encode(), partition, ctypes.c_int64(offset)
        )
        assert failed == 0, failed

    def close(self) -> None:
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._handle)
