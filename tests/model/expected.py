"""What the model holds: records, outbox rows, dead letters, and the attempts that think they hold an operation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from idempotency.store.answers import Claimed
from idempotency.wire.keys import OperationId


@dataclass
class Record:
    status: str
    fingerprint: str
    fence: int | None = None  # None: moved, and we were not told where to
    token: str | None = None
    generation: int = 1
    attempts: int = 1
    duplicates: int = 0
    effects: dict[str, str] = field(default_factory=dict)
    steps: set[str] = field(default_factory=set)  # those of them that are no effects
    resolved: set[str] = field(default_factory=set)
    revoked: int | None = None
    result: str | None = None
    code: str | None = None
    lease_over: bool = False
    holder_dead: bool = False
    due: bool = False
    expired: bool = False

    def end(self, status: str, *, result: str | None = None, code: str | None = None) -> None:
        self.status, self.result, self.code = status, result, code or self.code
        self.lease_over = self.holder_dead = self.due = self.expired = False

    def release(self, *, due: bool, code: str | None = None) -> None:
        self.status, self.token, self.due, self.code = "released", None, due, code or self.code
        self.lease_over = self.holder_dead = False

    def outside(self, state: str) -> bool:
        """Whether an effect is in this state."""
        return any(found == state for name, found in self.effects.items() if name not in self.steps)

    def concluded(self, code: str) -> str:
        """The code that an end has, as `conclusions` says and the table demands."""
        if self.outside("begun"):
            return "effect_unknown"
        return "unfinished" if self.outside("done") and code != "effect_unknown" else code

    @property
    def is_busy(self) -> bool:
        return (self.status == "started" and not self.lease_over) or (self.status == "released" and not self.due)

    @property
    def has_ended(self) -> bool:
        return self.status in ("completed", "failed")

    def shown(self) -> tuple[Any, ...]:
        return (
            self.status,
            self.fingerprint,
            self.token,
            self.generation,
            self.attempts,
            self.duplicates,
            self.effects,
            self.revoked,
            self.result,
            self.code,
            self.lease_over,
            self.due,
            self.expired,
        )


@dataclass
class Row:
    """An outbox row."""

    id: OperationId
    fingerprint: str
    origin: str
    status: str = "pending"
    available: bool = True
    reserved: bool = False
    overdue: bool = False
    recent: bool = False  # published within the redelivery horizon
    settled: bool = False
    attempts: int = 0
    resends: int = 0
    old: bool = False  # settled long ago
    generation: int = 1

    def shown(self) -> tuple[Any, ...]:
        pending = self.status == "pending"
        return (
            self.id,
            self.fingerprint,
            self.origin,
            self.status,
            pending and self.available,
            pending and self.reserved,
            self.status == "published" and self.overdue,
            self.settled,
            self.attempts,
            self.resends,
            self.generation,
        )


@dataclass
class Letter:
    id: OperationId | None
    fingerprint: str | None
    reason: str
    source: str
    generation: int | None
    row: int | None = None  # the outbox row it names
    digest: tuple[Any, ...] | None = None
    status: str = "open"
    old: bool = False
    # who has asked to discard it, and as what
    asked: tuple[str, str, int | None] | None = None

    @property
    def asked_by(self) -> str | None:
        """Who has asked to discard it as it is now."""
        return self.asked[0] if self.asked is not None and self.asked[1:] == (self.reason, self.generation) else None

    def shown(self) -> tuple[Any, ...]:
        return (self.id, self.fingerprint, self.reason, self.source, self.generation, self.status, self.old)

    def is_same_as(self, other: Letter) -> bool:
        """Whether one open letter stands for both."""
        kind = (self.id, self.generation, self.reason, self.fingerprint)
        return (
            (None not in kind and kind == (other.id, other.generation, other.reason, other.fingerprint))
            or (self.row is not None and self.row == other.row)
            or (self.digest is not None and self.digest == other.digest)
        )


@dataclass(frozen=True)
class Holder:
    """A holder that was told that the operation is its own; perhaps long ago."""

    claim: Claimed
    amount: int
