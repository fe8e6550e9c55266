"""A message as it goes over the wire, and as the record and the outbox keep it: one text.

A record holds its whole delivery, so that recovery needs no message to survive; every later delivery is that
message under the same task id. Arguments stay the text that was sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import encoding

if TYPE_CHECKING:
    from celery import Celery


KEY_HEADER = "idempotency-key"
TENANT_HEADER = "idempotency-tenant"
# Set on deliveries of the outbox that repeat an earlier one (retry, recover, resend, replay): Redis' word does
# not acknowledge them, because they may be the only way on.
ORIGIN_HEADER = "idempotency-origin"
# How often a duplicate with on_busy="wait" has come back.
WAITS_HEADER = "idempotency-waits"
OUTBOX_HEADER = "idempotency-outbox-id"
# Names a marker: a message that only shows that what was in its queue before it has left.
MARKER_HEADER = "idempotency-marker"
# The generation of the record that this delivery is for: a copy from before a replay ends nothing after it.
GENERATION_HEADER = "idempotency-generation"
# Made where the call is made. A process that does not know the task can name the operation all the same.
FINGERPRINT_HEADER = "idempotency-fingerprint"
# How this message is to be read; a message without it is of version 1.
VERSION_HEADER = "idempotency-version"
MESSAGE_VERSION = 1
# Set by a worker instead of Celery's `eta`, which it would keep in its memory, by its own clock; never stored.
ETA_HEADER = "idempotency-eta"
# Set by a worker that was told to revoke this task id, on the way into its pool; never stored, never sent.
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
# What the relay writes onto one delivery; the message that is kept has none of it.
MARKS = (ORIGIN_HEADER, OUTBOX_HEADER, GENERATION_HEADER)
# The fields of a message's text, and what Python reads them as.
_FIELDS = {
    "headers": (dict, "an object"),
    "body": (str, "text"),
    "route": (dict, "an object"),
    "properties": (dict, "an object"),
}
_EMBEDDED = ("callbacks", "errbacks", "chain", "chord")
# A native delayed delivery arrives through this exchange, its delay spelled in bits before the real routing key.
_DELAY_EXCHANGE = "celery_delayed_"
_DELAY_BITS = 28


@dataclass(frozen=True, slots=True)
class Message:
    """One task message: what Celery's producer would send, and where to."""

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
        # the record's available_at decides when, never the broker
        fields = {name: value for name, value in wire.headers.items() if name not in ("eta", "expires")}
        return cls({**fields, **headers}, encoding.dumps(wire.body), route, properties)

    @classmethod
    def delivered(cls, request: Any) -> Message:
        """The message a worker was given, from Celery's request."""
        headers = {
            name: getattr(request, name) for name in _PROTOCOL_HEADERS if getattr(request, name, None) is not None
        }
        custom = {
            name: value
            for name, value in (request.headers or {}).items()
            if not name.startswith("x-") and name not in (*MARKS, REVOKED_HEADER, ETA_HEADER)
        }
        body = [request.args, request.kwargs, {name: getattr(request, name) for name in _EMBEDDED}]
        properties = {"correlation_id": request.id}
        delivery = request.delivery_info or {}
        if request.reply_to:
            properties["reply_to"] = request.reply_to
        if delivery.get("priority"):
            properties["priority"] = delivery["priority"]
        exchange, routing_key = delivery.get("exchange") or "", delivery.get("routing_key") or ""
        route = {"exchange": exchange, "routing_key": routing_key}
        if cls.was_delayed(exchange):
            route = {"delayed": ".".join(routing_key.split(".")[_DELAY_BITS:])}
        return cls({**headers, **custom}, encoding.dumps(body), route, properties)

    def routed(self, app: Celery, name: str, args: Any, kwargs: Any) -> Message:
        """The same message, for the queue to which the application routes this call."""
        return replace(self, route=_route(app, name, args, kwargs))

    @classmethod
    def from_text(cls, text: str) -> Message:
        """The message that was stored as this text. Raises `ValueError`, naming the field that is not as it must be."""
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
    def was_delayed(exchange: str | None) -> bool:
        """Whether the broker has kept a message's delay, by the exchange that it arrived through."""
        return (exchange or "").startswith(_DELAY_EXCHANGE)

    def to_text(self) -> str:
        return json.dumps(
            {"headers": self.headers, "properties": self.properties, "route": self.route, "body": self.body}
        )

    def marked(self, *, origin: str, outbox_id: str, generation: int = 1) -> Message:
        """The same message, saying which outbox row it comes from and which generation it delivers."""
        marks: dict[str, Any] = {OUTBOX_HEADER: outbox_id, GENERATION_HEADER: generation}
        if origin != "enqueue":
            marks[ORIGIN_HEADER] = origin
        return replace(self, headers=self.headers | marks)

    def destination(self, app: Celery) -> tuple[str, str]:
        """Exchange and routing key. Raises KeyError for a queue this application does not have, ValueError for none at all."""
        if (queue := self.route.get("queue")) is not None:
            known = app.amqp.queues[queue]
            return known.exchange.name, known.routing_key
        if (delayed := self.route.get("delayed")) is not None:
            for known in app.amqp.queues.values():
                if delayed in (known.routing_key, known.name):
                    return known.exchange.name, known.routing_key
            raise KeyError(delayed)
        if not {"exchange", "routing_key"} <= self.route.keys():
            raise ValueError("route: names neither a queue nor an exchange and a routing key")
        return self.route["exchange"], self.route["routing_key"]

    def queue(self, app: Celery) -> str:
        """The name of the queue this message goes to, as far as this application knows it."""
        if (queue := self.route.get("queue")) is not None:
            return str(queue)
        if (delayed := self.route.get("delayed")) is not None:
            return str(delayed)
        exchange, routing_key = self.route["exchange"], self.route["routing_key"]
        for known in app.amqp.queues.values():
            if (known.exchange.name, known.routing_key) == (exchange, routing_key):
                return str(known.name)
        return str(routing_key)


def _route(app: Celery, name: str, args: Any, kwargs: Any, queue: str | None = None) -> dict[str, Any]:
    routed = app.amqp.router.route({"queue": queue} if queue else {}, name, args, kwargs)
    target = routed.get("queue")
    if target is not None:
        return {"queue": getattr(target, "name", target)}
    return {"exchange": routed.get("exchange") or "", "routing_key": routed.get("routing_key") or ""}
