"""A task message as sent to the broker, and as the text stored with the record and in the outbox.

A record holds the whole message, so recovery does not depend on the broker; every later delivery is that message
under the same task id. Arguments are kept as the text that was sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArguments
from . import encoding
from .keys import OperationId
from .limits import beyond_limits

if TYPE_CHECKING:
    from celery import Celery


KEY_HEADER = "idempotency-key"
TENANT_HEADER = "idempotency-tenant"
# Set on outbox deliveries that repeat an earlier one (retry, recover, resend, replay). They are never acknowledged on
# the strength of a hint, because each may be the only delivery left.
ORIGIN_HEADER = "idempotency-origin"
# How often a duplicate with on_busy="wait" has come back.
WAITS_HEADER = "idempotency-waits"
OUTBOX_HEADER = "idempotency-outbox-id"
# The id of a marker: a message whose arrival shows that everything queued before it has left the queue.
MARKER_HEADER = "idempotency-marker"
# The record's generation that this delivery is for: a copy from before a replay must not end the replayed operation.
GENERATION_HEADER = "idempotency-generation"
# Computed by the caller, so that a process that does not know the task can still identify the operation.
FINGERPRINT_HEADER = "idempotency-fingerprint"
# The application that sent the message: its dead letter goes to that application, whichever relay finds it.
SERVICE_HEADER = "idempotency-service"
# The version of the message's format; 1 if missing.
VERSION_HEADER = "idempotency-version"
MESSAGE_VERSION = 1
# Replaces Celery's `eta`, with which a worker would hold the message in memory and use its own clock; never stored.
ETA_HEADER = "idempotency-eta"
# The same, kept over every later delivery for the body to see. It delays nothing: an outbox row knows when it is due.
DUE_HEADER = "idempotency-due"
# Who has published a message, and when: see `signing`. Made for each delivery; not part of the stored message.
SIGNATURE_HEADER = "idempotency-signature"
# Set on a call after a task that had headers which decide over its message: their names. The guard makes it a dead letter.
REFUSED_HEADER = "idempotency-refused"
# Set on the way into the pool by a worker in which this task id is revoked; never stored or sent.
REVOKED_HEADER = "idempotency-revoked"

# The fields of Celery's message protocol 2 that travel as headers (docs.celeryq.dev, "Message Protocol").
_PROTOCOL_HEADERS = (
    "lang",
    "task",
    "id",
    "shadow",
    "group",
    "group_index",
    "retries",
    "timelimit",
    "root_id",
    "parent_id",
    "argsrepr",
    "kwargsrepr",
    "origin",
    "ignore_result",
    "replaced_task_nesting",
    "stamped_headers",
    "stamps",
)
# Of Celery's message, the fields that decide what becomes of it; among the headers, each would replace Celery's own.
CELERYS_FIELDS = frozenset(
    ("task", "id", "eta", "expires", "retries", "timelimit", "group", "group_index", "root_id", "parent_id",
     "replaced_task_nesting")
)  # fmt: skip
_OURS = "idempotency-"
# Added by the relay to each delivery; not part of the stored message.
MARKS = (ORIGIN_HEADER, OUTBOX_HEADER, GENERATION_HEADER, SERVICE_HEADER, SIGNATURE_HEADER)
# Headers that the broker adds on a message's way; all others are its sender's.
_BROKERS_HEADERS = (
    "x-acquired-count", "x-death", "x-delivery-count", "x-first-death-", "x-last-death-", "x-opt-", "x-received-from",
    "x-shovelled", "x-stream-",
)  # fmt: skip
# The fields of a message's text and their types.
_FIELDS = {
    "headers": (dict, "an object"),
    "body": (str, "text"),
    "route": (dict, "an object"),
    "properties": (dict, "an object"),
}
_EMBEDDED = ("callbacks", "errbacks", "chain", "chord")
# The methods of Celery's `Context`, of which each header becomes an attribute.
_METHODS = ("as_execution_options", "clear", "get", "update", "_filter_x_death_headers", "_get_custom_headers")
# Where these are among the headers, a worker takes them for its own: no sender of Celery puts them there.
MISPLACED = (*_EMBEDDED, *_METHODS, "called_directly", "is_eager", "taskset")
# RabbitMQ gives a message to the routing keys in these headers, too, whatever its publisher has a right to.
COPIES = ("CC", "BCC")
# What a caller may not give as a header, and all that is read of Celery's where it is signed alone.
_REFUSED = CELERYS_FIELDS | frozenset((*MISPLACED, *COPIES))
_CELERYS = _REFUSED | frozenset(_PROTOCOL_HEADERS)
# A natively delayed message arrives through an exchange, and waits in queues, of such names; its routing key starts with the delay, one word per bit.
_DELAY_PLACE = "celery_delayed_"
_DELAY_BITS = 28


@dataclass(frozen=True, slots=True)
class Message:
    """One task message as Celery's producer would send it, and its route."""

    headers: dict[str, Any]
    body: str
    route: dict[str, Any]
    properties: dict[str, Any]

    @classmethod
    def composed(
        cls,
        app: Celery,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        task_id: str,
        headers: Mapping[str, Any],
        queue: str | None = None,
        priority: int | None = None,
        **options: Any,
    ) -> Message:
        """The message that `apply_async` would send for this call."""
        wire = app.amqp.as_task_v2(task_id, name, args, kwargs, **options)
        route = _route(app, name, args, kwargs, queue)
        properties: dict[str, Any] = {"correlation_id": task_id}
        if priority is not None:
            properties["priority"] = priority
        return cls({**_stored(wire.headers), **headers}, encoding.dumps(wire.body), route, properties)

    @classmethod
    def published(
        cls,
        body: Any,
        headers: Mapping[str, Any],
        *,
        correlation_id: str,
        exchange: str | None = None,
        routing_key: str | None = None,
        declare: Sequence[Any] | None = None,
        priority: int | None = None,
        **_: Any,
    ) -> Message:
        """The message that Celery hands to its producer with these options."""
        route = {"exchange": exchange or "", "routing_key": routing_key or ""}
        properties: dict[str, Any] = {"correlation_id": correlation_id}
        if priority is not None:
            properties["priority"] = priority
        if declare and (exchange, routing_key) in (("", declare[0].name), _place(declare[0])):
            route = {"queue": declare[0].name}
        return cls(_stored(headers), encoding.dumps(body), route, properties)

    @classmethod
    def delivered(cls, request: Any) -> Message:
        """The message that a worker received, rebuilt from Celery's request."""
        fields = vars(request)  # without Celery's defaults, for which a request has to be asked one by one
        headers = {
            name: value
            for name in _PROTOCOL_HEADERS
            if (value := fields[name] if name in fields else getattr(request, name, None)) is not None
        }
        custom = {
            name: value
            for name, value in (request.headers or {}).items()
            if not is_brokers(name) and name not in (*MARKS, REVOKED_HEADER, ETA_HEADER, *COPIES)
        }
        body = [request.args, request.kwargs, {name: getattr(request, name) for name in _EMBEDDED}]
        properties = {"correlation_id": request.id}
        delivery = request.delivery_info or {}
        if request.reply_to:
            properties["reply_to"] = request.reply_to
        if delivery.get("priority"):
            properties["priority"] = delivery["priority"]
        route = route_without_delay(delivery.get("exchange") or "", delivery.get("routing_key") or "")
        return cls({**custom, **headers}, encoding.dumps(body), route, properties)

    def routed(self, app: Celery, name: str, args: Any, kwargs: Any) -> Message:
        """The same message, addressed to the queue to which the application routes this call."""
        return replace(self, route=_route(app, name, args, kwargs))

    def naming(self, id: OperationId) -> Message:
        """The same message, with the operation that it is for in its headers."""
        headers = self.headers | {KEY_HEADER: id.key, TENANT_HEADER: id.tenant}
        return Message(headers, self.body, self.route, self.properties)

    @classmethod
    def from_text(cls, text: str) -> Message:
        """Read a stored message. Raises `ValueError`, which names the invalid field."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("not JSON") from None
        if not isinstance(fields, dict):
            raise ValueError("not an object")
        for name, (kind, called) in _FIELDS.items():
            if not isinstance(fields.get(name), kind):
                raise ValueError(f"{name}: must be {called}")
        for name, value in fields["route"].items():
            if not isinstance(value, bool if name == "mandatory" else str):
                raise ValueError(f"route.{name}: must be {'true or false' if name == 'mandatory' else 'text'}")
        return cls(fields["headers"], fields["body"], fields["route"], fields["properties"])

    @staticmethod
    def was_delayed(place: str | None) -> bool:
        """Whether the broker delayed a message, judging by the exchange it came through or the queue it was in."""
        return (place or "").startswith(_DELAY_PLACE)

    def to_text(self) -> str:
        fields = {"headers": self.headers, "properties": self.properties, "route": self.route, "body": self.body}
        return json.dumps(fields, default=str)  # AMQP has types that JSON lacks

    def marked(self, *, origin: str, outbox_id: str, generation: int = 1, service: str | None = None) -> Message:
        """The same message, marked with its outbox row, its generation and the application that sends it."""
        marks: dict[str, Any] = {OUTBOX_HEADER: outbox_id, GENERATION_HEADER: generation}
        if service is not None:
            marks[SERVICE_HEADER] = service
        if origin != "enqueue":
            marks[ORIGIN_HEADER] = origin
        return replace(self, headers=self.headers | marks)

    def destination(self, app: Celery) -> tuple[str, str]:
        """Exchange and routing key.

        Raises `KeyError` for a queue that this application does not have, `ValueError` without a route.
        """
        if (queue := self.route.get("queue")) is not None:
            # not by the name alone: Celery would make a missing queue, a classic one, and declare it from then on
            if queue not in app.amqp.queues:
                raise KeyError(queue)
            known = app.amqp.queues[queue]
            return known.exchange.name, known.routing_key
        if (delayed := self.route.get("delayed")) is not None:
            if (arrived := _bound(app, delayed)) is None:
                raise KeyError(delayed)
            # by a pattern: to the queue alone, because others may be bound to it, too
            return _place(arrived) if delayed in (arrived.routing_key, arrived.name) else ("", arrived.name)
        if not {"exchange", "routing_key"} <= self.route.keys():
            raise ValueError("route: must name a queue, or an exchange and a routing key")
        return self.route["exchange"], self.route["routing_key"]

    def queue(self, app: Celery) -> str:
        """The queue this message goes to, or its routing key if the application has no such queue."""
        if (queue := self.route.get("queue")) is not None:
            return str(queue)
        if (delayed := self.route.get("delayed")) is not None:
            found = _bound(app, delayed)
            return str(delayed if found is None else found.name)
        exchange, routing_key = self.route["exchange"], self.route["routing_key"]
        found = _bound(app, routing_key, exchange)
        return str(routing_key if found is None else found.name)


def _place(queue: Any) -> tuple[str, str]:
    return queue.exchange.name, queue.routing_key


def _bound(app: Celery, routing_key: str, exchange: str | None = None) -> Any:
    """The queue that a routing key leads to, through this exchange if one is given. A name or the key itself goes first."""
    queues = [each for each in app.amqp.queues.values() if exchange in (None, each.exchange.name)]
    for known in queues:
        if routing_key == known.routing_key or (exchange is None and routing_key == known.name):
            return known
    return next((known for known in queues if known.exchange.type == "topic" and _matches(known, routing_key)), None)


def _matches(queue: Any, routing_key: str) -> bool:
    """Whether a topic exchange gives a message with this key to a queue: `*` is one word, `#` any number of words."""
    words = (re.escape(word) for word in queue.routing_key.split("."))
    pattern = "".join({r"\*": r"\.[^.]+", r"\#": r"(\.[^.]+)*"}.get(word, rf"\.{word}") for word in words)
    return re.fullmatch(pattern, f".{routing_key}") is not None


def route_without_delay(exchange: str, routing_key: str) -> dict[str, Any]:
    """The route of a message that came by this exchange and key: the next time it does not wait in the broker again."""
    if Message.was_delayed(exchange):
        return {"delayed": ".".join(routing_key.split(".")[_DELAY_BITS:])}
    return {"exchange": exchange, "routing_key": routing_key}


def is_brokers(header: str) -> bool:
    """Whether the broker has added a header of this name, rather than the message's sender."""
    return header.startswith(_BROKERS_HEADERS)


def is_our_header(name: str) -> bool:
    """Whether a header of this name is one of ours."""
    return name.startswith(_OURS)


def refused_headers(given: Mapping[str, Any]) -> list[str]:
    """The names of those headers that no caller may give, because they decide what becomes of a message."""
    return sorted(_REFUSED & given.keys())


def senders_headers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of the headers that a caller gives, those that are its own; the key and the tenant, too, unless they came along.

    A body that passes its message's headers on, with a trace in them, means that. The key in them is its own operation's.
    Those of a message that a worker has received have a version. Raises `InvalidArguments` for a field of Celery's, and for
    more than a worker accepts.
    """
    if (beyond := beyond_limits(given, None, body_limit=0)) is not None:
        raise InvalidArguments(beyond)
    if fields := refused_headers(given):
        whose = "has RabbitMQ copy the message" if fields[0] in COPIES else "is a field of Celery's message"
        raise InvalidArguments(f"headers: {fields[0]!r} {whose}")
    return harmless_headers(given)


def harmless_headers(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same without the checks, and without what they refuse."""
    kept = () if VERSION_HEADER in given else (KEY_HEADER, TENANT_HEADER)
    others = {name: value for name, value in given.items() if name not in _REFUSED}
    return {
        name: value for name, value in others.items() if name in kept or not (is_our_header(name) or is_brokers(name))
    }


def all_headers(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message's headers together with those inside its header `headers`, where tracing tools put a copy of theirs.

    Celery's `request.headers` would be that header alone. Ours and Celery's are only read outside it, where they are signed.
    """
    nested = given.get("headers") or {}
    theirs = {name: value for name, value in nested.items() if not (is_our_header(name) or name in _CELERYS)}
    return {name: value for name, value in {**theirs, **given}.items() if name not in COPIES}


def _stored(headers: Mapping[str, Any]) -> dict[str, Any]:
    # available_at decides when, never the broker; and each delivery is signed anew
    return {name: value for name, value in headers.items() if name not in ("eta", "expires", SIGNATURE_HEADER)}


def _route(app: Celery, name: str, args: Any, kwargs: Any, queue: str | None = None) -> dict[str, Any]:
    routed = app.amqp.router.route({"queue": queue} if queue else {}, name, args, kwargs)
    target = routed.get("queue")
    if target is not None:
        return {"queue": getattr(target, "name", target)}
    return {"exchange": routed.get("exchange") or "", "routing_key": routed.get("routing_key") or ""}
