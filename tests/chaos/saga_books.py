"""The rows of sagas, and what has to hold for each of them once all is over: one legal end, and exactly the undos it needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Engine, text

from tests.chaos.evidence import Violation

# Each end of a saga, and how its operation has ended then.
ENDS = {"COMPLETED": "completed", "FAILED": "failed"}


class SagaStep(NamedTuple):
    """What a saga has recorded. `undo`: the task that undoes it; `undoes`: the position of what this undoes."""

    position: int
    name: str
    kind: str
    state: str
    undo: str | None = None
    undoes: int | None = None
    event_id: int | None = None
    # how the operation of a call or of an undo has ended
    called: str | None = None


@dataclass(frozen=True, slots=True)
class Saga:
    """One saga as it is at the end, with the steps of its generation in their order. `record`: its operation's status."""

    key: str
    status: str
    stopped: str | None
    record: str | None
    steps: Sequence[SagaStep]


def read_sagas(engine: Engine, task: str) -> list[Saga]:
    """Every saga of a task."""
    with engine.connect() as connection:
        found = connection.execute(_SAGAS, {"task": task}).all()
        return [
            Saga(key, status, stopped, record, [SagaStep(*row) for row in connection.execute(_STEPS, {"id": id})])
            for id, key, status, stopped, record in found
        ]


def check_sagas(sagas: Sequence[Saga]) -> Iterator[Violation]:
    """S1: each saga has ended in one way; S2: each wait too; S3: what a saga undid is what it had done."""
    for key, number in Counter(saga.key for saga in sagas).items():
        if number > 1:
            yield Violation("S1", key, f"there are {number} sagas of this key")
    for saga in sagas:
        yield from _ended(saga)
        yield from _waits(saga)
        yield from _undone(saga)


def _ended(saga: Saga) -> Iterator[Violation]:
    if saga.status not in ENDS or saga.stopped is not None:
        yield Violation("S1", saga.key, f"has not ended: {saga.status}, stopped {saga.stopped}")
    elif saga.record != ENDS[saga.status]:
        yield Violation("S1", saga.key, f"is {saga.status}, and its operation {saga.record}")
    for step in saga.steps:
        # of a saga that is undone, what it was waiting for stays open; what it had called was awaited
        is_open = step.state == "begun" and not (saga.status == "FAILED" and step.kind in ("wait", "timer"))
        if saga.status in ENDS and is_open:
            yield Violation("S1", saga.key, f"is {saga.status}, and {step.name} has not ended")
        if step.called is not None and (step.state == "done") != (step.called == "completed"):
            yield Violation("S1", saga.key, f"{step.kind} {step.name} is {step.state}, its operation {step.called}")


def _waits(saga: Saga) -> Iterator[Violation]:
    for step in saga.steps:
        if step.kind == "wait" and (step.state == "done") != (step.event_id is not None):
            yield Violation("S2", saga.key, f"the wait {step.name} is {step.state} with event {step.event_id}")
    for event, number in Counter(step.event_id for step in saga.steps if step.event_id is not None).items():
        if number > 1:
            yield Violation("S2", saga.key, f"event {event} has ended {number} waits")


def _undone(saga: Saga) -> Iterator[Violation]:
    names = {step.position: step.name for step in saga.steps}
    undos = [step for step in saga.steps if step.kind == "undo"]
    undone = Counter(step.undoes or 0 for step in undos if step.state == "done")
    due = Counter(
        step.position
        for step in saga.steps
        if saga.status == "FAILED" and step.undo is not None and step.kind != "undo" and step.state == "done"
    )
    for position in due - undone:
        yield Violation("S3", saga.key, f"{names[position]} was done, and was not undone")
    for undoes in undone - due:
        yield Violation("S3", saga.key, f"{names.get(undoes, 'nothing')} was undone, which was not due")
    order = [step.undoes or 0 for step in undos]
    if order != sorted(order, reverse=True):
        yield Violation("S3", saga.key, f"undone in the order {[names.get(each) for each in order]}")


_SAGAS = text("""
SELECT g.id, g.key, g.status, g.stopped, r.status FROM idempotency.sagas g
LEFT JOIN idempotency.records r ON (r.tenant, r.task, r.key) = (g.tenant, g.task, g.key)
WHERE g.task = :task ORDER BY g.key
""")
_STEPS = text("""
SELECT s.position, s.name, s.kind, s.state, s.undo, s.undoes, s.event_id, r.status
FROM idempotency.saga_steps s JOIN idempotency.sagas g ON g.id = s.saga_id AND g.generation = s.generation
LEFT JOIN idempotency.records r ON (r.tenant, r.task, r.key) = (s.tenant, s.call_task, s.call_key)
WHERE s.saga_id = :id ORDER BY s.position
""")
