"""How long a scrape and a `status` take with a very long backlog."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sqlalchemy import Engine, text

from idempotency.application import settings_of
from idempotency.store.overview import monitoring_connection
from idempotency.upkeep import overview

from . import jobs

# Every tenth of the waiting operations is released, so that windows contain rows of both kinds.
WAITING = """
INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, origin, status, published_at,
                                service)
SELECT 'backlog' || n, 'default', 'benchmarks.unique', 'backlog' || n, 'v1:f', repeat('m', 600), 'unique', 'enqueue',
       'published', clock_timestamp(), 'benchmarks'
FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) n
"""
RELEASED = """
INSERT INTO idempotency.records (tenant, task, key, status, fence, available_at, fingerprint, message, queue, service)
SELECT 'default', 'benchmarks.unique', 'backlog' || n, 'released', n, clock_timestamp() + interval '1 hour', 'v1:f',
       repeat('m', 600), 'unique', 'benchmarks'
FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint), 10) n
"""
COMPLETED = """
INSERT INTO idempotency.records
    (tenant, task, key, status, fence, fingerprint, message, queue, result, response_code, completed_at, expires_at,
     service)
SELECT 'default', 'benchmarks.unique', 'done' || n, 'completed', n, 'v1:f', repeat('m', 600), 'unique', 'null', 200,
       clock_timestamp(), clock_timestamp() + interval '3 days', 'benchmarks'
FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) n
"""


@dataclass
class Seconds:
    """Seconds by round."""

    look: list[float] = field(default_factory=list)
    status: list[float] = field(default_factory=list)


def measure(database: Engine, *, rounds: int, waiting: int) -> Seconds:
    """Time both with `waiting` accepted operations, a tenth of them released, and as many completed ones."""
    with database.connect() as connection:
        for statement in (WAITING, RELEASED, COMPLETED):
            connection.execute(text(statement), {"first": 1, "last": waiting})
        connection.execute(text("VACUUM ANALYZE idempotency.outbox, idempotency.records"))
    took = Seconds()
    given = settings_of(jobs.app)
    for _ in range(rounds):
        for ask, seconds in ((overview.take_snapshot, took.look), (overview.status, took.status)):
            began = time.perf_counter()
            with monitoring_connection(given) as connection:
                ask(connection, jobs.app, given)
            seconds.append(time.perf_counter() - began)
    with database.connect() as connection:
        connection.execute(text("DELETE FROM idempotency.outbox WHERE message_id LIKE 'backlog%'"))
        connection.execute(text("DELETE FROM idempotency.records WHERE key LIKE 'backlog%' OR key LIKE 'done%'"))
    return took
