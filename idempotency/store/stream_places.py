"""One partition, as its position is stored. Those that are read no more stay: a position that is gone is a beginning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

# The row of one place, by its `fields`.
THIS_PLACE = "service = %(service)s AND consumer = %(consumer)s AND topic = %(topic)s AND partition = %(partition)s"


@dataclass(frozen=True, slots=True)
class Place:
    """One partition of a topic, for one consumer of one application."""

    service: str
    consumer: str
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"

    def fields(self) -> dict[str, Any]:
        """The parameters of `THIS_PLACE`."""
        return {
            "service": self.service, "consumer": self.consumer, "topic": self.topic, "partition": self.partition
        }  # fmt: skip


def forget(connection: Connection, place: Place) -> None:
    """Delete where a consumer is in a partition: if it is read again, that is from its beginning."""
    connection.exec_driver_sql(f"DELETE FROM idempotency.stream_positions WHERE {THIS_PLACE}", place.fields())
