"""What waits, as gauges: asked of Postgres at each scrape, because it is the state of no process.

A scrape never fails and never hangs: while Postgres is away or slow, `idempotency_database_up` is 0 and the other
gauges are missing, which is not the same as zero.
"""

from __future__ import annotations

from collections.abc import Iterator

from celery import Celery
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from . import settings

# Prometheus gives up a scrape after 10 s by default. Seconds to connect, and for each of the two statements.
PATIENCE = 2

# Due rows only: a delay that was asked for is no backlog. A row that could not be published has moved its own time, so
# it counts from its beginning.
_OUTBOX = """
SELECT count(*) AS unpublished,
       coalesce(extract(epoch FROM clock_timestamp()
           - min(CASE WHEN attempts = 0 THEN available_at ELSE created_at END))::float8, 0) AS oldest
FROM idempotency.outbox
WHERE status = 'pending' AND (available_at <= clock_timestamp() OR attempts > 0)
  -- always true, and says which two indexes have them
  AND (ordering_key IS NULL OR ordering_key IS NOT NULL AND place IS NOT NULL)
"""

_LETTERS = """
SELECT coalesce(consumer_service, '-') AS service, reason, count(*) AS letters
FROM idempotency.dead_letters WHERE status = 'open' GROUP BY 1, 2 ORDER BY 1, 2
"""


class Backlog(Collector):
    """The backlog of the outbox and the open dead letters of one application's database."""

    def __init__(self, app: Celery) -> None:
        self._engine = create_engine(
            settings.from_app(app).database_url.get_secret_value(),
            poolclass=NullPool,
            hide_parameters=True,
            connect_args={"connect_timeout": PATIENCE, "options": f"-c statement_timeout={PATIENCE * 1000}"},
        )

    def describe(self) -> list[Metric]:
        """Nothing: else the registry would ask Postgres before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("idempotency_database_up", "Whether Postgres answered this scrape in time")
        try:
            with self._engine.connect() as connection:
                outbox = connection.exec_driver_sql(_OUTBOX).one()
                letters = connection.exec_driver_sql(_LETTERS).all()
        except DBAPIError:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        unpublished = GaugeMetricFamily("idempotency_outbox_unpublished", "Outbox rows that are due and not published")
        unpublished.add_metric([], outbox.unpublished)
        yield unpublished
        oldest = GaugeMetricFamily("idempotency_outbox_oldest_seconds", "How long the oldest of them has been due")
        oldest.add_metric([], max(outbox.oldest, 0.0))
        yield oldest
        open_letters = GaugeMetricFamily(
            "idempotency_dead_letters_open", "Dead letters that wait for a person", labels=["service", "reason"]
        )
        for row in letters:
            open_letters.add_metric([row.service, row.reason], row.letters)
        yield open_letters
