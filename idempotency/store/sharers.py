"""Which other applications use the tables, and whether their relays are alive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

from ..settings import Settings

# The services in a table, by skipping through an index that begins with them. NULLs come last, and end it.
_SKIPPING = """
    (SELECT service FROM idempotency.{table} WHERE {condition} AND service IS NOT NULL ORDER BY service LIMIT 1)
    UNION ALL
    SELECT (SELECT o.service FROM idempotency.{table} o
            WHERE {condition} AND o.service > s.service ORDER BY o.service LIMIT 1)
    FROM {name} s WHERE s.service IS NOT NULL
"""
_PENDING = "status = 'pending' AND ordering_key IS NULL"

# Those that have rows to send or operations whose lease is over, those whose processes were seen lately, and what waits
# without a name.
_SHARERS = f"""
WITH RECURSIVE senders(service) AS (
    {_SKIPPING.format(table="outbox", condition=_PENDING, name="senders")}
), lane_senders(service) AS (
    {_SKIPPING.format(table="lanes", condition="NOT blocked", name="lane_senders")}
), over AS MATERIALIZED (
    SELECT service FROM idempotency.records
    WHERE locked_until IS NOT NULL AND locked_until < (SELECT clock_timestamp()) ORDER BY locked_until LIMIT %(bound)s
), named AS (
    SELECT service FROM senders
    UNION SELECT service FROM over WHERE service IS NOT NULL
    UNION SELECT service FROM lane_senders
    UNION SELECT service FROM idempotency.processes
          WHERE seen_at > clock_timestamp() - make_interval(secs => %(remembered)s)
)
SELECT n.service, due.rows + lanes.rows AS due, (SELECT count(*) FROM over WHERE over.service = n.service) AS lease_over,
       coalesce(signs.has_relay, false) AS has_relay, signs.silent_seconds
FROM named n
CROSS JOIN LATERAL (
    SELECT count(*) AS rows FROM (
        SELECT FROM idempotency.outbox o WHERE o.service = n.service AND {_PENDING}
          AND o.available_at <= (SELECT clock_timestamp()) LIMIT %(bound)s) waiting
) due
CROSS JOIN LATERAL (
    SELECT count(*) AS rows FROM (
        SELECT FROM idempotency.lanes l WHERE l.service = n.service AND NOT blocked
          AND l.available_at <= (SELECT clock_timestamp()) LIMIT %(bound)s) waiting
) lanes
CROSS JOIN LATERAL (
    SELECT bool_or(kind = 'relay' AND seen_at > clock_timestamp() - make_interval(secs => %(silence)s)) AS has_relay,
           extract(epoch FROM clock_timestamp() - max(seen_at))::float8 AS silent_seconds
    FROM idempotency.processes p WHERE p.service = n.service
) signs
WHERE n.service <> %(service)s
UNION ALL
SELECT NULL, count(*), 0, false, NULL FROM (
    (SELECT 1 FROM idempotency.outbox WHERE service IS NULL AND (status = 'pending' OR settled_at IS NULL)
     LIMIT %(bound)s)
    UNION ALL
    (SELECT 1 FROM idempotency.records
     WHERE service IS NULL AND locked_until < (SELECT clock_timestamp()) AND locked_until IS NOT NULL
     LIMIT %(bound)s)
) unnamed
HAVING count(*) > 0
ORDER BY 1
"""


def sharers(connection: Connection, settings: Settings, *, bound: int) -> Sequence[Row[Any]]:
    """The other services: rows that are due (a lane counts as one), operations whose lease is over, whether a relay is alive.

    The one without a name: unsettled rows that code of schema 0011 wrote and no relay has adopted, and operations that it
    began, whose lease is over. Counts stop at `bound`.
    """
    parameters = {
        "service": settings.service,
        "silence": settings.alarm_silence,
        "remembered": settings.retention_processes,
        "bound": bound,
    }
    return connection.exec_driver_sql(_SHARERS, parameters).all()
