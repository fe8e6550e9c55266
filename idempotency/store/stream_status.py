"""Where the consumers of streams are, for people: how far behind, and by whose claims they are held up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Row

from .stream_places import IS_SHOWN

_STATUS = f"""
SELECT consumer, topic, partition, position, end_position,
       CASE WHEN end_position > position OR end_position = position AND locked_until > clock_timestamp()
            THEN end_position - position END AS lag,
       CASE WHEN end_position > position THEN (locked_until > clock_timestamp()) IS NOT TRUE END AS lag_is_least, owner, fence,
       extract(epoch FROM locked_until - clock_timestamp())::float8 AS lease_left, stopped, advanced_at
FROM idempotency.stream_positions WHERE service = %(service)s AND (%(consumer)s::text IS NULL OR consumer = %(consumer)s)
  AND {IS_SHOWN}
ORDER BY consumer, topic, partition
"""

# The condition on `locked_until` selects the index.
_CLAIMED = """
SELECT r.task, r.locked_by AS holder, count(*) AS messages,
       max(extract(epoch FROM r.locked_until - clock_timestamp()))::float8 AS lease_left
FROM idempotency.records r
WHERE r.locked_until IS NOT NULL AND r.status = 'started' AND r.service = %(service)s AND r.task = ANY(%(tasks)s)
  AND NOT EXISTS (
    SELECT FROM idempotency.stream_positions p WHERE p.service = r.service AND p.owner = r.locked_by
      AND p.locked_until > clock_timestamp())
GROUP BY r.task, r.locked_by ORDER BY r.task, r.locked_by
"""


def status(connection: Connection, service: str, consumer: str | None = None) -> Sequence[Row[Any]]:
    """Where the consumers of `service` are: a row for each partition. `lag` in messages, `lease_left` in seconds.

    `lag` is None where it is not known; `lag_is_least` where no owner looks, so that more may have come.
    """
    fields = {"service": service, "consumer": consumer}
    return connection.exec_driver_sql(_STATUS, fields).all()


def claimed_elsewhere(connection: Connection, service: str, tasks: Collection[str]) -> Sequence[Row[Any]]:
    """Holders that have messages of these under a claim, and no partition: how many, and how long their claims last, in seconds."""
    return connection.exec_driver_sql(_CLAIMED, {"service": service, "tasks": list(tasks)}).all()
