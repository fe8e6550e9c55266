"""The outbox: messages that leave with the caller's commit, and the relay that brings them to the broker.

A row is written in the transaction of the business change; it is published after that, and only marked once the
broker has confirmed that it holds the message. A crash in between publishes twice, which the record absorbs; it
never publishes nothing.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

from amqp.exceptions import AMQPError, ChannelError
from celery import Celery
from kombu import Connection as BrokerConnection
from kombu import Producer
from kombu.exceptions import KombuError
from sqlalchemy import Connection, Row, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from . import metrics
from .crash_points import crash_point
from .keys import OperationId
from .logs import log
from .message import Message
from .queues import dead_letter_queues
from .runtime import Runtime

# Rows leased per pass: enough to keep the broker busy, few enough that a killed relay delays little.
BATCH = 100
# How long a leased row is another relay's business; longer than a batch of confirms ever takes.
RELAY_LEASE = 60.0
# A broker that does not confirm within this time is treated as away.
CONFIRM_TIMEOUT = 10.0
# How often the relay looks when nothing wakes it.
POLL = 0.2
# An unroutable row backs off up to this, without end: its queue may come back.
BACKOFF_CAP = 60.0

_INSERT = text("""
INSERT INTO idempotency.outbox (event_id, tenant, operation, key, fingerprint, message, origin, available_at)
VALUES (:event_id, :tenant, :operation, :key, :fingerprint, :message, :origin,
        coalesce(cast(:eta AS timestamptz), clock_timestamp() + make_interval(secs => :countdown)))
""")

# MATERIALIZED: without it the planner may run the locking subquery once per row and lock more than the batch.
# By state, never by `id > last`: a row committed late by a slow transaction has a small id.
_LEASE_ROWS = """
WITH due AS MATERIALIZED (
    SELECT id FROM idempotency.outbox
    WHERE status = 'pending' AND available_at <= clock_timestamp()
      AND (relayed_until IS NULL OR relayed_until < clock_timestamp())
    ORDER BY available_at, id LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
)
UPDATE idempotency.outbox o
SET relayed_until = clock_timestamp() + make_interval(secs => %(lease)s)
FROM due WHERE o.id = due.id
RETURNING o.id, o.event_id, o.message, o.origin, o.attempts
"""

_MARK_PUBLISHED = """
UPDATE idempotency.outbox
SET status = 'published', published_at = clock_timestamp(), relayed_until = NULL, last_error = NULL
WHERE id = ANY(%(ids)s) AND status = 'pending'
"""

_RETURN_ROWS = "UPDATE idempotency.outbox SET relayed_until = NULL WHERE id = ANY(%(ids)s) AND status = 'pending'"

_NOTE_ERROR = """
UPDATE idempotency.outbox
SET relayed_until = NULL, last_error = %(error)s, attempts = attempts + 1,
    available_at = clock_timestamp() + make_interval(secs => %(delay)s)
WHERE id = %(id)s AND status = 'pending'
"""


def insert(
    session: Session | Connection,
    id: OperationId,
    fingerprint: str,
    message: Message,
    *,
    countdown: float = 0.0,
    eta: datetime | None = None,
    origin: str = "enqueue",
) -> str:
    """Write the row in the caller's transaction; it leaves with its commit. Returns the event id."""
    event_id = str(uuid4())
    session.execute(
        _INSERT,
        {
            "event_id": event_id,
            "tenant": id.tenant,
            "operation": id.operation,
            "key": id.key,
            "fingerprint": fingerprint,
            "message": message.to_text(),
            "eta": eta,
            "countdown": countdown,
            "origin": origin,
        },
    )
    return event_id


@dataclass(frozen=True, slots=True)
class Relayed:
    """What one pass of the relay did."""

    published: int
    failed: int
    broker_away: bool = False


class Relay:
    """Publishes committed rows, with confirms, one row at a time. Any number of relays at once."""

    def __init__(self, app: Celery, *, batch: int = BATCH, confirm_timeout: float = CONFIRM_TIMEOUT) -> None:
        self._app = app
        self._batch = batch
        self._confirm_timeout = confirm_timeout
        self._broker: BrokerConnection | None = None
        self._producer: Producer | None = None

    def run(self, stop: threading.Event, periodic: Callable[[], None] = lambda: None) -> None:
        """Relay until `stop` is set. `periodic` is called between passes: recovery must not depend on the broker."""
        pause = POLL
        while not stop.wait(pause):
            pause = POLL
            try:
                periodic()
                relayed = self.run_once()
                if relayed.broker_away:
                    pause = 1.0
                elif relayed.published == self._batch:
                    pause = 0.0
            except OperationalError as error:
                log.warning("postgres_unavailable", error=type(error.orig).__name__)
                pause = 1.0
            except Exception:  # a relay that dies on one surprise would stop every message
                log.exception("relay_pass_failed")
                pause = 1.0
        self.close()

    def run_once(self) -> Relayed:
        """Lease a batch in one commit, publish outside any transaction, mark exactly what was confirmed."""
        runtime = Runtime.of(self._app)
        with runtime.autocommit() as connection:
            rows = sorted(
                connection.exec_driver_sql(_LEASE_ROWS, {"batch": self._batch, "lease": RELAY_LEASE}),
                key=lambda row: row.id,
            )
        if not rows:
            return Relayed(0, 0)
        crash_point("relay.selected")
        confirmed: list[int] = []
        failed: list[tuple[Row[Any], str]] = []
        away = False
        try:
            for row in rows:
                try:
                    self._publish(row)
                    confirmed.append(row.id)
                except _MESSAGE_ERRORS as error:
                    # the row's own fault, or its queue's; the channel may owe us a late confirm, so it goes
                    self.close()
                    failed.append((row, f"{type(error).__name__}: {error}"[:300]))
        except _BROKER_ERRORS as error:
            self.close()
            away = True
            log.warning("broker_unavailable", error=type(error).__name__)
        except BaseException:
            self.close()
            raise
        finally:
            crash_point("relay.confirmed")
            self._mark(runtime, rows, confirmed, failed)
            crash_point("relay.marked")
        return Relayed(len(confirmed), len(failed), away)

    def close(self) -> None:
        """Close the channel and the connection; the next pass opens them anew."""
        producer, broker, self._producer, self._broker = self._producer, self._broker, None, None
        if broker is not None:
            del producer
            # A broker that hangs must not hang us: the socket goes without a handshake.
            broker.collect()

    def _publish(self, row: Row[Any]) -> None:
        message = Message.from_text(row.message).marked(origin=row.origin, outbox_id=row.event_id)
        producer = self._connect()
        exchange, routing_key = message.destination(self._app)
        producer.publish(
            message.body,
            exchange=exchange,
            routing_key=routing_key,
            headers=message.headers,
            content_type="application/json",
            content_encoding="utf-8",
            delivery_mode=2,
            mandatory=True,
            timeout=self._confirm_timeout,
            confirm_timeout=self._confirm_timeout,
            **message.properties,
        )
        crash_point("relay.published")

    def _connect(self) -> Producer:
        if self._producer is None:
            self._broker = self._app.connection_for_write(
                connect_timeout=5, transport_options=_with_confirms(self._app)
            )
            self._broker.connect()
            channel = self._broker.channel()
            queues = list(self._app.amqp.queues.values())
            for queue in [*dead_letter_queues(queues), *queues]:
                queue(channel).declare()
            self._producer = Producer(channel)
        return self._producer

    def _mark(
        self, runtime: Runtime, rows: list[Row[Any]], confirmed: list[int], failed: list[tuple[Row[Any], str]]
    ) -> None:
        settled = {*confirmed, *(row.id for row, _ in failed)}
        returned = [row.id for row in rows if row.id not in settled]
        with runtime.autocommit() as connection:
            if confirmed:
                connection.exec_driver_sql(_MARK_PUBLISHED, {"ids": confirmed})
                metrics.published.inc(len(confirmed))
            if returned:
                connection.exec_driver_sql(_RETURN_ROWS, {"ids": returned})
            for row, error in failed:
                delay = min(BACKOFF_CAP, 2.0 ** min(row.attempts, 10))
                connection.exec_driver_sql(_NOTE_ERROR, {"id": row.id, "error": error, "delay": delay})
                metrics.publish_errors.labels(error.partition(":")[0]).inc()
                log.error("publish_failed", outbox_id=row.event_id, error=error, retry_seconds=delay)


# NO_ROUTE comes back as a ChannelError; a queue that this application does not have as a KeyError.
_MESSAGE_ERRORS = (ChannelError, KeyError)
_BROKER_ERRORS = (AMQPError, KombuError, OSError, socket.timeout, TimeoutError, RuntimeError)


def _with_confirms(app: Celery) -> dict[str, Any]:
    return {**app.conf.broker_transport_options, "confirm_publish": True}
