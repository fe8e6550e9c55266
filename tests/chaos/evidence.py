"""What the checker is given and what it answers: plain values, without a database."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import Engine

from tests.chaos import ledgers
from tests.chaos.ledgers import Change

# The task of every request at the edge.
EDGE = "http"
# What an attacker makes up bears the mark, in a key, a tenant or an account; its amounts are more than is ever paid.
MARK, AMOUNT = "forged", 10**9


def is_forged(value: object) -> bool:
    """Whether it bears the attacker's mark."""
    return isinstance(value, str) and MARK in value


class Id(NamedTuple):
    """What a key names: the operation."""

    tenant: str
    task: str
    key: str

    @property
    def is_request(self) -> bool:
        """Whether it is a request: no message asks for it, and none is sent for it; its client asks again."""
        return self.task == EDGE


class Answer(NamedTuple):
    """What a client was told, as far as a repeat has to be told the same."""

    status: int
    media_type: str
    body: bytes

    @property
    def stored(self) -> str:
        """As a record keeps it."""
        headers = [["content-type", self.media_type]]
        return json.dumps({"status": self.status, "headers": headers, "body": self.body.decode()})

    def is_problem(self, name: str) -> bool:
        """Whether it is the middleware's own answer, of this type."""
        return str(self.problem.get("type", "")).endswith(f":{name}")

    @property
    def problem(self) -> dict[str, Any]:
        """The members of a problem document; none if it is another answer."""
        return dict(json.loads(self.body)) if self.media_type == "application/problem+json" else {}


class Step(NamedTuple):
    """A step that has an undo, and the row that it writes."""

    name: str
    account: str
    amount: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """One accepted operation, and what should come of it.

    rows        what it writes into `entries` when it completes, steps included: (account, amount), each once;
                None: not known, only that no row is there twice
    result      the stored result as text; None: not known
    failure     the code it is to fail with; None: it is to complete
    may_fail    further codes that it may fail with
    may_stop    codes that may end it beside an effect that is unknown or happened, and never otherwise
    failure_row whether its `on_failed` leaves a row in `failures`; None: it does where a failure is expected
    acts        how many effects outside it has when it completes
    amount      what each of its effects is worth in the provider's ledger; None: not known
    steps       its steps with an undo, in their order; their rows are among `rows`
    refunds     effects that an undo answers for, each with the reversal that it writes
    once_claimed it was only sent: without a record it was never accepted
    is_event    whether it is a consumer's handling of an event
    max_attempts of its task; None: as the evidence says of every task
    status      that a request is answered with when it completes; None: not known
    """

    tenant: str
    task: str
    key: str
    rows: tuple[tuple[str, int], ...] | None = None
    result: str | None = None
    failure: str | None = None
    may_fail: frozenset[str] = frozenset()
    may_stop: frozenset[str] = frozenset()
    failure_row: bool | None = None
    acts: int | None = None
    amount: int | None = None
    steps: tuple[Step, ...] = ()
    refunds: tuple[Step, ...] = ()
    once_claimed: bool = False
    is_event: bool = False
    max_attempts: int | None = None
    status: int | None = None

    @property
    def id(self) -> Id:
        return Id(self.tenant, self.task, self.key)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the checker is given besides the ledgers.

    accepted       every operation that was accepted; enqueued ones are found in the ledger too
    acts           the provider's own ledger: how often it acted under each gateway key
    amounts        and for how much under each of them
    queues         messages left in each queue of the broker
    tenants        who may have rows; None: not checked
    revoked        what Celery was told to revoke
    answers        what the clients of each request were told, by those that were told something final
    rolled_back    operations enqueued only by transactions that rolled back
    drained        faults are over and everything had time to end; else what is under way is no violation
    max_attempts   of every task
    spare_attempts claims beyond them: one that ends the operation, and one for each time that claim was killed
    fenced         writes refused to former holders: they roll back, so only the logs have seen them
    """

    engine: Engine
    accepted: Sequence[Accepted]
    acts: Mapping[str, int] = field(default_factory=dict)
    amounts: Mapping[str, int] = field(default_factory=dict)
    queues: Mapping[str, int] = field(default_factory=dict)
    tenants: frozenset[str] | None = None
    revoked: frozenset[Id] = frozenset()
    answers: Mapping[Id, Sequence[Answer]] = field(default_factory=dict)
    rolled_back: Sequence[Id] = ()
    drained: bool = True
    max_attempts: int = 5
    spare_attempts: int = 1
    fenced: int = 0


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was not kept: which, of what, and what is seen instead."""

    invariant: str
    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.key}: {self.what}"


@dataclass(slots=True)
class Counts:
    """Accepted = completed + failed + dead + queued + lost. `failed` as declared, `dead` without having been."""

    accepted: int = 0
    completed: int = 0
    failed: int = 0
    dead: int = 0
    queued: int = 0
    lost: int = 0
    doubled: int = 0
    duplicated: int = 0
    takeovers: int = 0
    fenced: int = 0


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that is wrong, and how much of what there was."""

    violations: tuple[Violation, ...]
    counts: Counts
    changes: Sequence[Change]

    def history(self, violation: Violation) -> list[str]:
        """The ledger's lines about the operation that a violation names."""
        parts = violation.key.split("/", 2)
        return ledgers.history(self.changes, *parts) if len(parts) == 3 else []

    def as_dict(self) -> dict[str, Any]:
        """Counts and violations as JSON knows them."""
        return {**asdict(self.counts), "violations": [asdict(violation) for violation in self.violations]}
