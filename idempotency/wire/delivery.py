"""A delivery: one request to carry out an operation, from a Celery message or from anything else that may come twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol, runtime_checkable

from .keys import OperationId


@dataclass(frozen=True, slots=True)
class Delivery:
    """What was asked for: the operation, its arguments by name, and the message whole, as it is stored.

    Without a message, no one delivers the operation again: whoever asked for it asks again.
    """

    id: OperationId
    fingerprint: str
    arguments: Mapping[str, Any]
    task_id: str = ""
    message: str = ""
    headers: Mapping[str, Any] = field(default_factory=dict)
    queue: str = ""
    # Not the first of its message, by the outbox or by the broker: the one before may have been the holder's, which died
    # after its commit, or the only way on. So Redis' word does not acknowledge it. Postgres decides; whatever the
    # broker's flag says, it costs or saves a question and nothing else.
    resent: bool = False
    is_eager: bool = False
    also: Sequence[str] = ()  # the fingerprints of the same arguments by other rules
    is_revoked: bool = False  # Celery's worker remembers that its task id was revoked
    eta: datetime | None = None  # not before this time by the database's clock


@dataclass(frozen=True, slots=True)
class Named:
    """Which operation a message names, and its arguments by name."""

    id: OperationId
    arguments: Mapping[str, Any]


@runtime_checkable
class NamesItsOperation(Protocol):
    """A task that knows which operation a message of it is about: an idempotent one."""

    def named_by(self, args: Sequence[Any], kwargs: Mapping[str, Any], headers: Mapping[str, Any]) -> Named:
        """Raises `CallRefused` for a message that names none."""


@dataclass(frozen=True, slots=True)
class EffectOutcome:
    """What is known of an effect when its operation ends; `result` where it happened."""

    state: Literal["unknown", "happened", "not_happened", "compensated"]
    result: Any = None


@dataclass(frozen=True, slots=True)
class Operation:
    """The operation that `on_failed` is told about: what its key names, what it was asked to do, and what it did.

    `steps` holds the results of the recorded steps, undone ones included, by name.
    """

    tenant: str
    task: str
    key: str
    arguments: Mapping[str, Any]
    attempts: int
    steps: Mapping[str, Any] = field(default_factory=dict)
    effects: Mapping[str, EffectOutcome] = field(default_factory=dict)
