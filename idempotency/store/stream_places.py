"""Partitions that are read no more: their rows stay until a person forgets them, since a position that is gone is a beginning."""

from __future__ import annotations

from sqlalchemy import Connection

from .streams import Place

_FORGET = """
DELETE FROM idempotency.stream_positions
WHERE service = %(service)s AND consumer = %(consumer)s AND topic = %(topic)s AND partition = %(partition)s
"""


def forget(connection: Connection, place: Place) -> None:
    """Delete where a consumer is in a partition: if it is read again, that is from its beginning."""
    connection.exec_driver_sql(_FORGET, place.fields())
