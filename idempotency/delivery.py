"""A delivery: one message that reached a worker, and the operation it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    resent: bool = False  # comes from the outbox as a later delivery: Redis' word does not acknowledge it
    is_eager: bool = False
    also: Sequence[str] = ()  # the fingerprints of the same arguments by other rules


@dataclass(frozen=True, slots=True)
class Operation:
    """The operation that `on_failed` is told about: what its key names, and what it was asked to do."""

    tenant: str
    operation: str
    key: str
    arguments: Mapping[str, Any]
    attempts: int
