"""One pass of resend with a million published operations waiting in their queue; SQL creates the rows."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency.broker.publisher import CONFIRM_TIMEOUT, Publisher
from idempotency.relay.resend import resend_lost

from . import jobs

WAITING = 1_000_000
_COPY = """
INSERT INTO idempotency.outbox
    (message_id, tenant, task, key, fingerprint, message, queue, origin, status, published_at, service)
SELECT 'waiting ' || n, tenant, task, 'waiting ' || n, fingerprint, message, queue, origin, 'published',
       clock_timestamp() - interval '1 hour', service
FROM idempotency.outbox, generate_series(:first, :last) n WHERE key = :key
"""
BATCH = 100_000


@dataclass(frozen=True)
class Passes:
    """Milliseconds."""

    waiting: list[float]
    after_a_wipe: list[float]
    resent: int


def measure(database: Engine, *, rounds: int, waiting: int = WAITING) -> Passes:
    """Time a pass while one message is in the queue, so all rows wait; then with an empty queue, so rows are resent."""
    with Session(database.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
        key = jobs.unique.enqueue(session, 30_000_000).id.key
    with database.connect() as connection:
        for first in range(1, waiting + 1, BATCH):
            last = min(first + BATCH - 1, waiting)
            connection.execute(text(_COPY), {"first": first, "last": last, "key": key})
        connection.execute(text("DELETE FROM idempotency.outbox WHERE key = :key"), {"key": key})
        connection.execute(text("VACUUM ANALYZE idempotency.outbox"))
    jobs.unique.delay(30_000_001)  # so that the queue is not empty
    publisher = Publisher(jobs.app, confirm_timeout=CONFIRM_TIMEOUT)
    try:
        _pass(publisher, expected=0)  # opens connections that a relay already has
        passes = [_pass(publisher, expected=0)[0] for _ in range(rounds)]
        with jobs.app.connection_for_write() as connection:
            connection.default_channel.queue_purge("unique")
        wiped, resent = _pass(publisher)
    finally:
        publisher.close()
    with database.connect() as connection:
        connection.execute(text("TRUNCATE idempotency.outbox"))
    return Passes(passes, [wiped], resent)


def _pass(publisher: Publisher, expected: int | None = None) -> tuple[float, int]:
    began = time.perf_counter()
    resent = resend_lost(jobs.app, publisher=publisher).resent
    took = 1e3 * (time.perf_counter() - began)
    if expected is not None and resent != expected:
        raise RuntimeError(f"{resent} operations were resent although none was lost")
    return took, resent
