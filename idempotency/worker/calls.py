"""How an idempotent task is called, under a key: enqueued, sent, or run here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, ClassVar

from celery import Celery, Task
from kombu.utils.uuid import uuid
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from ..application import runtime_of
from ..attempt.endings import MAX_DELAY
from ..errors import InvalidArguments, MissingKey, SettingsError
from ..handle import Handle
from ..store import outbox
from ..store.refused import explained
from ..wire import keys
from ..wire.delivery import Named
from ..wire.keys import KeyFunction, OperationId
from ..wire.message import FINGERPRINT_HEADER, KEY_HEADER, MESSAGE_VERSION, TENANT_HEADER, VERSION_HEADER, Message
from . import eager

# The options of enqueue() that are not arguments of the task.
ENQUEUE_OPTIONS = ("countdown", "eta", "priority", "queue", "task_id", "idempotency_key", "tenant", "ordering_key")
# Those of them, and of the task's own options, that shape its message.
TASK_OPTIONS = ("queue", "priority", "time_limit", "soft_time_limit")


class KeyedTask(Task):
    """A Celery task that is called under a key. Use `IdempotentTask`."""

    abstract = True

    key: ClassVar[str | KeyFunction | None] = None
    _key_function: ClassVar[KeyFunction | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_spelling(cls)
        if inspect.isfunction(key := cls.__dict__.get("key")):
            cls.key = staticmethod(key)
        cls._key_function = keys.template(cls.key) if isinstance(cls.key, str) else cls.key
        if (run := cls.__dict__.get("run")) is not None and cls._key_function is not None:
            parameters = inspect.signature(getattr(run, "__func__", run)).parameters
            for field in getattr(cls._key_function, "fields", ()):
                if field not in parameters:
                    raise SettingsError(f"key of {cls.__name__}: the task has no argument {field!r}")

    def enqueue(self, session: Session | Connection, /, *args: Any, **kwargs: Any) -> Handle:
        """Send this task with the caller's commit: `capture_payment.enqueue(session, payment_id=...)`.

        The arguments are the task's own, and of `apply_async`'s options countdown (seconds), eta (aware datetime),
        priority, queue, task_id, idempotency_key, tenant and ordering_key; an argument of the task wins over an option
        of its name.
        Raises `MissingKey`, `InvalidKey` and `InvalidArguments`; then nothing was written. Raises `SettingsError` where
        the tables, or a right on them, are missing.
        """
        parameters = self.signature_of_run.parameters
        options = {name: kwargs.pop(name) for name in ENQUEUE_OPTIONS if name in kwargs and name not in parameters}
        countdown, eta = _delay(options.pop("countdown", None), options.pop("eta", None))
        task_id = str(options.pop("task_id", None) or uuid())
        id, headers = self._checked(args, kwargs, options.pop("idempotency_key", None), options.pop("tenant", None))
        ordering_key = options.pop("ordering_key", None)
        _check_options(self.app, task_id=task_id, **options)
        # the decorator's options apply to every message of the task, as in apply_async
        options = {name: value for name, value in self._get_exec_options().items() if name in TASK_OPTIONS} | options
        message = Message.composed(
            self.app, self.name, args, kwargs, task_id=task_id, headers=headers, **_shown(id), **options
        )
        with explained():
            outbox.insert(
                session,
                id,
                headers[FINGERPRINT_HEADER],
                message,
                queue=message.queue(self.app),
                countdown=countdown,
                eta=eta,
                ordering_key=ordering_key,
            )
        return Handle(self.app, id, task_id)

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        *,
        idempotency_key: object = None,
        tenant: str | None = None,
        **options: Any,
    ) -> Any:
        """Send the task now. Protected against duplicates, not against a lost publish: that is what `enqueue` is for.

        Raises `MissingKey`, `InvalidKey` and `InvalidArguments`, also for `expires`; then nothing was sent.
        """
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        if (options.get("expires") or self.expires) is not None:
            raise InvalidArguments("expires: an accepted operation is never dropped; cancel it instead")
        given = options.pop("headers", None) or {}
        id, headers = self._checked(args, kwargs, idempotency_key, tenant, given)
        return super().apply_async(args, kwargs, task_id, headers={**given, **headers}, **(_shown(id) | options))

    def apply(
        self,
        args: Any = None,
        kwargs: Any = None,
        *,
        idempotency_key: object = None,
        tenant: str | None = None,
        **options: Any,
    ) -> Any:
        """Run the task here, eagerly, under its key; retries follow at once, and a `Defer` is raised.

        Raises `CallRefused` inside an open transaction of this thread, because the task commits on another connection.
        """
        eager.check_no_transaction(runtime_of(self.app))
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        given = options.pop("headers", None) or {}
        _, headers = self._checked(args, kwargs, idempotency_key, tenant, given)
        return super().apply(args, kwargs, headers={**given, **headers}, **options)

    def _checked(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        key: object,
        tenant: str | None,
        headers: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[OperationId, dict[str, Any]]:
        """The operation that a call names, and the headers of its message. Raises `CallRefused`."""
        arguments = keys.bind(self.signature_of_run, args, kwargs)
        key = headers.get(KEY_HEADER) if key is None else key
        tenant = headers.get(TENANT_HEADER) if tenant is None else tenant
        id = self._operation(arguments, key, tenant)
        limit = runtime_of(self.app).settings.arguments_limit
        if (size := len(keys.canonical_json(arguments))) > limit:
            raise InvalidArguments(f"arguments: at most {limit} bytes as JSON, got {size}")
        sent = {
            KEY_HEADER: id.key,
            TENANT_HEADER: id.tenant,
            FINGERPRINT_HEADER: keys.fingerprint(arguments),
            VERSION_HEADER: MESSAGE_VERSION,
        }
        return id, sent

    def named_by(self, args: Sequence[Any], kwargs: Mapping[str, Any], headers: Mapping[str, Any]) -> Named:
        """The operation that a message names, by its headers or by its arguments. Raises `CallRefused`."""
        arguments = keys.bind(self.signature_of_run, args, kwargs)
        return Named(self._operation(arguments, headers.get(KEY_HEADER), headers.get(TENANT_HEADER)), arguments)

    def _operation(self, arguments: Mapping[str, Any], key: object, tenant: object) -> OperationId:
        if key is None and self._key_function is not None:
            key = type(self)._key_function(arguments)  # type: ignore[misc]
        if key is None:
            raise MissingKey(f"{self.name}: give idempotency_key=, or the task a key template")
        if tenant is None:
            tenant = runtime_of(self.app).settings.tenant
        return OperationId(keys.check_key(tenant, field="tenant"), self.name, keys.check_key(key))

    @property
    def signature_of_run(self) -> inspect.Signature:
        signature: inspect.Signature | None = self.__dict__.get("_cached_signature")
        if signature is None:
            signature = self.__dict__["_cached_signature"] = inspect.signature(self.run)
        return signature


def _check_spelling(cls: type[KeyedTask]) -> None:
    """Refuse an option of the decorator that is nearly one of ours. Celery takes any name and would run without it."""
    if "_decorated" not in vars(cls):
        return  # a base of the application's own, with methods and attributes as it likes
    ours = {
        name
        for base in cls.__mro__[1:]
        if issubclass(base, KeyedTask)
        for name in vars(base).get("__annotations__", {})
        if not name.startswith("_")
    }
    known = {name for base in cls.__mro__[1:] for name in vars(base)}
    for name in (name for name in vars(cls) if not name.startswith("_") and name not in known):
        if near := get_close_matches(name, ours, n=1, cutoff=0.65 if len(name) <= 4 else 0.8):
            raise SettingsError(f"{name} of {cls.__name__}: no such option; did you mean {near[0]}?")


def _shown(id: OperationId) -> dict[str, Any]:
    """What Flower and the logs may show of a call: its key, never its arguments."""
    return {"argsrepr": f"idempotency-key={id.key}", "kwargsrepr": "{}"}


def _delay(countdown: object, eta: object) -> tuple[float, datetime | None]:
    if countdown is None:
        countdown = 0.0
    if not isinstance(countdown, int | float) or not 0 <= countdown <= MAX_DELAY:
        raise InvalidArguments(f"countdown: must be between 0 and {MAX_DELAY:.0f} seconds, got {countdown!r}")
    if eta is not None and (not isinstance(eta, datetime) or eta.tzinfo is None):
        raise InvalidArguments("eta: must be a datetime with a time zone")
    return float(countdown), eta


def _check_options(app: Celery, *, task_id: str, queue: object = None, priority: object = None) -> None:
    """Refuse here what would otherwise fail in the relay, long after the caller's commit."""
    if not 0 < len(task_id.encode()) <= 255:
        raise InvalidArguments(f"task_id: at most 255 bytes, got {len(task_id.encode())}")
    if queue is not None and queue not in app.amqp.queues:
        raise InvalidArguments(f"queue: {queue!r} is not among this application's task_queues")
    if priority is not None and (type(priority) is not int or not 0 <= priority <= 255):
        raise InvalidArguments(f"priority: must be an integer from 0 to 255, got {priority!r}")
