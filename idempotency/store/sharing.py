"""Which other applications use the tables, and whether their relays are alive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

from ..settings import Settings

# The services that have pending rows, by skipping through the index, those whose processes were seen lately, and what
# waits without a name. Counts stop at the bound. NULLs come last, so the skipping ends before them.
_SHARERS = """
WITH RECURSIVE senders(service) AS (
    (SELECT service FROM idempotency.outbox WHERE status = 'pending' AND ordering_key IS NULL AND service IS NOT NULL
     ORDER BY service LIMIT 1)
    UNION ALL
    SELECT (SELECT o.service FROM idempotency.outbox o
            WHERE o.status = 'pending' AND o.ordering_key IS NULL AND o.service > s.service ORDER BY o.service LIMIT 1)
    FROM senders s WHERE s.service IS NOT NULL
), named AS (
    SELECT service FROM senders WHERE service IS NOT NULL
    UNION SELECT service FROM idempotency.lanes WHERE service IS NOT NULL
    UNION SELECT service FROM idempotency.processes
          WHERE seen_at > clock_timestamp() - make_interval(secs => %(remembered)s)
)
SELECT n.service, due.rows + coalesce(lanes.rows, 0) AS due, coalesce(signs.has_relay, false) AS has_relay,
       signs.silent_seconds
FROM named n
CROSS JOIN LATERAL (
    SELECT count(*) AS rows FROM (
        SELECT FROM idempotency.outbox o
        WHERE o.service = n.service AND o.status = 'pending' AND o.ordering_key IS NULL
          AND o.available_at <= (SELECT clock_timestamp()) LIMIT %(bound)s) waiting
) due
LEFT JOIN LATERAL (
    SELECT count(*) AS rows FROM idempotency.lanes l
    WHERE l.service = n.service AND NOT l.blocked AND l.available_at <= (SELECT clock_timestamp())
) lanes ON true
LEFT JOIN LATERAL (
    SELECT bool_or(kind = 'relay' AND seen_at > clock_timestamp() - make_interval(secs => %(silence)s)) AS has_relay,
           extract(epoch FROM clock_timestamp() - max(seen_at))::float8 AS silent_seconds
    FROM idempotency.processes p WHERE p.service = n.service
) signs ON true
WHERE n.service <> %(service)s
UNION ALL
SELECT NULL, count(*), false, NULL FROM (
    SELECT FROM idempotency.outbox WHERE service IS NULL AND (status = 'pending' OR settled_at IS NULL)
    LIMIT %(bound)s) unnamed
HAVING count(*) > 0
ORDER BY 1
"""


def sharers(connection: Connection, settings: Settings, *, bound: int) -> Sequence[Row[Any]]:
    """The other services, the rows that are due for each (a lane counts as one), and whether a relay of it is alive.

    The one without a name: unsettled rows that code of schema 0011 wrote and no relay has adopted. Counts stop at `bound`.
    """
    parameters = {
        "service": settings.service,
        "silence": settings.alarm_silence,
        "remembered": settings.retention_processes,
        "bound": bound,
    }
    return connection.exec_driver_sql(_SHARERS, parameters).all()
