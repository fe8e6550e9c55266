"""Messages of which a part cannot be read: each is a dead letter that ends nothing, and the worker and the relay go on."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import amqp
from celery import Celery
from sqlalchemy import Connection

from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.letters.letter import UNREADABLE_HEADER
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import body_of, headers
from tests.support.processes import Worker, eventually

NOT_UTF8 = b"caf\xe9"
AS_KEPT = base64.b64encode(NOT_UTF8).decode()
ORDINARY = {"content_type": "application/json", "content_encoding": "utf-8", "correlation_id": "c1", "reply_to": ""}
NAMES = ("type", "content_type", "content_encoding", "correlation_id", "reply_to")


def messages() -> dict[str, amqp.Message]:
    """One for each property that is not UTF-8."""
    return {
        name: amqp.Message(body_of(name).encode(), **{**ORDINARY, "application_headers": headers(), name: NOT_UTF8})
        for name in NAMES
    }


def published(app: Celery, sent: amqp.Message, *, to: str | None = None, **place: Any) -> None:
    with app.connection_for_write() as broker:
        queue = app.amqp.queues[app.conf.task_default_queue]
        place = place or {"exchange": queue.exchange.name, "routing_key": queue.routing_key}
        broker.default_channel.basic_publish(sent, **({"routing_key": to} if to else place))


def kept(letter: Any) -> dict[str, str]:
    found: dict[str, str] = json.loads(letter.headers)[UNREADABLE_HEADER]
    return found


def says(letter: Any) -> str:
    return str(json.loads(letter.last_error)["message"])


def test_a_property_that_is_not_utf8_makes_a_letter_and_the_worker_lives(
    bank: Celery, worker: Worker, connection: Connection, entries: Callable[[str], int]
) -> None:
    consumer = DeadLetterConsumer(bank)
    consumer.run_once()
    for sent in messages().values():
        published(bank, sent)
    b.deposit.delay("after")
    eventually(lambda: entries("after") == 1, what="the worker goes on")
    eventually(lambda: consumer.run_once() or len(op.dead_letters(connection)) >= len(NAMES))
    consumer.close()
    letters = op.dead_letters(connection)
    assert {letter.reason for letter in letters} == {"undecodable"}
    assert [kept(letter) for letter in letters] == [{name: AS_KEPT} for name in NAMES]
    assert [says(letter).rpartition(": ")[0].rpartition(": ")[2] for letter in letters] == list(NAMES)
    assert worker.process.poll() is None
    assert all(entries(name) == 0 for name in NAMES)


def test_the_consumer_of_dead_letters_goes_on_after_what_it_cannot_read(bank: Celery, connection: Connection) -> None:
    """By a property, and by the routing key under which it was published; also if other producers publish there directly."""
    consumer = DeadLetterConsumer(bank)
    consumer.run_once()
    dead, exchange = f"{bank.conf.task_default_queue}-dead", "unread"
    (first, *_) = messages().values()
    published(bank, first, to=dead)
    with bank.connection_for_write() as broker:
        channel = broker.default_channel
        channel.exchange_declare(exchange, "fanout")
        channel.queue_bind(dead, exchange)
    published(
        bank,
        amqp.Message(body_of("a").encode(), **ORDINARY, application_headers=headers()),
        exchange=exchange,
        routing_key=NOT_UTF8,
    )
    published(
        bank, amqp.Message(body_of("b").encode(), **ORDINARY, application_headers=headers(task="unknown")), to=dead
    )
    eventually(lambda: consumer.run_once() or len(op.dead_letters(connection)) >= 3)
    consumer.close()
    with bank.connection_for_write() as broker:
        broker.default_channel.exchange_delete(exchange)
    by_type, by_key, ordinary = op.dead_letters(connection)
    assert (by_type.reason, kept(by_type)) == ("undecodable", {"type": AS_KEPT})
    assert (by_key.reason, kept(by_key)) == ("undecodable", {"routing_key": AS_KEPT})
    assert ordinary.reason == "unknown_task"
