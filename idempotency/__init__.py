"""Celery tasks whose effects happen once.

Give a task an idempotency key, and its database effects, its result and the messages it sends are committed
together, once, however often the message is delivered. Start reading at `idempotency.worker.task`.
"""

from .attempt.effects import DidNotHappen, EffectInDoubt, Happened, StillUnknown
from .checks.startup import refuse_to_lose as _refuse_to_lose  # noqa: F401  importing it is what installs it
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
    SessionNotYours,
    SettingsError,
    StoredFailure,
    StoredRefusal,
    Unfinished,
    UnsupportedControl,
)
from .events import publish, subscribe
from .handle import Handle, StoredOperation, lookup
from .upkeep.presence import sign_as_worker as _sign_as_worker  # noqa: F401  importing it is what installs it
from .wire.delivery import EffectOutcome, Operation
from .wire.keys import OperationId, content_hash
from .worker.guard import install as _install_guard  # noqa: F401  importing it is what installs it
from .worker.task import IdempotentTask

__all__ = [
    "AttemptsExhausted",
    "CallRefused",
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
    "SessionNotYours",
    "SettingsError",
    "StillUnknown",
    "StoredFailure",
    "StoredOperation",
    "StoredRefusal",
    "Unfinished",
    "UnsupportedControl",
    "content_hash",
    "lookup",
    "publish",
    "subscribe",
]
