"""From a dead message to the letter that is stored, and the operation that it was to deliver."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from celery import Celery
from kombu import Message as BrokerMessage

from ..application import runtime_of
from ..errors import CallRefused
from ..reasons import ALTERED, BEYOND_LIMIT, EXPIRED_EARLY, OF_MESSAGES, OTHER_CELL, UNHANDLED, UNSIGNED
from ..store import letters
from ..store.answers import error_text
from ..store.letters import BrokerLetter
from ..store.undelivered import UndeliveredMessage
from ..text import NAME_LIMIT, storable
from ..wire import keys
from ..wire.arriving import unreadable_bytes
from ..wire.fitness import is_time, time_of
from ..wire.headers import (
    FINGERPRINT_HEADER,
    GENERATION_HEADER,
    KEY_HEADER,
    MARKS,
    OUTBOX_HEADER,
    TENANT_HEADER,
    is_brokers,
)
from ..wire.keeping import kept_headers
from ..wire.keys import OperationId
from ..wire.message import Message, route_without_delay
from ..worker.task import IdempotentTask
from .death import Death, death_of
from .examine import Examined

# Messages without a visible defect: perhaps a worker of another version refused them.
PERHAPS_A_DEPLOY = (
    "rejected", "unknown_task", "unknown_version", "invalid_arguments", "missing_key", "invalid_key", "other_service",
)  # fmt: skip
# How far the clocks of who sends, of the broker and of the relay may be apart.
CLOCKS_APART = timedelta(minutes=1)
# The header that says that a body is not text and is stored as base64.
BODY_HEADER = "idempotency-body"
# Of a message beyond a limit, what is kept: bytes of its body, and headers of one value, cut.
BODY_KEPT = 64 * 1024
HEADERS_KEPT = 100
# The headers that say how long its body was, and what it was: lower-case hexadecimal.
LENGTH_HEADER, DIGEST_HEADER = "idempotency-body-bytes", "idempotency-body-sha256"
# The header that has the bytes of what could not be read, as base64: the message's properties, its exchange and its routing key.
UNREADABLE_HEADER = "idempotency-unreadable"
# Headers of that delivery alone; with its `expires`, a replay would be refused again.
_NOT_REPLAYED = (*MARKS, "compression", "eta", "expires")


def dead_of(
    app: Celery, message: BrokerMessage, examined: Examined, fingerprints: list[str], letter: BrokerLetter
) -> UndeliveredMessage | None:
    """The operation that a dead message names: by its task or, if the task is not known here, by its own headers."""
    id = examined.id
    if id is None and letter.reason in PERHAPS_A_DEPLOY:
        id, fingerprints = named_by_headers(app, message)
    if id is None or not fingerprints:
        return None
    generation = message.headers.get(GENERATION_HEADER)
    return UndeliveredMessage(
        id,
        letter.service,
        fingerprints[0],
        fingerprints[1:],
        message_id=letter.message_id,
        generation=generation if type(generation) is int else None,
        message=letter.payload,
        queue=letter.queue or "",
    )


def named_by_headers(app: Celery, message: BrokerMessage) -> tuple[OperationId | None, list[str]]:
    """The operation that newer code may have meant, which alone can read the body, and its fingerprint."""
    headers = message.headers
    given = headers.get(FINGERPRINT_HEADER)
    tenant = headers.get(TENANT_HEADER, runtime_of(app).settings.tenant)
    try:
        # the same rules hold for a fingerprint: short, printable
        fingerprints = [keys.check_key(given, field="fingerprint")]
        task = keys.check_key(headers.get("task"), field="task")
        id = OperationId(keys.check_key(tenant), task, keys.check_key(headers.get(KEY_HEADER)))
        runtime_of(app).settings.check_cell(id.tenant)  # what is of another cell is not for this database to end
    except CallRefused:
        return None, []  # not a message of ours
    if keys.fingerprint_version(given) is None or not body_of(message.body)[1]:
        return None, []
    return id, fingerprints


def letter_of(
    app: Celery,
    message: BrokerMessage,
    headers: Mapping[str, Any],
    reason: str,
    id: OperationId | None,
    detail: str | None = None,
) -> BrokerLetter:
    delivery, death = message.delivery_info or {}, death_of(message.headers)
    queue = death.queue or delivery.get("routing_key")
    raw = _raw(message.body)
    if reason == BEYOND_LIMIT:
        headers = _beginning(headers)
    own = {name: value for name, value in headers.items() if not is_brokers(name) and name not in _NOT_REPLAYED}
    body, is_text = body_of(raw[:BODY_KEPT] if reason == BEYOND_LIMIT else raw)
    # what names an operation, unless anyone may have written or copied it
    said = {} if reason in (UNSIGNED, ALTERED, EXPIRED_EARLY, BEYOND_LIMIT) else headers
    # a key without a tenant is of the default one, as a worker would have it
    tenant = said.get(TENANT_HEADER, runtime_of(app).settings.tenant if KEY_HEADER in said else None)
    properties = {"correlation_id": headers["id"]} if isinstance(headers.get("id"), str) else {}
    payload = Message(
        json.loads(letters.headers_text(kept_headers(own))), body, _route(app, death, delivery), properties
    )
    if id is not None:
        payload = payload.naming(id)
    stored = dict(headers) | {"content-type": message.content_type, "content-encoding": message.content_encoding}
    if not is_text:
        stored[BODY_HEADER] = "base64"
    if reason == BEYOND_LIMIT:
        stored |= {LENGTH_HEADER: len(raw), DIGEST_HEADER: hashlib.sha256(raw).hexdigest()}
    if unread := unreadable_bytes(message.properties, message.delivery_info):
        stored[UNREADABLE_HEADER] = {name: base64.b64encode(each).decode("ascii") for name, each in unread.items()}
    return BrokerLetter(
        message_id=shown(said.get(OUTBOX_HEADER)),
        tenant=id.tenant if id else shown(tenant),
        task=id.task if id else None,
        key=id.key if id else shown(said.get(KEY_HEADER)),
        generation=None,
        fingerprint=None,
        queue=shown(queue),
        header_task=shown(headers.get("task")),
        service=runtime_of(app).settings.service,
        reason=reason,
        first_error=None,
        last_error=error_text(reason, ": ".join(filter(None, [OF_MESSAGES[reason], detail and storable(detail)]))),
        attempts=0,
        headers=letters.headers_text(stored),
        payload=payload.to_text(),
        digest=_digest(headers, raw, queue),
    )


def was_allowed_to_expire(app: Celery, message: BrokerMessage) -> bool:
    """Whether this is a plain task's message that has expired in the broker (a tick of beat's, say): it may be dropped.

    Celery gives a message with `expires` a time to live in the broker, too. An accepted operation is never dropped.
    """
    task = app.tasks.get(name) if isinstance(name := message.headers.get("task"), str) else None
    is_plain = task is not None and not isinstance(task, IdempotentTask)
    return is_plain and death_of(message.headers).reason == "expired"


def has_expired_early(app: Celery, message: BrokerMessage) -> bool:
    """Whether messages are signed, and this one died of a time to live that its sender did not give it.

    AMQP's property `expiration` is not signed, nor is what the broker notes about a death: whoever can publish to a queue may
    have copied the message. Its operation is delivered by the original.
    """
    if not runtime_of(app).settings.message_secrets or death_of(message.headers).reason != "expired":
        return False
    if (expires := message.headers.get("expires")) is None:
        return True
    return is_time(expires, app.timezone) and time_of(expires, app.timezone) > datetime.now(UTC) + CLOCKS_APART


def reason_of(message: BrokerMessage, examined: Examined) -> str:
    death = death_of(message.headers).reason
    if examined.reason in (
        "other_service",
        "stale",
        EXPIRED_EARLY,
        OTHER_CELL,
        UNHANDLED,
        UNSIGNED,
        ALTERED,
        BEYOND_LIMIT,
    ):
        return examined.reason  # however it died, this application must not end what it names
    if death in ("delivery_limit", "maxlen"):
        return str(death)
    # the broker says "expired" of a message's time to live, `examine` of Celery's `expires`
    return examined.reason or ("expired" if death == "expired" else "rejected")


def _route(app: Celery, death: Death, delivery: Mapping[str, Any]) -> dict[str, Any]:
    """Where a replay goes: to the queue that the message died in, or to where that death says it had been published."""
    if death.queue is not None and death.queue in app.amqp.queues:
        return {"queue": death.queue}
    exchange, routing_key = death.exchange, death.routing_key
    if exchange is None or routing_key is None:
        exchange, routing_key = delivery.get("exchange"), delivery.get("routing_key")
    return route_without_delay(shown(exchange) or "", shown(routing_key) or "")


def body_of(body: Any) -> tuple[str, bool]:
    """The body as text, and whether it was text; otherwise it is base64."""
    raw = _raw(body)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return base64.b64encode(raw).decode("ascii"), False
    return text, True


def _raw(body: Any) -> bytes:
    return body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body or b"")


def _beginning(headers: Mapping[str, Any]) -> dict[str, Any]:
    """The first headers, of those that are text or numbers, each as long as a name may be."""
    plain = ((shown(name), value) for name, value in headers.items() if isinstance(value, str | int))
    kept = ((name or "", shown(value) if isinstance(value, str) else value) for name, value in plain)
    return dict(islice(kept, HEADERS_KEPT))


def _digest(headers: Mapping[str, Any], raw: bytes, queue: object) -> str:
    """Identifies a dead message when the broker delivers it again; headers that the broker adds do not count."""
    own = {name: value for name, value in headers.items() if not is_brokers(name)}
    head = json.dumps([own, queue], sort_keys=True, default=str)
    return hashlib.sha256(head.encode() + b"\0" + raw).hexdigest()


def shown(value: object) -> str | None:
    """A header as a column stores it: text of at most `NAME_LIMIT` characters."""
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
    return None if text is None else storable(str(text))[:NAME_LIMIT]


def refused(letter: BrokerLetter, generation: int, reason: str) -> BrokerLetter:
    error = error_text(reason, OF_MESSAGES[reason])
    return replace(letter, reason=reason, generation=generation, last_error=error)
