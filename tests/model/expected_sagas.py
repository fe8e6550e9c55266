"""What the model of sagas holds: their records and those of their calls, their rows, and attempts that think they hold one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from idempotency.store.answers import Claimed
from idempotency.store.sagas import COMPENSATING, RUNNING, SagaRow


@dataclass
class Operation:
    """The record of a saga, or of what one has called."""

    status: str = "released"
    generation: int = 1
    token: str | None = None
    fence: int | None = None
    lease_over: bool = False
    due: bool = True

    @property
    def has_ended(self) -> bool:
        return self.status in ("completed", "failed")

    def shown(self) -> list[Any]:
        return [self.status, self.generation, self.lease_over, self.due]

    def release(self, *, due: bool) -> None:
        self.status, self.token, self.due, self.lease_over = "released", None, due, False

    def end(self, status: str) -> None:
        self.status, self.due, self.lease_over = status, False, False


@dataclass
class Step:
    """A row of a saga."""

    position: int
    kind: str
    state: str
    event: int | None = None
    undoes: int | None = None
    call: str | None = None
    has_undo: bool = False

    def shown(self) -> list[Any]:
        return [self.position, self.kind, self.state, self.event, self.undoes, self.call]


@dataclass
class Saga:
    status: str = RUNNING
    generation: int = 1
    signals: int = 0
    waits_for: int | None = None
    stopped: str | None = None
    code: str | None = None
    since: int = 0  # how many events had come when it was accepted
    steps: dict[int, list[Step]] = field(default_factory=dict)

    @property
    def rows(self) -> list[Step]:
        return self.steps.setdefault(self.generation, [])

    def is_undone_from_now_on(self, code: str) -> None:
        """Its waits end with that."""
        self.status, self.code = COMPENSATING, code
        for step in self.rows:
            if (step.kind, step.state) == ("wait", "begun"):
                step.state = "not_happened"

    def shown(self) -> list[Any]:
        return [self.status, self.generation, self.signals, self.waits_for, self.stopped, self.code]

    def used(self) -> set[int | None]:
        return {step.event for steps in self.steps.values() for step in steps}


@dataclass(eq=False)
class Holder:
    """An attempt, with the saga as it has read it."""

    claim: Claimed
    saga: SagaRow
    rows: list[Step]

    @property
    def is_undoing(self) -> bool:
        return self.saga.status == COMPENSATING
