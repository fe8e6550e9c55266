"""The backlog and the processes of one application, from Postgres (`store/overview.py`) and from the broker's queues."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from typing import Any

import redis
from amqp.exceptions import ChannelError
from celery import Celery
from kombu import Connection as BrokerConnection
from sqlalchemy import Connection

from ..broker.connections import BROKER_ERRORS, connect
from ..settings import Settings
from ..store import overview
from ..store.overview import TIMEOUT, QueueState, Snapshot
from .started import start_of


def take_snapshot(connection: Connection, app: Celery, settings: Settings) -> Snapshot:
    """Take a snapshot from Postgres and the broker. If the broker is unavailable, its part is unknown."""
    found = overview.take_snapshot(connection, settings)
    ask_broker(app, settings, found)
    return found


def ask_broker(app: Celery, settings: Settings, found: Snapshot) -> None:
    """Ask for the ready messages and the consumers of each queue that the application declares."""
    for name in app.amqp.queues:
        found.queue(name)
    deadline = time.monotonic() + 2 * TIMEOUT
    try:
        broker = connect(app.connection_for_read, partial(_bound, app), connect_timeout=TIMEOUT)
        with broker:
            is_amqp = broker.transport.driver_type == "amqp"
            try:
                for name in app.amqp.queues:
                    if time.monotonic() > deadline:
                        return
                    _ask_about(broker, name, found.queue(name))
            finally:
                broker.collect()  # no closing handshake, with which a hung broker would hang us
            if not is_amqp:  # Redis has no consumers; count the workers that have signed
                for name in app.amqp.queues:
                    found.queue(name).consumers = sum(
                        process.kind == "worker"
                        and name in process.queues
                        and process.silent_seconds <= settings.alarm_silence
                        for process in found.processes
                    )
    except (*BROKER_ERRORS, redis.RedisError):
        return
    found.broker_answered = True


def _bound(app: Celery, broker: BrokerConnection) -> None:
    is_amqp = broker.transport.driver_type == "amqp"
    names = ("read_timeout", "write_timeout") if is_amqp else ("socket_timeout", "socket_connect_timeout")
    broker.transport_options = {**app.conf.broker_transport_options, **dict.fromkeys(names, TIMEOUT)}


def _ask_about(broker: BrokerConnection, name: str, state: QueueState) -> None:
    channel = broker.channel()
    try:
        answer = channel.queue_declare(name, passive=True)
        state.ready, state.consumers = int(answer.message_count), int(answer.consumer_count)
    except ChannelError as error:
        # for a queue whose host is down, RabbitMQ also answers "not found", with another text
        if "no queue" in str(error).lower():
            state.ready = state.consumers = 0
    finally:
        if getattr(channel, "is_open", True):
            channel.close()


def status(connection: Connection, app: Celery, settings: Settings) -> dict[str, Any]:
    """Queues, processes, operations by task and status, the outbox and open dead letters, as one document.

    `operations_are_estimated`: there are so many that completed and failed ones are extrapolated from a sample.
    """
    found = take_snapshot(connection, app, settings)
    ended, percent = overview.ended(connection, settings.service)
    for row in ended:
        found.count(row.task, row.status, round(row.operations * 100 / percent))
    letters: dict[tuple[str | None, str], int] = {}
    for row in found.letters:
        letters[row.task, row.reason] = letters.get((row.task, row.reason), 0) + row.letters
    return {
        "queues": {name: asdict(state) for name, state in sorted(found.queues.items())},
        "broker_answered": found.broker_answered,
        "relay_is_running": found.has_relay(settings.alarm_silence),
        "processes": [
            row._asdict() | {"is_silent": row.silent_seconds > settings.alarm_silence, "start": start_of(row)}
            for row in found.processes
        ],
        "service": settings.service,
        "other_services": [row._asdict() for row in found.sharers],
        "operations": dict(sorted(found.operations.items())),
        "operations_are_estimated": percent < 100.0,
        "oldest_seconds": {"started": found.oldest_started, "released": found.oldest_released},
        "lease_over": sum(state.lease_over for state in found.queues.values()),
        "unknown_effects": found.unknown_effects,
        "outbox": {
            "pending": found.outbox.pending,
            "due": found.outbox.unpublished,
            "oldest_due_seconds": found.outbox.oldest,
            "failed": found.outbox.failed,
        },
        "dead_letters": {
            "open": sum(letters.values()),
            "archived": found.archived.letters,
            "oldest_archived_seconds": found.archived.oldest,
            "by_reason": [
                {"task": task, "reason": reason, "letters": number} for (task, reason), number in letters.items()
            ],
        },
    }
