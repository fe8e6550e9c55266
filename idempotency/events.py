"""Events: each subscribed consumer handles each event once.

`publish` writes one outbox row per consumer in the caller's transaction. From then on the event is a task, keyed by
consumer and event id: kept until it has been handled, and resent if the broker loses it. Events have the attributes of
CloudEvents 1.0 (cloudevents.io).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakSet

from celery import Celery, current_app

from .application import runtime_for
from .errors import CallRefused, InvalidArguments, SettingsError
from .observe.logs import log
from .store import outbox, saga_steps
from .store.callers import AsyncCaller, Caller, Pending, in_transaction_of
from .store.outbox import external_task
from .store.refused import explained
from .wire import keys
from .wire.keys import KeyFunction, OperationId
from .wire.message import Message
from .worker.task import IdempotentTask


@dataclass(frozen=True, slots=True)
class Subscription:
    """The event types a consumer wants, as patterns, what their data has to have, and the task that handles them."""

    patterns: tuple[str, ...]
    consumer: str
    task: Any
    having: tuple[str, ...] = ()

    def matches(self, event_type: str, data: Any) -> bool:
        if self.having and not (isinstance(data, dict) and all(name in data for name in self.having)):
            return False
        return any(fnmatchcase(event_type, pattern) for pattern in self.patterns)


_subscriptions: WeakKeyDictionary[Celery, list[Subscription]] = WeakKeyDictionary()


# Events that the sagas of an application may wait for: by type, the templates of what a wait's `match` is compared with.
_expected: WeakKeyDictionary[Celery, dict[str, dict[str, KeyFunction]]] = WeakKeyDictionary()

_imported: WeakSet[Celery] = WeakSet()


def _subscriptions_of(application: Celery) -> list[Subscription]:
    # Only workers import what `include` names, but a publisher has to know every consumer too.
    if application not in _imported:
        application.loader.import_default_modules()
        _imported.add(application)
    return _subscriptions.get(application, [])


def expect(application: Celery, event_type: str, template: str) -> None:
    """Keep events of this type for the application's sagas, matched by one member of their data: `{order_id}`.

    Raises `SettingsError`.
    """
    must = f"events: {event_type}: {template!r} must be one member and nothing else, whose value a wait gives: '{{id}}'"
    try:
        function = keys.template(template)
    except SettingsError:
        raise SettingsError(must) from None
    if template != f"{{{function.fields[0]}}}":
        raise SettingsError(must)
    _expected.setdefault(application, {}).setdefault(event_type, {})[template] = function


def subscribe(
    *patterns: str, consumer: str, having: Sequence[str] = (), app: Celery | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Handle events: `@subscribe("order.*", consumer="ledger")` over `def handle(self, event): ...`.

    The function becomes an idempotent task named `consumer.function`, keyed by the event id; `options` are those of
    `@app.task`. Patterns match event types like file names (`*` and `?`). `having`: only events whose data is an object
    with these members; others cost no row. Add the module to the application's `include`
    so that every publisher sees it: `publish` writes rows only for the consumers it knows. Raises `InvalidKey` for an
    invalid consumer name, and `SettingsError` without a pattern or for a task name that is taken.
    """
    application = app or current_app._get_current_object()
    keys.check_key(consumer, field="consumer")
    if isinstance(having, str):
        raise SettingsError(f"subscribe: having is a list of names, got the text {having!r}")
    if not patterns:
        raise SettingsError(f"subscribe: consumer {consumer!r} names no event type")

    def register(function: Callable[..., Any]) -> Any:
        name = f"{consumer}.{function.__name__}"
        if name in application.tasks:
            raise SettingsError(f"subscribe: task {name!r} already exists")
        # not shared: the process's other applications have not subscribed
        task = application.task(base=IdempotentTask, bind=True, name=name, shared=False, **options)(function)
        _subscriptions.setdefault(application, []).append(Subscription(patterns, consumer, task, tuple(having)))
        return task

    return register


def publish(
    session: Caller,
    event_type: str,
    payload: Any,
    *,
    ordering_key: str | None = None,
    source: str | None = None,
    tenant: str | None = None,
    exchange: str | None = None,
    app: Celery | None = None,
) -> str:
    """Publish an event to every subscribed consumer when the caller commits. Returns the event id.

    For each consumer, events with the same `ordering_key` are published in commit order; one that cannot be published
    blocks its key until a person replays or discards it. `exchange` names a topic exchange that gets the event as well,
    for external consumers: at least once, in CloudEvents' binary mode, with the event type as the routing key. Raises
    `InvalidKey` or `InvalidArguments` before writing anything, also without subscribers.
    """
    application = app or current_app._get_current_object()
    keys.check_key(event_type, field="event_type")
    if ordering_key is not None:
        keys.check_key(ordering_key, field="ordering_key")
    attributes = new_attributes(event_type, source or f"/{application.main or 'celery'}")
    event_id = attributes["id"]
    runtime = runtime_for(application, tenant)
    settings = runtime.settings
    tenant = tenant or settings.tenant
    data = as_data(payload, limit=settings.arguments_limit)
    connection = in_transaction_of(session, runtime.home_for(tenant))
    for subscription in _subscriptions_of(application):
        if subscription.matches(event_type, data):
            event = {**attributes, "data": data}
            subscription.task.enqueue(
                session, event, idempotency_key=event_id, ordering_key=ordering_key, tenant=tenant
            )
    for match in _matches(application, event_type, data):
        with explained():
            event_text = json.dumps({**attributes, "data": data})
            saga_steps.keep_event(connection, tenant, settings.service, event_type, match, event_id, event_text)
    if exchange is not None:
        headers = {f"cloudEvents:{name}": value for name, value in attributes.items() if name != "datacontenttype"}
        headers |= {} if runtime.traces is None else runtime.traces.current().headers()
        route = {"exchange": exchange, "routing_key": event_type, "mandatory": False}
        message = Message(headers, json.dumps(data), route, {"message_id": event_id})
        id = OperationId(tenant, external_task(settings.service), event_id)
        fingerprint = keys.fingerprint({"data": data})
        with explained():
            outbox.insert(
                connection,
                id,
                fingerprint,
                message,
                service=settings.service,
                ordering_key=ordering_key,
                settled=True,
            )
    return event_id


def new_attributes(event_type: str, source: str) -> dict[str, str]:
    """The CloudEvents attributes of an event that happens now, under a new id."""
    return {
        "specversion": "1.0",
        "id": str(uuid4()),
        "source": source,
        "type": event_type,
        "time": datetime.now(UTC).isoformat(),
        "datacontenttype": "application/json",
    }


def as_data(payload: Any, *, limit: int) -> Any:
    """A payload as its consumers get it. Raises `InvalidArguments` for what is not JSON, or longer than `limit` bytes."""
    data = json.loads(keys.canonical_json({"data": payload}))["data"]
    if (size := len(json.dumps(data))) > limit:
        raise InvalidArguments(f"payload: at most {limit} bytes as JSON, got {size}")
    return data


def matched_by(template: str, value: str) -> str:
    """What is compared: the name of the template's member, too, so that order 7 is not return 7."""
    (member,) = keys.template(template).fields
    return f"{member}={value}"


def keeps(application: Celery, event_type: str, match: str) -> bool:
    """Whether what is published in this process is kept for waits of this kind; `match` as they have it."""
    _subscriptions_of(application)  # which imports the modules that declare them
    templates = _expected.get(application, {}).get(event_type, {})
    return any(match.startswith(matched_by(template, "")) for template in templates)


def _matches(application: Celery, event_type: str, data: Any) -> set[str]:
    """What the waits of sagas for this event are compared with. Data that lack it match none: no publisher fails by that."""
    matches = set()
    for template, function in _expected.get(application, {}).get(event_type, {}).items():
        try:
            matches.add(matched_by(template, keys.made_by(function, data if isinstance(data, dict) else {})))
        except CallRefused as refused:
            log.warning(
                "event_matches_no_saga", event_type=event_type, template=template, error=f"the event's data: {refused}"
            )
    return matches


async def apublish(session: AsyncCaller, event_type: str, payload: Any, **options: Any) -> str:
    """Publish an event when an async caller commits: as `publish`, for the sessions that `aenqueue` accepts."""
    pending = Pending()
    event_id = publish(pending, event_type, payload, **options)
    await pending.send(session)
    return event_id
