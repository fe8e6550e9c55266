"""Events: what has happened, told to every consumer that subscribed, once each.

`publish` writes one outbox row per consumer in the caller's transaction, so from there an event is a task: keyed by
(consumer, event id), kept until it is handled, sent again when the broker is wiped. The attributes are those of
CloudEvents 1.0 (cloudevents.io).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakSet

from celery import Celery, current_app
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from .application import runtime_of
from .errors import InvalidArguments, SettingsError
from .store import outbox
from .wire import keys
from .wire.keys import OperationId
from .wire.message import Message
from .worker.task import IdempotentTask

# The operation under which an event for listeners outside is kept; it has no record of its own.
EXTERNAL = "idempotency.external_event"


@dataclass(frozen=True, slots=True)
class Subscription:
    """One consumer's interest: patterns over event types, and the task that handles them."""

    patterns: tuple[str, ...]
    consumer: str
    task: Any

    def matches(self, event_type: str) -> bool:
        return any(fnmatchcase(event_type, pattern) for pattern in self.patterns)


_subscriptions: WeakKeyDictionary[Celery, list[Subscription]] = WeakKeyDictionary()


_imported: WeakSet[Celery] = WeakSet()


def _subscriptions_of(application: Celery) -> list[Subscription]:
    # What `include` names is imported by workers alone; a consumer whose module was not would miss the event.
    if application not in _imported:
        application.loader.import_default_modules()
        _imported.add(application)
    return _subscriptions.get(application, [])


def subscribe(
    *patterns: str, consumer: str, app: Celery | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Handle events: `@subscribe("order.*", consumer="ledger")` over `def handle(self, event): ...`.

    The function becomes an idempotent task named `consumer.function`, keyed by the event's id, with `options` as in
    `@app.task`. Each of `patterns` is matched like a file name (`*` and `?`). Its module belongs into the application's
    `include`, or into every process that publishes: `publish` writes a row for each consumer it knows. Raises
    `SettingsError` without a pattern, and for a consumer that subscribes twice under one function name.
    """
    application = app or current_app._get_current_object()
    keys.check_key(consumer, field="consumer")
    if not patterns:
        raise SettingsError(f"subscribe: {consumer!r} names no event type")

    def register(function: Callable[..., Any]) -> Any:
        name = f"{consumer}.{function.__name__}"
        if name in application.tasks:
            raise SettingsError(f"subscribe: there is a task {name!r} already")
        # not shared: other applications of this process have not subscribed
        task = application.task(base=IdempotentTask, bind=True, name=name, shared=False, **options)(function)
        _subscriptions.setdefault(application, []).append(Subscription(patterns, consumer, task))
        return task

    return register


def publish(
    session: Session | Connection,
    event_type: str,
    payload: Any,
    *,
    ordering_key: str | None = None,
    source: str | None = None,
    tenant: str | None = None,
    exchange: str | None = None,
    app: Celery | None = None,
) -> str:
    """Tell every subscribed consumer about an event; leaves with the caller's commit. Returns the event's id.

    Events of one `ordering_key` are published in commit order, per consumer; one that cannot be published holds back
    its key until a person replays or discards it. `exchange` names a topic exchange that gets the event too, for
    consumers outside: at least once, in CloudEvents' binary mode, with the event type as routing key. Raises
    `InvalidKey` and `InvalidArguments`; then nothing was written.
    """
    application = app or current_app._get_current_object()
    keys.check_key(event_type, field="event_type")
    if ordering_key is not None:
        keys.check_key(ordering_key, field="ordering_key")
    event_id = str(uuid4())
    attributes = {
        "specversion": "1.0",
        "id": event_id,
        "source": source or f"/{application.main or 'celery'}",
        "type": event_type,
        "time": datetime.now(UTC).isoformat(),
        "datacontenttype": "application/json",
    }
    data = json.loads(keys.canonical_json({"data": payload}))["data"]
    settings = runtime_of(application).settings
    if (size := len(json.dumps(data))) > settings.arguments_limit:
        raise InvalidArguments(f"payload: at most {settings.arguments_limit} bytes as JSON, got {size}")
    for subscription in _subscriptions_of(application):
        if subscription.matches(event_type):
            event = {**attributes, "data": data}
            subscription.task.enqueue(
                session, event, idempotency_key=event_id, ordering_key=ordering_key, tenant=tenant
            )
    if exchange is not None:
        headers = {f"cloudEvents:{name}": value for name, value in attributes.items() if name != "datacontenttype"}
        route = {"exchange": exchange, "routing_key": event_type, "mandatory": False}
        message = Message(headers, json.dumps(data), route, {"message_id": event_id})
        id = OperationId(tenant or settings.tenant, EXTERNAL, event_id)
        outbox.insert(session, id, keys.fingerprint({"data": data}), message, ordering_key=ordering_key, settled=True)
    return event_id
