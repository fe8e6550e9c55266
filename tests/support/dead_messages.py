"""Messages as a producer sends them, and as a worker rejects them into the dead-letter queue."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from itertools import repeat
from typing import Any
from uuid import uuid4

from celery import Celery
from kombu import Message as BrokerMessage
from sqlalchemy import Connection, text

from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.wire.headers import GENERATION_HEADER, OUTBOX_HEADER, SERVICE_HEADER
from idempotency.wire.message import Message
from tests.support import bank as b
from tests.support import operations as op
from tests.support.processes import eventually
from tests.support.tasks import enqueued

DEPOSIT = b.deposit.name
BODY = json.dumps([["a1"], {}, {}])


def body_of(account: str) -> str:
    """The body of a deposit's message."""
    return json.dumps([[account], {}, {}])


def headers(**changes: Any) -> dict[str, Any]:
    """What Celery's producer sends, changed; None leaves a header out."""
    sent = {"task": DEPOSIT, "id": str(uuid4()), "lang": "py", "argsrepr": "", "kwargsrepr": ""} | changes
    return {name: value for name, value in sent.items() if value is not None}


def unpublishable(connection: Connection, task: Any, **arguments: Any) -> Any:
    """The letter of an accepted operation whose row no broker takes."""
    enqueued(connection, task, **arguments)
    connection.execute(
        text("UPDATE idempotency.outbox SET status = 'failed', settled_at = now(), last_error = 'x', attempts = 1")
    )
    connection.execute(
        text("INSERT INTO idempotency.dead_letters (source, outbox_id, message_id, tenant, task, key, fingerprint, queue, header_task,"
             " consumer_service, reason, payload) SELECT 'relay', id, message_id, tenant, task, key, fingerprint, queue, task, service,"
             " 'unpublishable', message FROM idempotency.outbox")
    )  # fmt: skip
    (letter,) = op.dead_letters(connection)
    return letter


def dead(row: Any, queue: str) -> BrokerMessage:
    """The message of an outbox row as the broker's dead-letter queue has it."""
    message = Message.from_text(row.message)
    marks = {OUTBOX_HEADER: row.message_id, GENERATION_HEADER: row.generation, SERVICE_HEADER: row.service}
    return BrokerMessage(
        body=message.body,
        headers={**message.headers, **marks, "x-death": [{"queue": queue, "reason": "rejected"}]},
        content_type="application/json",
        content_encoding="utf-8",
        delivery_info={"routing_key": f"{queue}-dead", "exchange": ""},
        channel=None,
        properties={},
        delivery_tag="1",
        accept={"application/json"},
    )


def publish(app: Celery, body: str | bytes = BODY, *, queue: str | None = None, **options: Any) -> None:
    with app.connection_for_write() as broker:
        channel = broker.channel()
        known = app.amqp.queues[app.conf.task_default_queue]
        known(channel).declare()
        broker.Producer(channel).publish(
            body,
            exchange="" if queue else known.exchange.name,
            routing_key=queue or known.routing_key,
            **{"content_type": "application/json", "content_encoding": "utf-8", "headers": headers()} | options,
        )


def take(app: Celery) -> Any:
    """Take the first message of the application's queue away, as who may read it does."""
    name = app.conf.task_default_queue
    with app.connection_for_write() as broker:
        channel = broker.channel()
        app.amqp.queues[name](channel).declare()
        return eventually(lambda: channel.basic_get(name, no_ack=True), what="a message to take")


def die(app: Celery, consumer: DeadLetterConsumer, body: str = BODY, **options: Any) -> None:
    """Publish a message and reject it, as a worker does; it is in the dead-letter queue when this returns."""
    consumer.run_once()  # declares the queue
    reject(app, body, **options)


def reject(app: Celery, body: str = BODY, *, dead: int = 1, **options: Any) -> None:
    """Publish a message and reject it; returns when there are so many in the dead-letter queue."""
    publish(app, body, **options)
    with app.connection_for_write() as broker:
        channel = broker.channel()
        name = app.conf.task_default_queue
        message = eventually(lambda: channel.basic_get(name, no_ack=False))
        channel.basic_reject(message.delivery_tag, requeue=False)
        eventually(lambda: channel.queue_declare(f"{name}-dead", passive=True).message_count >= dead)


def bury(app: Celery, accounts: Collection[str], changes: Iterable[dict[str, Any]] = repeat({})) -> None:
    """Put messages into the dead-letter queue itself, as if a worker had rejected them; `changes` are their headers."""
    home = app.conf.task_default_queue
    death = {"x-death": [{"queue": home, "reason": "rejected"}]}
    with app.connection_for_write() as broker:
        channel = broker.channel()
        before = channel.queue_declare(f"{home}-dead", passive=True).message_count
        producer = broker.Producer(channel)
        for account, changed in zip(accounts, changes, strict=False):
            producer.publish(
                json.dumps([[account], {}, {}]),
                exchange="",
                routing_key=f"{home}-dead",
                content_type="application/json",
                content_encoding="utf-8",
                headers=headers() | death | changed,
            )
        eventually(lambda: waiting(app) >= before + len(accounts))


def waiting(app: Celery) -> int:
    """How many messages are ready in the dead-letter queue."""
    with app.connection_for_write() as broker:
        return int(broker.channel().queue_declare(f"{app.conf.task_default_queue}-dead", passive=True).message_count)
