"""The relay: brings committed outbox rows to the broker, and marks exactly those it has confirmed.

Rows are leased in one commit, published outside any transaction, and marked in a second. A crash in between publishes
twice, which the record absorbs; it never publishes nothing. Any number of relays at once.

Rows with an ordering key are leased by lane, so one relay at a time publishes a lane, and many of its rows at once; what
comes behind the first row that the broker does not confirm goes again, after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

import psycopg
from celery import Celery
from sqlalchemy import Row
from sqlalchemy.exc import OperationalError

from . import metrics
from .crash_points import crash_point
from .logs import log
from .message import Message
from .outbox import Lane, refresh_lanes
from .publisher import BrokerAway, Published, Publisher, Refusal
from .runtime import Runtime

# Rows leased per pass: enough to keep confirms pipelined, few enough that a killed relay delays little.
BATCH = 200
# How long a leased row is another relay's business; longer than a batch of confirms ever takes.
RELAY_LEASE = 30.0
# A broker that does not confirm within this time is treated as away.
CONFIRM_TIMEOUT = 10.0
# The safety net behind LISTEN/NOTIFY.
POLL = 0.5
# After a pass that was not full the next rows gather for a moment: a pass costs the same for one row as for a hundred.
GATHER = 0.05
# How long to leave a broker or a Postgres alone that did not answer.
AWAY_PAUSE = 1.0
# An unroutable row backs off up to this, without end: its queue may come back.
BACKOFF_CAP = 60.0
# From this failed try on a row that the broker refuses is told about; it goes on being tried. The index outbox_stuck
# says the same number.
STUCK = 5
# A row that can never be published is tried this often, then becomes failed, with a dead letter.
OWN_ERRORS = 5

# Said by what it is not: for "= 'pending'" the planner takes the index of pending rows and reads through all the dead
# entries in it, instead of finding the row by its id.
_STILL_PENDING = "status NOT IN ('published', 'failed')"

# A crash of Postgres that undoes a lease or a mark has its rows published twice, so neither waits for the disk.
_UNFLUSHED = "set_config('synchronous_commit', 'off', true)"

# MATERIALIZED: without it the planner may run the locking subquery once per row and lock more than the batch.
# (SELECT clock_timestamp()): a volatile condition finds its rows by reading the whole index, delayed rows included.
# By state, never by `id > last`: a row committed late by a slow transaction has a small id.
_LEASE_ROWS = f"""
WITH due AS MATERIALIZED (
    SELECT id FROM idempotency.outbox
    WHERE status = 'pending' AND available_at <= (SELECT clock_timestamp()) AND ordering_key IS NULL
      AND (relayed_until IS NULL OR relayed_until < clock_timestamp())
    ORDER BY available_at, id LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
)
UPDATE idempotency.outbox o
SET relayed_until = clock_timestamp() + make_interval(secs => %(lease)s)
FROM due WHERE o.id = due.id
RETURNING o.id, o.event_id, o.message, o.origin, o.generation, o.refusals, o.resends, o.attempts, o.queue,
    NULL AS operation, NULL AS ordering_key, {_UNFLUSHED}
"""

# A lane is leased whole, and as much of each as makes one batch of all. A lane whose rows are gone has a row of NULLs.
_LEASE_LANES = f"""
WITH due AS MATERIALIZED (
    SELECT operation, ordering_key FROM idempotency.lanes
    WHERE NOT blocked AND available_at <= (SELECT clock_timestamp())
      AND (relayed_until IS NULL OR relayed_until < clock_timestamp())
    ORDER BY available_at LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
), lane AS (
    UPDATE idempotency.lanes l
    SET relayed_until = clock_timestamp() + make_interval(secs => %(lease)s)
    FROM due WHERE (l.operation, l.ordering_key) = (due.operation, due.ordering_key)
    RETURNING l.operation, l.ordering_key, {_UNFLUSHED}
)
SELECT lane.operation, lane.ordering_key, o.id, o.event_id, o.message, o.origin, o.generation, o.refusals, o.resends,
       o.attempts, o.queue, o.status = 'pending' AND o.available_at <= clock_timestamp() AS goes
FROM lane LEFT JOIN LATERAL (
    SELECT * FROM idempotency.outbox r
    WHERE r.operation = lane.operation AND r.ordering_key = lane.ordering_key
      AND r.status <> 'published' AND r.place IS NOT NULL
    ORDER BY r.place, r.id LIMIT greatest(%(batch)s / (SELECT count(*) FROM due), 1)
) o ON true
ORDER BY lane.operation, lane.ordering_key, o.place, o.id
"""

# The broker's answer is about the row as it was sent. One that was put back, sent again or replayed meanwhile is to be
# published once more: marked by a late answer, its next delivery would be nowhere.
_AS_SENT = f"""
FROM unnest(%(ids)s::text[], %(generations)s::int[], %(refusals)s::int[], %(resends)s::int[])
    AS sent(id, generation, refusals, resends)
WHERE o.event_id = sent.id AND (o.generation, o.refusals, o.resends) = (sent.generation, sent.refusals, sent.resends)
  AND o.{_STILL_PENDING}
"""

# Joined, and not "= ANY": so they are marked in the order in which they were sent.
_MARK_PUBLISHED = f"""
UPDATE idempotency.outbox o
SET status = 'published', published_at = clock_timestamp(), relayed_until = NULL, last_error = NULL
{_AS_SENT}
RETURNING {_UNFLUSHED}
"""

# Of deliveries whose writer did not know the application's routes: what their queue has lost is looked for by its name.
_NAME_QUEUE = "UPDATE idempotency.outbox SET queue = %(queue)s WHERE event_id = ANY(%(ids)s) AND queue = ''"

_RETURN_ROWS = f"UPDATE idempotency.outbox o SET relayed_until = NULL {_AS_SENT}"

_NOTE_ERROR = f"""
UPDATE idempotency.outbox o
SET relayed_until = NULL, last_error = %(error)s, attempts = attempts + 1,
    available_at = clock_timestamp() + make_interval(secs => %(delay)s)
{_AS_SENT}
"""

_GIVE_UP = f"""
WITH failed AS (
    UPDATE idempotency.outbox o
    SET status = 'failed', relayed_until = NULL, last_error = %(error)s, attempts = attempts + 1,
        settled_at = clock_timestamp()
    {_AS_SENT}
    RETURNING o.*
)
INSERT INTO idempotency.dead_letters
    (source, outbox_id, event_id, tenant, operation, key, fingerprint, queue, task, reason, first_error, last_error,
     attempts, payload, consumer_service)
SELECT 'relay', id, event_id, tenant, operation, key, fingerprint, queue, operation, 'unpublishable', last_error,
       last_error, attempts, message, %(service)s
FROM failed ON CONFLICT DO NOTHING
"""

_SLEEP = f"""
UPDATE idempotency.relay_sleep SET until = clock_timestamp() + make_interval(secs => %(poll)s) RETURNING {_UNFLUSHED}
"""


@dataclass(frozen=True, slots=True)
class Relayed:
    """What one pass of the relay did."""

    published: int
    failed: int
    broker_away: bool = False


class Relay:
    """`run()` around `run_once()`."""

    def __init__(self, app: Celery, *, batch: int = BATCH, confirm_timeout: float = CONFIRM_TIMEOUT) -> None:
        self._app = app
        self._batch = batch
        self.publisher = Publisher(app, confirm_timeout=confirm_timeout)
        self._ear: psycopg.Connection[Any] | None = None

    def run(self, stop: threading.Event, periodic: Callable[[], object] = lambda: None) -> None:
        """Relay until `stop` is set. `periodic` is called between passes: recovery must not depend on the broker."""
        while not stop.is_set():
            try:
                periodic()
                relayed = self.run_once()
                if relayed.broker_away:
                    stop.wait(AWAY_PAUSE)
                elif relayed.published == 0:
                    self._sleep(stop)
                elif relayed.published < self._batch:
                    stop.wait(GATHER)
            except (OperationalError, psycopg.OperationalError) as error:
                log.warning("postgres_unavailable", error=type(error).__name__)
                self._deafen()
                stop.wait(AWAY_PAUSE)
            except Exception:  # a relay that dies on one surprise would stop every message
                log.exception("relay_pass_failed")
                stop.wait(AWAY_PAUSE)
        self.close()

    def run_once(self) -> Relayed:
        """Lease a batch in one commit, publish outside any transaction, mark exactly what was confirmed."""
        runtime = Runtime.of(self._app)
        options = {"batch": self._batch, "lease": RELAY_LEASE}
        with runtime.autocommit() as connection:
            rows = sorted(connection.exec_driver_sql(_LEASE_ROWS, options), key=lambda row: row.id)
            ordered = connection.exec_driver_sql(_LEASE_LANES, options).all()
        lanes: list[Lane] = list(dict.fromkeys((row.operation, row.ordering_key) for row in ordered))
        rows += _runs(ordered)
        if not rows:
            with runtime.autocommit() as connection:
                refresh_lanes(connection, lanes)
            return Relayed(0, 0)
        crash_point("relay.selected")
        result = Published(
            lanes={row.event_id: (row.operation, row.ordering_key) for row in rows if row.ordering_key is not None}
        )
        batch = []
        for row in rows:
            try:
                message = Message.from_text(row.message).marked(
                    origin=row.origin, outbox_id=row.event_id, generation=row.generation
                )
                batch.append((row.event_id, message))
            except Exception as error:  # whatever it is, it is of this row alone
                why = str(error) if isinstance(error, ValueError) else type(error).__name__
                result.refuse(row.event_id, Refusal(f"not a message: {why}"[:300], own=True))
        away = False
        try:
            self.publisher.publish(batch, result)
        except BrokerAway as error:
            away = True
            log.warning("broker_unavailable", error=str(error))
        finally:
            crash_point("relay.confirmed")
            result.keep_order()
            self._mark(runtime, rows, result, lanes)
            crash_point("relay.marked")
        return Relayed(len(result.confirmed), len(result.refused), away)

    def close(self) -> None:
        """Close what is open; the next pass opens it anew."""
        self.publisher.close()
        self._deafen()

    def _mark(self, runtime: Runtime, rows: list[Row[Any]], result: Published, lanes: Iterable[Lane] = ()) -> None:
        settled = {*result.confirmed, *result.refused}
        returned = [row.event_id for row in rows if row.event_id not in settled]
        sent = {row.event_id: row for row in rows}
        with runtime.autocommit() as connection:
            if result.confirmed:
                connection.exec_driver_sql(_MARK_PUBLISHED, as_sent([sent[id] for id in result.confirmed]))
                metrics.published.inc(len(result.confirmed))
                for queue, ids in self._unnamed(rows, result.confirmed).items():
                    connection.exec_driver_sql(_NAME_QUEUE, {"queue": queue, "ids": ids})
            if returned:
                connection.exec_driver_sql(_RETURN_ROWS, as_sent([sent[id] for id in returned]))
            for id, refusal in result.refused.items():
                attempts, fields = sent[id].attempts, as_sent([sent[id]]) | {"error": refusal.error}
                metrics.publish_errors.labels("own" if refusal.own else "unroutable").inc()
                if refusal.own and attempts + 1 >= OWN_ERRORS:
                    connection.exec_driver_sql(_GIVE_UP, fields | {"service": runtime.settings.service})
                    log.error("outbox_row_failed", outbox_id=id, error=refusal.error)
                    continue
                if attempts + 1 >= STUCK:
                    metrics.stuck.inc()
                delay = min(BACKOFF_CAP, 2.0 ** min(attempts, 10))
                connection.exec_driver_sql(_NOTE_ERROR, fields | {"delay": delay})
                log.error("publish_failed", outbox_id=id, error=refusal.error, retry_seconds=delay)

            refresh_lanes(connection, lanes)

    def _unnamed(self, rows: list[Row[Any]], confirmed: list[str]) -> dict[str, list[str]]:
        """The published rows that do not say their queue, by the queue they went to."""
        found: dict[str, list[str]] = {}
        if any(not row.queue for row in rows):
            published = set(confirmed)
            for row in rows:
                if not row.queue and row.event_id in published:
                    queue = Message.from_text(row.message).queue(self._app)
                    found.setdefault(queue, []).append(row.event_id)
        return found

    def _sleep(self, stop: threading.Event) -> None:
        """Wait for a NOTIFY, or for the poll; says so in the database, so that writers know whom to wake."""
        runtime = Runtime.of(self._app)
        if self._ear is None or self._ear.closed:
            self._ear = runtime.listen("idempotency_outbox")
        with runtime.autocommit() as connection:
            connection.exec_driver_sql(_SLEEP, {"poll": POLL})
        # What was committed before we said that we sleep woke nobody: look once more before closing the eyes.
        if self.run_once().published or stop.is_set():
            return
        for _ in self._ear.notifies(timeout=POLL, stop_after=1):
            pass

    def _deafen(self) -> None:
        ear, self._ear = self._ear, None
        if ear is not None:
            ear.close()


def as_sent(rows: Sequence[Row[Any]]) -> dict[str, list[Any]]:
    """The parameters by which an answer of the broker is matched to the rows that were sent."""
    return {
        "ids": [row.event_id for row in rows],
        "generations": [row.generation for row in rows],
        "refusals": [row.refusals for row in rows],
        "resends": [row.resends for row in rows],
    }


def _runs(rows: Iterable[Row[Any]]) -> list[Row[Any]]:
    """Of each lane the rows that go now: up to the first that failed or is not due.

    A row that was refused before goes alone: those behind it are sent once it is through.
    """
    found = []
    for _, lane in groupby(rows, key=lambda row: (row.operation, row.ordering_key)):
        run = list(takewhile(lambda row: row.goes, lane))
        found += run[:1] if run and run[0].attempts else run
    return found
