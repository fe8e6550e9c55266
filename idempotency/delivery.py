"""A delivery: one message that reached a worker, and the operation it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

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
    eta: datetime | None = None  # not before this time by the database's clock


@dataclass(frozen=True, slots=True)
class Operation:
    """The operation that `on_failed` is told about: what its key names, and what it was asked to do."""

    tenant: str
    operation: str
    key: str
    arguments: Mapping[str, Any]
    attempts: int
