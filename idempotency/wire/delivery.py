"""A delivery: one message that reached a worker, and the operation it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from .keys import OperationId


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a worker was given: the operation, the arguments by name, and the message whole, as it is stored."""

    id: OperationId
    fingerprint: str
    arguments: Mapping[str, Any]
    task_id: str
    message: str
    headers: Mapping[str, Any]
    queue: str
    # Not the first of its message, by the outbox or by the broker: the one before may have been the holder's, which died
    # after its commit, or the only way on. So Redis' word does not acknowledge it. Postgres decides; whatever the
    # broker's flag says, it costs or saves a question and nothing else.
    resent: bool = False
    is_eager: bool = False
    also: Sequence[str] = ()  # the fingerprints of the same arguments by other rules
    is_revoked: bool = False  # Celery's worker remembers that its task id was revoked
    eta: datetime | None = None  # not before this time by the database's clock


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
    operation: str
    key: str
    arguments: Mapping[str, Any]
    attempts: int
    steps: Mapping[str, Any] = field(default_factory=dict)
    effects: Mapping[str, EffectOutcome] = field(default_factory=dict)
