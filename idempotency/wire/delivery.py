"""A delivery: one request to carry out an operation, from a Celery message or any other source that may repeat it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol, runtime_checkable

from .headers import GENERATION_HEADER
from .keys import OperationId


@dataclass(frozen=True, slots=True)
class Delivery:
    """The operation, its arguments by name, and the whole message as text.

    Without a message, the library cannot redeliver the operation; the caller has to ask again.
    """

    id: OperationId
    fingerprint: str
    arguments: Mapping[str, Any]
    task_id: str = ""
    message: str = ""
    headers: Mapping[str, Any] = field(default_factory=dict)
    queue: str = ""
    # Redelivered by the outbox or the broker: its holder may have died after the commit, or this may be the only delivery
    # left. So it is never acknowledged on the strength of a hint; Postgres decides. A wrong flag costs a query at most.
    resent: bool = False
    is_eager: bool = False
    also: Sequence[str] = ()  # fingerprints of the same arguments by other rules
    is_revoked: bool = False  # the worker remembers that this task id was revoked
    eta: datetime | None = None  # not before this time, by the database's clock
    signed_at: float | None = None  # when its message was published, in seconds since 1970, if its signature says so
    # No message can come for this operation, so nothing is acknowledged because of it: it leaves no hint in Redis, and
    # its duplicates are not counted.
    only_asked: bool = False
    # It is not acknowledged while another holds the operation, and asks again until that one has ended: no duplicate is counted.
    waits: bool = False

    @property
    def generation(self) -> int:
        """The generation of the operation that its message is of."""
        return self.number(GENERATION_HEADER, 1)

    def number(self, header: str, default: int) -> int:
        """A header of its message as a number; `default` if it is none that Postgres takes: anyone who may publish writes it."""
        given = self.headers.get(header)
        return given if type(given) is int and 0 <= given < 2**31 else default


@dataclass(frozen=True, slots=True)
class Named:
    """The operation that a message is for, and its arguments by name."""

    id: OperationId
    arguments: Mapping[str, Any]


@runtime_checkable
class NamesItsOperation(Protocol):
    """An idempotent task: it can tell which operation a message is for."""

    def named_by(self, args: Sequence[Any], kwargs: Mapping[str, Any], headers: Mapping[str, Any]) -> Named:
        """The operation this call is for. Raises `CallRefused` if the message names none."""


@dataclass(frozen=True, slots=True)
class EffectOutcome:
    """What is known of an effect when its operation ends. `result` is set if it happened."""

    state: Literal["unknown", "happened", "not_happened", "compensated"]
    result: Any = None


@dataclass(frozen=True, slots=True)
class Operation:
    """The failed operation that `on_failed` receives: its identity, its arguments, and what it did.

    `steps` holds the results of the recorded steps by name, including undone ones.
    """

    tenant: str
    task: str
    key: str
    arguments: Mapping[str, Any]
    attempts: int
    steps: Mapping[str, Any] = field(default_factory=dict)
    effects: Mapping[str, EffectOutcome] = field(default_factory=dict)
