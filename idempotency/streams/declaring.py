"""Declaring what handles the messages of a stream: `@stream("orders", key="{event[id]}", source=kafka("orders"))`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..attempt.conclusions import OnFailed
from ..attempt.policy import Policy
from ..errors import CallRefused, MissingKey, SettingsError
from ..settings import Settings
from ..wire import keys
from ..wire.delivery import Delivery
from ..wire.keys import OperationId
from ..wire.limits import BODY_DEPTH
from .handling import Handling
from .message import StreamMessage
from .naming import Naming, naming
from .sources import KafkaTopics, RabbitStream, Source

# Before a stream's name: the task of its operations, and the queue on their records.
TASK_PREFIX = "stream."
# The most messages in one transaction: more save little, and hold their locks for longer.
BATCH = 100

Handler = Callable[[Handling, Any], Any]
Key = str | Callable[[Any, StreamMessage], str]

_declared: dict[str, Stream] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """A handler, and the messages that it is for. Calling it calls the handler."""

    name: str
    handler: Handler
    source: Source
    key: Naming | None
    tenant: Naming | None
    decode: Callable[[bytes], Any]
    on_failure: Literal["continue", "stop"]
    batch: int
    max_attempts: int | None
    permanent_errors: tuple[type[BaseException], ...]
    on_failed: OnFailed | None
    retention_completed: float | None
    retention_failed: float | None
    moves_money: bool

    def __call__(self, given: Handling, event: Any) -> Any:
        return self.handler(given, event)

    @property
    def task(self) -> str:
        """The task in the ids of its operations."""
        return TASK_PREFIX + self.name

    def policy(self, settings: Settings) -> Policy:
        """How its attempts end."""
        return Policy(
            self.max_attempts or settings.max_attempts,
            self.retention_completed or settings.retention_completed,
            self.retention_failed or settings.retention_failed,
            settings.provider_key_retention,
            permanent_errors=self.permanent_errors,
            on_failed=self.on_failed,
        )

    def event(self, message: StreamMessage) -> Any:
        """What is in a message; None for one without a value. Raises what `decode` raises."""
        return None if message.value is None else self.decode(message.value)

    def delivery(self, event: Any, message: StreamMessage, settings: Settings) -> Delivery:
        """The operation that a message is for. Raises `MissingKey`, `InvalidKey` and what a function for the key raises."""
        key = message.idempotency_key if self.key is None else self.key(event, message)
        if key is None:
            raise MissingKey("the message has no header idempotency-key, and the stream no key=")
        tenant = settings.tenant if self.tenant is None else self.tenant(event, message)
        id = OperationId(keys.check_key(tenant, field="tenant"), self.task, keys.check_key(key))
        fingerprint, *also = message.fingerprints
        return Delivery(
            id, fingerprint, {"event": event}, headers=message.kept(), queue=self.task, also=also, waits=True
        )


def stream(
    name: str,
    *,
    source: Source,
    key: Key | None = None,
    tenant: Key | None = None,
    decode: Callable[[bytes], Any] | None = None,
    on_failure: Literal["continue", "stop"] = "continue",
    batch: int = BATCH,
    max_attempts: int | None = None,
    permanent_errors: tuple[type[BaseException], ...] = (),
    on_failed: OnFailed | None = None,
    retention_completed: float | None = None,
    retention_failed: float | None = None,
    moves_money: bool = False,
) -> Callable[[Handler], Stream]:
    """Handle each message of a stream once: the handler's writes, the record of the key and the position are one commit.

    The handler is called as `handle(stream, event)`: `stream.session`, `stream.effect` and `stream.step` are those of a task's
    body. `idempotency stream` runs all handlers that are declared.

    `name` is part of each operation's id and of the position's: never rename it. `key`: a pattern like `"{event[id]}"`, or a
    function of event and message; None: the header `idempotency-key`. `tenant`: likewise; None: the setting's. `decode`: from the
    value's bytes to the event; None: JSON. `on_failure`: what a message that fails for good does to its partition. `batch`:
    messages that share a transaction at most. The others are as for a task; retentions in seconds. Raises `SettingsError`.
    """
    try:
        keys.check_key(TASK_PREFIX + name, field="name")
    except CallRefused as error:
        raise SettingsError(f"stream {name!r}: {error}") from None
    if on_failure not in ("continue", "stop"):
        raise SettingsError(f"stream {name!r}: on_failure must be 'continue' or 'stop', got {on_failure!r}")
    if not 1 <= batch <= 10_000:
        raise SettingsError(f"stream {name!r}: batch must be between 1 and 10000, got {batch}")

    def declared(handler: Handler) -> Stream:
        if inspect.iscoroutinefunction(handler):
            raise SettingsError(
                f"stream {name!r}: its handler runs in a thread without an event loop; make it a plain def"
            )
        made = Stream(
            name,
            handler,
            source,
            naming(key, "key") if isinstance(key, str) else key,
            naming(tenant, "tenant") if isinstance(tenant, str) else tenant,
            decode or from_json,
            on_failure,
            batch,
            max_attempts,
            tuple(permanent_errors),
            on_failed,
            retention_completed,
            retention_failed,
            moves_money,
        )
        known = _declared.get(name)
        if known is not None and _home(known.handler) != _home(handler):
            raise SettingsError(f"stream {name!r}: declared twice, by {_home(known.handler)} and {_home(handler)}")
        _check_group(made)
        _declared[name] = made
        return made

    return declared


def stream_of(task: str) -> Stream | None:
    """The stream whose operations are of this task, if this process has declared it."""
    return _declared.get(task.removeprefix(TASK_PREFIX)) if task.startswith(TASK_PREFIX) else None


def declared_streams() -> Mapping[str, Stream]:
    """All streams that this process has declared, by name."""
    return dict(_declared)


def rabbitmq_queues() -> list[str]:
    """The queues of RabbitMQ that the declared streams read."""
    return [
        queue for each in _declared.values() if isinstance(each.source, RabbitStream) for queue in each.source.queues
    ]


def from_json(value: bytes) -> Any:
    """The event in a message's value. Raises `ValueError` for what is not JSON, or nested too deep."""
    try:
        event = json.loads(value)
    except RecursionError:
        raise ValueError(f"nested at most {BODY_DEPTH} deep") from None
    if value.count(b"[") + value.count(b"{") > BODY_DEPTH and keys.depth(event) > BODY_DEPTH:
        raise ValueError(f"nested at most {BODY_DEPTH} deep")
    return event


def _check_group(made: Stream) -> None:
    """Raise `SettingsError` for a group that reads a topic for another stream: each of the two would get a part of its messages."""
    for other in _declared.values():
        ours, theirs = made.source, other.source
        if other.name == made.name or not (isinstance(ours, KafkaTopics) and isinstance(theirs, KafkaTopics)):
            continue
        if ours.group is not None and ours.group == theirs.group and (shared := set(ours.topics) & set(theirs.topics)):
            raise SettingsError(
                f"stream {made.name!r}: group {ours.group!r} reads {min(shared)!r} for stream {other.name!r}, and each would get a part "
                "of its messages; give each a group of its own"
            )


def _home(handler: Handler) -> str:
    return f"{getattr(handler, '__module__', '?')}:{getattr(handler, '__qualname__', '?')}"
