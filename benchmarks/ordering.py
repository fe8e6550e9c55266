"""The relay's throughput for one ordering key, alone and beside 100,000 rows of blocked keys."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from rich.progress import track
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency.relay.relay import Relay

from . import jobs

BLOCKED = 100_000
# Half of the blocked rows have the same key, the others a key each.
_BLOCK = """
INSERT INTO idempotency.outbox
    (message_id, tenant, task, key, fingerprint, message, origin, ordering_key, service)
SELECT 'blocked ' || n, 'bench', 'blocked', n::text, 'f', '{}', 'enqueue', CASE WHEN n % 2 = 0 THEN 'one' ELSE n::text END,
       'benchmarks'
FROM generate_series(1, :rows) n
"""
_FAIL = """
UPDATE idempotency.outbox SET status = 'failed', last_error = 'refused'
WHERE task = 'blocked' AND (ordering_key <> 'one' OR key = '2')
"""
_numbers = itertools.count(20_000_000)


@dataclass(frozen=True)
class Rates:
    """Events per second for one key, by round."""

    alone: list[float]
    beside_blocked: list[float]


def measure(database: Engine, *, rounds: int, messages: int) -> Rates:
    """Publish `messages` events with one key; they are not consumed."""
    relay = Relay(jobs.app)
    try:
        alone = [
            messages / _published(database, relay, messages)
            for _ in track(range(rounds), description="ordering: one key")
        ]
        with database.connect() as connection:
            connection.execute(text(_BLOCK), {"rows": BLOCKED})
            connection.execute(text(_FAIL))
            # as a relay does after a failed row
            connection.execute(text("SELECT idempotency.refresh_lane(task, ordering_key) FROM idempotency.lanes"))
            connection.execute(text("VACUUM ANALYZE idempotency.outbox, idempotency.lanes"))
        beside = [
            messages / _published(database, relay, messages)
            for _ in track(range(rounds), description=f"ordering: one key beside {BLOCKED} blocked rows")
        ]
    finally:
        relay.close()
    with database.connect() as connection:
        connection.execute(text("DELETE FROM idempotency.outbox WHERE task = 'blocked'"))
        connection.execute(text("DELETE FROM idempotency.lanes WHERE task = 'blocked'"))
    return Rates(alone, beside)


def _published(database: Engine, relay: Relay, messages: int) -> float:
    with Session(database.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
        for number in itertools.islice(_numbers, messages):
            jobs.unique.enqueue(session, number, ordering_key="bench")
    began = time.perf_counter()
    published = 0
    while published < messages:
        published += relay.run_once().published
    took = time.perf_counter() - began
    with jobs.app.connection_for_write() as connection:
        connection.default_channel.queue_purge("unique")
    return took
