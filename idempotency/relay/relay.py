"""The relay: brings committed outbox rows to the broker, and marks exactly those it has confirmed.

Rows are reserved in one commit, published outside any transaction, and marked in a second. A crash in between publishes
twice, which the record absorbs; it never publishes nothing. Any number of relays at once.

Rows with an ordering key are reserved by lane, so one relay at a time publishes a lane, and many of its rows at once; what
comes behind the first row that the broker does not confirm goes again, after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

import psycopg
from celery import Celery
from sqlalchemy import Row
from sqlalchemy.exc import OperationalError

from ..application import runtime_of
from ..attempt.runtime import Runtime
from ..broker.publisher import Published, Publisher, Refusal
from ..errors import BrokerAway
from ..observe import metrics
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..store import outbox
from ..store.outbox import Lane
from ..wire.message import Message

# Rows reserved per pass: enough to keep confirms pipelined, few enough that a killed relay delays little.
BATCH = 200
# How long a reserved row is another relay's business; longer than a batch of confirms ever takes.
RESERVATION = 30.0
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
# A row that can never be published is tried this often, then becomes failed, with a dead letter.
OWN_ERRORS = 5


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
        """Reserve a batch in one commit, publish outside any transaction, mark exactly what was confirmed."""
        runtime = runtime_of(self._app)
        with runtime.autocommit() as connection:
            rows = outbox.reserve_rows(connection, batch=self._batch, seconds=RESERVATION)
            ordered = outbox.reserve_lanes(connection, batch=self._batch, seconds=RESERVATION)
        lanes: list[Lane] = list(dict.fromkeys((row.task, row.ordering_key) for row in ordered))
        rows += _runs(ordered)
        if not rows:
            with runtime.autocommit() as connection:
                outbox.refresh_lanes(connection, lanes)
            return Relayed(0, 0)
        crash_point("relay.selected")
        result = Published(
            lanes={row.message_id: (row.task, row.ordering_key) for row in rows if row.ordering_key is not None}
        )
        batch = []
        for row in rows:
            try:
                message = Message.from_text(row.message).marked(
                    origin=row.origin, outbox_id=row.message_id, generation=row.generation
                )
                batch.append((row.message_id, message))
            except Exception as error:  # whatever it is, it is of this row alone
                why = str(error) if isinstance(error, ValueError) else type(error).__name__
                result.refuse(row.message_id, Refusal(f"not a message: {why}"[:300], own=True))
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
        answered = {*result.confirmed, *result.refused}
        unanswered = [row for row in rows if row.message_id not in answered]
        sent = {row.message_id: row for row in rows}
        with runtime.autocommit() as connection:
            if result.confirmed:
                outbox.mark_published(connection, [sent[id] for id in result.confirmed])
                metrics.published.inc(len(result.confirmed))
                for queue, ids in self._unnamed(rows, result.confirmed).items():
                    outbox.name_queue(connection, ids, queue)
            if unanswered:
                outbox.give_back(connection, unanswered)
            for id, refusal in result.refused.items():
                row, attempts = sent[id], sent[id].attempts
                metrics.publish_errors.labels("own" if refusal.own else "unroutable").inc()
                if refusal.own and attempts + 1 >= OWN_ERRORS:
                    outbox.give_up(connection, row, refusal.error, service=runtime.settings.service)
                    log.error("outbox_row_failed", outbox_id=id, error=refusal.error)
                    continue
                if attempts + 1 >= outbox.STUCK:
                    metrics.stuck.inc()
                delay = min(BACKOFF_CAP, 2.0 ** min(attempts, 10))
                outbox.note_error(connection, row, refusal.error, delay=delay)
                log.error("publish_failed", outbox_id=id, error=refusal.error, retry_seconds=delay)

            outbox.refresh_lanes(connection, lanes)

    def _unnamed(self, rows: list[Row[Any]], confirmed: list[str]) -> dict[str, list[str]]:
        """The published rows that do not say their queue, by the queue they went to."""
        found: dict[str, list[str]] = {}
        if any(not row.queue for row in rows):
            published = set(confirmed)
            for row in rows:
                if not row.queue and row.message_id in published:
                    queue = Message.from_text(row.message).queue(self._app)
                    found.setdefault(queue, []).append(row.message_id)
        return found

    def _sleep(self, stop: threading.Event) -> None:
        """Wait for a NOTIFY, or for the poll; says so in the database, so that writers know whom to wake."""
        runtime = runtime_of(self._app)
        if self._ear is None or self._ear.closed:
            self._ear = runtime.listen("idempotency_outbox")
        with runtime.autocommit() as connection:
            outbox.sleep(connection, poll=POLL)
        # What was committed before we said that we sleep woke nobody: look once more before closing the eyes.
        if self.run_once().published or stop.is_set():
            return
        for _ in self._ear.notifies(timeout=POLL, stop_after=1):
            pass

    def _deafen(self) -> None:
        ear, self._ear = self._ear, None
        if ear is not None:
            ear.close()


def _runs(rows: Iterable[Row[Any]]) -> list[Row[Any]]:
    """Of each lane the rows that go now: up to the first that failed or is not due.

    A row that was refused before goes alone: those behind it are sent once it is through.
    """
    found = []
    for _, lane in groupby(rows, key=lambda row: (row.task, row.ordering_key)):
        run = list(takewhile(lambda row: row.goes, lane))
        found += run[:1] if run and run[0].attempts else run
    return found
