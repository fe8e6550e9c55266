"""One partition, as its position is stored. Those that are read no more stay, also forgotten: a position that is gone is a beginning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

# The row of one place, by its `fields`.
THIS_PLACE = "service = %(service)s AND consumer = %(consumer)s AND topic = %(topic)s AND partition = %(partition)s"

# What the position of a forgotten partition is of, until a person says where to go on.
FORGOTTEN = "forgotten"
# Whether it is shown: also a forgotten one, if a process has come to it since.
IS_SHOWN = f"(source IS DISTINCT FROM '{FORGOTTEN}' OR owner IS NOT NULL OR stopped IS NOT NULL)"
_FORGET = f"""
UPDATE idempotency.stream_positions SET fence = pg_catalog.nextval('idempotency.fence'), owner = NULL, locked_until = NULL,
    stopped = NULL, source = %(forgotten)s
WHERE {THIS_PLACE}
"""


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
    """Show the position of a partition no more, and move its fence: a process that is frozen as its owner finds it taken away.

    Where it is read again, it stops: only a person knows whether what is there goes on behind the position.
    """
    connection.exec_driver_sql(_FORGET, place.fields() | {"forgotten": FORGOTTEN})
