"""Negative controls: without the record of an undo, or of what has ended a wait, the oracle tells."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from idempotency.sagas import compensation, saga, waits
from tests.controls.safeguards import Removal
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage


def undone_once(stage: Stage) -> list[str]:
    """A saga of two calls that fails. What the oracle finds wrong."""
    make, void = entering(stage, "make"), entering(stage, "void")
    make.refuses.add("bad")

    @saga("failing", key="{id}", app=stage.app)
    def failing(saga: Any, id: str) -> Any:
        for thing in ("a", "b", "bad"):
            saga.call(make, thing=thing, undo=void)

    stage.enqueue(failing, "r1")
    stage.run()
    problems = [] if stage.saga("r1").status == "FAILED" else ["the saga has not ended"]
    if stage.accounts() != ["make:a", "make:b", "void:b", "void:a"]:
        problems.append(f"done and undone: {stage.accounts()}")
    return problems


def decided_once(stage: Stage) -> list[str]:
    """A saga whose wait times out, and whose event comes while it waits for something else."""

    @saga("late", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def late(saga: Any, id: str) -> Any:
        event = saga.wait_for("picked", match=id, timeout=timedelta(hours=1))
        outcome = "timed out" if event is None else "picked"
        saga.step("note", enter, outcome)
        saga.sleep(timedelta(hours=1))
        return outcome

    handle = stage.enqueue(late, "r1")
    stage.run()
    stage.pass_time(3601.0)
    stage.run()
    stage.publish("picked", {"id": "r1"})
    stage.pass_time(3601.0)
    stage.run()
    outcomes = {*stage.accounts(), handle.result() if handle.status() == "completed" else handle.status()}
    return [] if outcomes == {"timed out"} else [f"outcomes of one wait: {sorted(outcomes)}"]


def no_record_of_undos(removal: Removal) -> None:
    """An undo is sent, and no row says so: the saga never hears of its end."""

    def send_only(attempt: Any, rows: Any, each: Any) -> None:
        for row, call in zip(rows, each, strict=True):
            call.task._enqueue(attempt.session, tuple(call.args), dict(call.kwargs), {"idempotency_key": row.call_key})
        attempt.wait(1)

    removal.set(compensation, "begin", send_only)


def no_record_of_the_winner(removal: Removal) -> None:
    """What has ended a wait is known to this run of the code alone: the next one finds the event, and stops as a mismatch."""

    def decide(attempt: Any, row: Any, event: Any) -> None:
        row.event_id, row.result = event or (None, None)
        row.state = "done" if event is not None or row.kind == "timer" else "timed_out"

    removal.set(waits, "_decide", decide)


@pytest.mark.parametrize(
    ("scenario", "remove", "problems"),
    [
        (
            undone_once,
            no_record_of_undos,
            ["the saga has not ended", "done and undone: ['make:a', 'make:b', 'void:b']"],
        ),
        (decided_once, no_record_of_the_winner, ["outcomes of one wait: ['released', 'timed out']"]),
    ],
    ids=["the record of an undo", "the winner of a wait"],
)
def test_without_its_record_an_undo_or_a_wait_ends_wrong(
    stage: Stage, scenario: Callable[[Stage], list[str]], remove: Callable[[Removal], None], problems: list[str]
) -> None:
    removal = Removal()
    remove(removal)
    try:
        assert scenario(stage) == problems
    finally:
        removal.undo()


@pytest.mark.parametrize("scenario", [undone_once, decided_once])
def test_with_its_records_a_saga_is_undone_once_and_a_wait_decided_once(
    stage: Stage, scenario: Callable[[Stage], list[str]]
) -> None:
    assert scenario(stage) == []
