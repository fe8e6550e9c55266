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

from . import encoding
from .headers import (
    COPIES,
    EMBEDDED,
    ETA_HEADER,
    GENERATION_HEADER,
    KEY_HEADER,
    MARKS,
    ORIGIN_HEADER,
    OUTBOX_HEADER,
    PROTOCOL_HEADERS,
    REVOKED_HEADER,
    SERVICE_HEADER,
    SIGNATURE_HEADER,
    TENANT_HEADER,
    is_brokers,
)
from .keeping import kept_headers
from .keys import OperationId

if TYPE_CHECKING:
    from celery import Celery


# The fields of a message's text and their types.
_FIELDS = {
    "headers": (dict, "an object"),
    "body": (str, "text"),
    "route": (dict, "an object"),
    "properties": (dict, "an object"),
}
# A natively delayed message arrives through an exchange, and waits in queues, of such names; its routing key starts with the
# delay, one word per bit.
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
            for name in PROTOCOL_HEADERS
            if (value := fields[name] if name in fields else getattr(request, name, None)) is not None
        }
        custom = {
            name: value
            for name, value in (request.headers or {}).items()
            if not is_brokers(name) and name not in (*MARKS, REVOKED_HEADER, ETA_HEADER, *COPIES)
        }
        body = [request.args, request.kwargs, {name: getattr(request, name) for name in EMBEDDED}]
        properties = {"correlation_id": request.id}
        delivery = request.delivery_info or {}
        if request.reply_to:
            properties["reply_to"] = request.reply_to
        if delivery.get("priority"):
            properties["priority"] = delivery["priority"]
        route = route_without_delay(delivery.get("exchange") or "", delivery.get("routing_key") or "")
        return cls(kept_headers({**custom, **headers}), encoding.dumps(body), route, properties)

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
    return next((known for known in queues if _takes(known, routing_key, exchange)), None)


def _takes(known: Any, routing_key: str, exchange: str | None) -> bool:
    if known.exchange.type == "fanout":
        return exchange is not None  # whatever the key; each of its queues gets a copy, any of which will do
    return known.exchange.type == "topic" and _matches(known, routing_key)


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


def _stored(headers: Mapping[str, Any]) -> dict[str, Any]:
    # available_at decides when, never the broker; and each delivery is signed anew
    return {name: value for name, value in headers.items() if name not in ("eta", "expires", SIGNATURE_HEADER)}


def _route(app: Celery, name: str, args: Any, kwargs: Any, queue: str | None = None) -> dict[str, Any]:
    routed = app.amqp.router.route({"queue": queue} if queue else {}, name, args, kwargs)
    target = routed.get("queue")
    if target is not None:
        return {"queue": getattr(target, "name", target)}
    return {"exchange": routed.get("exchange") or "", "routing_key": routed.get("routing_key") or ""}
