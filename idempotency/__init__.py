"""Celery tasks whose effects happen once.

Give a task an idempotency key, and its database effects, its result and the messages it sends are committed
together, once, however often the message is delivered. Start reading at `idempotency.attempt.run`.

Names are imported when they are used, so that a process without Celery can use `idempotency.attempt`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .application import runtime_for, use_cells
    from .attempt.effects import DidNotHappen, EffectInDoubt, Happened, StillUnknown
    from .errors import (
        AttemptsExhausted,
        CallRefused,
        Defer,
        EffectMismatch,
        EffectNameReused,
        EffectUnknown,
        FingerprintMismatch,
        IdempotencyError,
        InvalidArguments,
        InvalidKey,
        InvalidResult,
        LeaseLost,
        MissingKey,
        NotSent,
        OpenTransaction,
        OperationBusy,
        OperationFailed,
        OperationNotFound,
        PermanentError,
        ServiceMismatch,
        SessionNotYours,
        SettingsError,
        StoredFailure,
        StoredRefusal,
        Undecided,
        Unfinished,
        UnsupportedControl,
        WrongCell,
    )
    from .events import apublish, publish, subscribe
    from .handle import Handle, StoredOperation, lookup
    from .wire.delivery import EffectOutcome, Operation
    from .wire.keys import OperationId, content_hash
    from .worker.decorator import idempotent_task
    from .worker.deduplicated import DeduplicatedTask
    from .worker.task import IdempotentTask

_HOME = {
    "application": (
        "runtime_for",
        "use_cells",
    ),
    "attempt.effects": (
        "DidNotHappen",
        "EffectInDoubt",
        "Happened",
        "StillUnknown",
    ),
    "errors": (
        "AttemptsExhausted",
        "CallRefused",
        "Defer",
        "EffectMismatch",
        "EffectNameReused",
        "EffectUnknown",
        "FingerprintMismatch",
        "IdempotencyError",
        "InvalidArguments",
        "InvalidKey",
        "InvalidResult",
        "LeaseLost",
        "MissingKey",
        "NotSent",
        "OpenTransaction",
        "OperationBusy",
        "OperationFailed",
        "OperationNotFound",
        "PermanentError",
        "ServiceMismatch",
        "SessionNotYours",
        "SettingsError",
        "StoredFailure",
        "StoredRefusal",
        "Undecided",
        "Unfinished",
        "UnsupportedControl",
        "WrongCell",
    ),
    "events": (
        "apublish",
        "publish",
        "subscribe",
    ),
    "handle": (
        "Handle",
        "StoredOperation",
        "lookup",
    ),
    "wire.delivery": (
        "EffectOutcome",
        "Operation",
    ),
    "wire.keys": (
        "OperationId",
        "content_hash",
    ),
    "worker.decorator": ("idempotent_task",),
    "worker.deduplicated": ("DeduplicatedTask",),
    "worker.task": ("IdempotentTask",),
}
_HOME_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AttemptsExhausted",
    "CallRefused",
    "DeduplicatedTask",
    "Defer",
    "DidNotHappen",
    "EffectInDoubt",
    "EffectMismatch",
    "EffectNameReused",
    "EffectOutcome",
    "EffectUnknown",
    "FingerprintMismatch",
    "Handle",
    "Happened",
    "IdempotencyError",
    "IdempotentTask",
    "InvalidArguments",
    "InvalidKey",
    "InvalidResult",
    "LeaseLost",
    "MissingKey",
    "NotSent",
    "OpenTransaction",
    "Operation",
    "OperationBusy",
    "OperationFailed",
    "OperationId",
    "OperationNotFound",
    "PermanentError",
    "ServiceMismatch",
    "SessionNotYours",
    "SettingsError",
    "StillUnknown",
    "StoredFailure",
    "StoredOperation",
    "StoredRefusal",
    "Undecided",
    "Unfinished",
    "UnsupportedControl",
    "WrongCell",
    "apublish",
    "content_hash",
    "idempotent_task",
    "lookup",
    "publish",
    "runtime_for",
    "subscribe",
    "use_cells",
]


# Modules that an application may use as `idempotency.queues`.
_MODULES = ("errors", "events", "handle", "providers", "queues", "settings")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
