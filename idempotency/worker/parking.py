"""Deliveries that are early or got no answer wait in the outbox, not in a worker's slot."""

from __future__ import annotations

import json
from datetime import datetime
from uuid import NAMESPACE_OID, uuid5

from celery import Celery
from celery.exceptions import Ignore, Reject
from kombu.utils.uuid import uuid
from sqlalchemy import Connection

from ..application import runtime_of
from ..broker.batch import Published
from ..broker.publisher import Publisher
from ..observe import metrics
from ..observe.logs import log
from ..settings import Settings
from ..store import claims, clock, outbox
from ..wire.delivery import Delivery
from ..wire.headers import ORIGIN_HEADER, OUTBOX_HEADER, WAITS_HEADER
from ..wire.message import Message
from .waiting import is_stopping

# Seconds in the outbox for a delivery that got no answer although Postgres accepts it there: a person must repair that.
PUT_BACK = 60.0
# A duplicate comes back no more often than this, which takes 68 years; a message may claim any number.
MOST_WAITS = 32
# Seconds to wait for the confirm of a copy; the hard time limit may be near.
CONFIRM_TIMEOUT = 5.0


def park_if_early(connection: Connection, delivery: Delivery, settings: Settings) -> bool:
    """Park a delivery whose time has not come by the database's clock. False: it has come, or there is none.

    It is no late copy: the age of a signed message counts from its time. One that is revoked ends now: no worker remembers that
    until its time.
    """
    if delivery.eta is None or delivery.is_revoked or clock.has_come(connection, delivery.eta):
        return False
    _park(connection, delivery, Message.from_text(delivery.message), settings.service, eta=delivery.eta)
    return True


def park_under_its_key(connection: Connection, delivery: Delivery, settings: Settings) -> bool:
    """Let a message come back with its key in its header, the same one for all deliveries of this message.

    The first delivery of a message decides: its row has an id made from the message. Another one may have its task id.
    False: it is stale, as its claim will say, or revoked.
    """
    if delivery.is_revoked or _is_stale(connection, delivery, settings):
        return False
    message = Message.from_text(delivery.message)
    same = json.dumps([delivery.id.tenant, delivery.id.task, delivery.task_id, message.body])
    id = str(uuid5(NAMESPACE_OID, same))
    _park(connection, delivery, message, settings.service, eta=delivery.eta, message_id=id)
    return True


def park_until_held_no_more(connection: Connection, delivery: Delivery, settings: Settings) -> None:
    """Let a duplicate come back for the result after 0.5, 1, 2, … seconds, for about `wait` seconds in all."""
    waits = delivery.number(WAITS_HEADER, 0)
    if waits < MOST_WAITS and 0.5 * (2**waits - 1) < settings.wait:
        message = Message.from_text(delivery.message)
        message.headers[WAITS_HEADER] = waits + 1
        _park(connection, delivery, message, settings.service, countdown=0.5 * 2**waits)


def put_back(app: Celery, delivery: Delivery) -> Ignore | Reject:
    """Keep the message of a delivery that has waited long enough for an answer. Returns what to raise to Celery.

    The outbox keeps it if Postgres accepts that; otherwise the broker does, as a confirmed copy at the end of its queue.
    A message that is just requeued comes back at once, and its delivery limit counts that; only a worker that shuts
    down, or has lost the broker, does so.
    """
    to, message = "queue", Message.from_text(delivery.message)
    if not is_stopping():
        to = "outbox" if _parked(app, delivery, message) else "copy" if _copied(app, delivery, message) else to
    metrics.put_back.labels(delivery.id.task, to).inc()
    log.warning("put_back", task=delivery.id.task, key=delivery.id.key, to=to)
    return Reject("no answer", requeue=True) if to == "queue" else Ignore()


def _is_stale(connection: Connection, delivery: Delivery, settings: Settings) -> bool:
    """Whether a delivery may be a late copy: in the outbox it would look like a new one, and be signed as one."""
    if delivery.signed_at is None:
        return False
    return claims.is_stale(connection, delivery.id, signed_at=delivery.signed_at, horizon=settings.redelivery_horizon)


def _park(
    connection: Connection,
    delivery: Delivery,
    message: Message,
    service: str,
    *,
    countdown: float = 0.0,
    eta: datetime | None = None,
    message_id: str | None = None,
) -> None:
    """Write the next delivery of this message to the outbox: the relay sends it when it is due."""
    outbox.insert(
        connection,
        delivery.id,
        delivery.fingerprint,
        message,
        service=service,
        queue=delivery.queue,
        countdown=countdown,
        eta=eta,
        origin="retry",
        generation=delivery.generation,
        message_id=message_id,
    )


def _parked(app: Celery, delivery: Delivery, message: Message) -> bool:
    try:
        runtime = runtime_of(app)
        with runtime.autocommit(delivery.id.tenant) as connection:
            if _is_stale(connection, delivery, runtime.settings):
                return False
            _park(connection, delivery, message, runtime.settings.service, countdown=PUT_BACK, eta=delivery.eta)
    except Exception as error:
        log.warning("not_parked", task=delivery.id.task, key=delivery.id.key, error=type(error).__name__)
        return False
    return True


def _copied(app: Celery, delivery: Delivery, message: Message) -> bool:
    id = str(delivery.headers.get(OUTBOX_HEADER) or uuid())
    message = message.marked(
        service=runtime_of(app).settings.service,
        origin=delivery.headers.get(ORIGIN_HEADER) or "retry",
        outbox_id=id,
        generation=delivery.generation,
    )
    if delivery.eta is not None:
        message.headers["eta"] = delivery.eta.isoformat()
    secrets, first = runtime_of(app).settings.message_secrets, delivery.signed_at
    publisher = Publisher(app, confirm_timeout=CONFIRM_TIMEOUT, secrets=secrets, first_published=first)
    published = Published()
    try:
        publisher.publish([(id, message)], published)
    except Exception as error:
        log.warning("not_copied", task=delivery.id.task, key=delivery.id.key, error=type(error).__name__)
        return False
    finally:
        publisher.close()
    return bool(published.confirmed)
