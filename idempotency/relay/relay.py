"""The relay: publishes committed outbox rows and marks exactly those that the broker confirmed.

Rows are reserved in one commit, published outside any transaction, and marked in a second commit. A crash in between
publishes them twice, which the record absorbs; no row is ever skipped. Any number of relays may run.

Rows with an ordering key are reserved by lane: one relay at a time publishes a lane, many rows at once. The rows behind
the first unconfirmed one are published again after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

import psycopg
from celery import Celery
from sqlalchemy import Connection, Row
from sqlalchemy.exc import OperationalError

from ..application import runtime_of
from ..attempt.runtime import Runtime
from ..broker.batch import REFUSAL_LIMIT, Published, Refusal
from ..broker.publisher import CONFIRM_TIMEOUT, Publisher
from ..errors import BrokerUnavailable
from ..observe import metrics
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..observe.outages import Pauses
from ..observe.unreachable import reason
from ..store import outbox
from ..store.adoption import adopt
from ..store.outbox import Lane
from ..store.statements import is_news
from ..wire.message import Message
from ..worker.task import idempotent_tasks
from .tracing import trace_published

# Rows per pass: enough to pipeline confirms, few enough that a killed relay delays little.
BATCH = 200
# How long other relays leave a reserved row alone, in seconds: longer than a batch usually takes. If one takes longer, another
# relay publishes its rows as well, which the record absorbs.
RESERVATION = 30.0
# How long to wait for a NOTIFY before looking anyway.
POLL = 0.5
# After a partial batch, wait a moment for more rows: a pass costs the same for one row as for a hundred.
GATHER = 0.05
# How long to leave a broker alone after it did not answer, or anything after an unexpected error.
AWAY_PAUSE = 1.0
# The longest back-off of an unroutable row. It is retried forever, since its queue may come back.
BACKOFF_CAP = 60.0
# A row that is itself defective fails after this many tries, with a dead letter.
OWN_ERRORS = 5


@dataclass(frozen=True, slots=True)
class Relayed:
    """The result of one pass."""

    published: int
    # Most of them are tried again.
    refused: int
    broker_unavailable: bool = False


class Relay:
    """Publishes the outbox: `run()` calls `run_once()` until told to stop."""

    def __init__(self, app: Celery, *, batch: int = BATCH, confirm_timeout: float = CONFIRM_TIMEOUT) -> None:
        self._app = app
        self._batch = batch
        secrets = runtime_of(app).settings.message_secrets
        self.publisher = Publisher(app, confirm_timeout=confirm_timeout, secrets=secrets)
        self._listener: psycopg.Connection[Any] | None = None
        self._is_deaf = False  # behind a pooler there are no NOTIFYs

    def run(self, stop: threading.Event, periodic: Callable[[], object] = lambda: None) -> None:
        """Relay until `stop` is set. `periodic` is called between passes, whether or not the broker is available."""
        pauses = Pauses()
        while not stop.is_set():
            try:
                periodic()
                relayed = self.run_once()
                pauses.end()
                if relayed.broker_unavailable:
                    stop.wait(AWAY_PAUSE)
                elif relayed.published == 0:
                    self._wait_for_rows(stop)
                elif relayed.published < self._batch:
                    stop.wait(GATHER)
            except (OperationalError, psycopg.OperationalError) as error:
                if is_news(error):
                    log.warning("postgres_unavailable", error=reason(error))
                self._stop_listening()
                stop.wait(pauses.next())
            except Exception:  # an unexpected error must not stop all messages
                log.exception("relay_pass_failed")
                stop.wait(AWAY_PAUSE)
        self.close()

    def run_once(self) -> Relayed:
        """Reserve a batch of this application's rows, publish it outside any transaction, and mark what was confirmed."""
        runtime = runtime_of(self._app)
        service = runtime.settings.service
        with runtime.autocommit() as connection:
            tasks = [task.name for task in idempotent_tasks(self._app)]
            adopt(connection, service, tasks, self._app.amqp.queues)
            silent = self.publisher.unconfirming.left_alone()
            rows = outbox.reserve_rows(connection, service, batch=self._batch, seconds=RESERVATION, silent=silent)
            ordered = outbox.reserve_lanes(connection, service, batch=self._batch, seconds=RESERVATION, silent=silent)
        lanes: list[Lane] = list(dict.fromkeys((row.task, row.ordering_key) for row in ordered))
        rows += _publishable(ordered)
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
                    service=service, origin=row.origin, outbox_id=row.message_id, generation=row.generation
                )
                batch.append((row.message_id, message))
            except Exception as error:  # only this row is affected
                why = str(error) if isinstance(error, ValueError) else type(error).__name__
                result.refuse(row.message_id, Refusal(f"not a message: {why}"[:REFUSAL_LIMIT], own=True))
        unavailable, begun = False, time.time_ns()
        try:
            self.publisher.publish(batch, result)
        except BrokerUnavailable as error:
            unavailable = True
            log.warning("broker_unavailable", error=str(error))
        finally:
            crash_point("relay.confirmed")
            result.keep_order()
            self._mark(runtime, rows, result, lanes)
            if (traces := runtime.traces) is not None:
                times = begun, time.time_ns()
                traces.safely(lambda: trace_published(traces, self._app, batch, result, times), None)
            crash_point("relay.marked")
        return Relayed(len(result.confirmed), len(result.refused), unavailable)

    def close(self) -> None:
        """Close all connections; the next pass opens new ones."""
        self.publisher.close()
        self._stop_listening()

    def _mark(self, runtime: Runtime, rows: list[Row[Any]], result: Published, lanes: Iterable[Lane] = ()) -> None:
        answered = {*result.confirmed, *result.refused}
        unanswered = [row for row in rows if row.message_id not in answered]
        sent = {row.message_id: row for row in rows}
        with runtime.autocommit() as connection:
            if result.confirmed:
                # before they are marked: one that is published and has no queue's name is never missed
                confirmed = set(result.confirmed)
                self._name_queues(connection, [row for row in rows if not row.queue and row.message_id in confirmed])
                outbox.mark_published(connection, [sent[id] for id in result.confirmed])
                metrics.published.inc(len(result.confirmed))
            if unanswered:
                # by which they are left out of the next batch
                held = result.held
                self._name_queues(connection, [row for row in rows if row.queue != held.get(row.message_id, row.queue)])
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

    def _name_queues(self, connection: Connection, rows: list[Row[Any]]) -> None:
        """Give rows the name of the queue that they go to."""
        found: dict[str, list[str]] = {}
        for row in rows:
            found.setdefault(Message.from_text(row.message).queue(self._app), []).append(row.message_id)
        for queue, ids in found.items():
            outbox.name_queue(connection, ids, queue)

    def _wait_for_rows(self, stop: threading.Event) -> None:
        """Wait for a NOTIFY or the poll interval. Writers notify only while a relay is marked as sleeping."""
        runtime = runtime_of(self._app)
        if not self._is_deaf and (self._listener is None or self._listener.closed):
            self._listener = runtime.listen("idempotency_outbox")
            self._is_deaf = self._listener is None
        if self._listener is None:
            stop.wait(POLL)
            return
        with runtime.autocommit() as connection:
            outbox.sleep(connection, poll=POLL)
        # Rows committed before that mark sent no NOTIFY: check again before waiting.
        if self.run_once().published or stop.is_set():
            return
        for _ in self._listener.notifies(timeout=POLL, stop_after=1):
            pass

    def _stop_listening(self) -> None:
        listener, self._listener, self._is_deaf = self._listener, None, False
        if listener is not None:
            listener.close()


def _publishable(rows: Iterable[Row[Any]]) -> list[Row[Any]]:
    """The rows of each lane that may be published now: up to the first that failed or is not due.

    A row that was refused before is published alone; those behind it follow once it is confirmed.
    """
    found = []
    for _, lane in groupby(rows, key=lambda row: (row.task, row.ordering_key)):
        run = list(takewhile(lambda row: row.goes, lane))
        found += run[:1] if run and run[0].attempts else run
    return found
