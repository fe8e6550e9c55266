"""The rules about sagas and about what people have cancelled: each broken once is reported, and the right thing is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from demo.order_books import LABEL, SAGA, OrderVerdict, check_orders
from tests.chaos.monitor import TAIL, Ended, explanation, last_words
from tests.chaos.saga_books import Saga, SagaStep, check_sagas
from tests.pipeline.agreeing_orders import AMOUNT, REFUND_OF_RETURN, RULES, A, N, X, agreeing, of

OPEN = SagaStep(1, "open", "step", "done")
LABELLED = SagaStep(2, "create_label", "call", "done", undo="void_label", called="completed")
RESHIPPED = SagaStep(5, "create_label#2", "call", "done", undo="void_label", called="completed")
COLLECTED = SagaStep(3, "collected", "wait", "done", event_id=7)
INSPECTED = SagaStep(4, "inspected", "wait", "done", event_id=8)
LATER = SagaStep(4, "inspected", "wait", "begun")


def undo(position: int, undoes: int, **more: Any) -> SagaStep:
    return SagaStep(position, f"undo {undoes}", "undo", "done", undoes=undoes, called="completed")._replace(**more)


DONE = Saga("r-1", "COMPLETED", None, "completed", [OPEN, LABELLED, COLLECTED, INSPECTED])
UNDONE = Saga(
    "r-2", "FAILED", None, "failed", [OPEN, LABELLED, COLLECTED, INSPECTED, RESHIPPED, undo(6, 5), undo(7, 2)]
)
# cancelled while it waited
WAITED = Saga("r-3", "FAILED", None, "failed", [OPEN, LABELLED, COLLECTED, LATER, undo(5, 2)])
TIMED_OUT = Saga(
    "r-4", "COMPLETED", None, "completed", [OPEN, LABELLED, COLLECTED._replace(state="timed_out", event_id=None)]
)


def steps(saga: Saga, *steps: SagaStep) -> Saga:
    """The saga with these steps in place of those of the same positions, or besides."""
    by_position = {step.position: step for step in (*saga.steps, *steps)}
    return dataclasses.replace(saga, steps=[by_position[position] for position in sorted(by_position)])


def without(saga: Saga, position: int) -> Saga:
    return dataclasses.replace(saga, steps=[step for step in saga.steps if step.position != position])


def test_sagas_that_ended_as_they_may_are_right() -> None:
    assert list(check_sagas([DONE, UNDONE, WAITED, TIMED_OUT])) == []


SWAPPED = [*UNDONE.steps[:-2], undo(6, 2), undo(7, 5)]
WRONG: dict[str, tuple[Sequence[Saga], str, str]] = {
    "two of a key": ([DONE, DONE], "S1", "there are 2 sagas"),
    "one that runs": ([dataclasses.replace(DONE, status="RUNNING")], "S1", "has not ended: RUNNING"),
    "one that is half undone": ([dataclasses.replace(UNDONE, status="COMPENSATING")], "S1", "has not ended"),
    "one that has stopped": ([dataclasses.replace(DONE, stopped="saga_mismatch")], "S1", "stopped saga_mismatch"),
    "a record that says otherwise": ([dataclasses.replace(DONE, record="failed")], "S1", "its operation failed"),
    "a record that is gone": ([dataclasses.replace(DONE, record=None)], "S1", "its operation None"),
    "a step that has not ended": ([steps(DONE, LABELLED._replace(state="begun", called=None))], "S1", "has not ended"),
    "a wait that goes on after success": ([steps(DONE, LATER)], "S1", "inspected has not ended"),
    "a call that did not run": ([steps(DONE, LABELLED._replace(called="failed"))], "S1", "its operation failed"),
    "an undo that did not run": ([steps(WAITED, undo(5, 2, called="released"))], "S1", "its operation released"),
    "a wait without a winner": ([steps(DONE, COLLECTED._replace(event_id=None))], "S2", "with event None"),
    "a wait with two winners": ([steps(DONE, COLLECTED._replace(state="timed_out"))], "S2", "timed_out with event 7"),
    "an event used twice": ([steps(DONE, INSPECTED._replace(event_id=7))], "S2", "event 7 has ended 2 waits"),
    "nothing undone": ([without(WAITED, 5)], "S3", "create_label was done, and was not undone"),
    "one thing not undone": ([without(UNDONE, 6)], "S3", "create_label#2 was done, and was not undone"),
    "undone though it succeeded": ([steps(DONE, undo(5, 2))], "S3", "create_label was undone, which was not due"),
    "undone twice": ([steps(WAITED, undo(6, 2))], "S3", "create_label was undone, which was not due"),
    "undone though it has no undo": ([steps(WAITED, undo(6, 1))], "S3", "open was undone, which was not due"),
    "undone in the wrong order": ([dataclasses.replace(UNDONE, steps=SWAPPED)], "S3", "undone in the order"),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_checker_sees(what: str) -> None:
    sagas, invariant, said = WRONG[what]
    assert invariant in {found.invariant for found in check_sagas(sagas) if said in found.what}, what


# ---------------------------------------------------------------- what a person has cancelled at any moment


def cancelled(directory: Path, order: str, *, collected: bool, **more: Any) -> OrderVerdict:
    """The books of agreeing orders, of which a person has cancelled a return; `more`: books in place of these."""
    books, id = agreeing(directory / "agreeing"), of(order)
    status = "ESCALATED" if collected else "CANCELLED"
    # what was done is kept, and a person is told of it
    problems = ["cancelled", *["already_refunded", "already_booked"] * (order in REFUND_OF_RETURN)]
    label_id, end = f"lbl-return-{order}", "collected" if collected else "voided"
    mails = [mail for mail in books.mails if not mail.subject.endswith(id) or "labelled" in mail.subject]
    changed: dict[str, Any] = {
        "told": dataclasses.replace(books.told, overruled={id}),
        "returns": {
            **books.returns,
            id: books.returns[id]._replace(
                is_collected=collected, status=status, problem=", ".join(problems), saga="FAILED"
            ),
        },
        "labels": {**books.labels, label_id: books.labels[label_id]._replace(status=end)},
        "carrier": [dataclasses.replace(each, status=end) if each.id == label_id else each for each in books.carrier],
        "return_cases": {each for each in books.return_cases if each[0] != id}
        | ({(id, problem) for problem in problems} if collected else set()),
        "mails": [*mails, dataclasses.replace(mails[0], message_id="<end>", subject=f"return.{status.lower()} {id}")],
        "notifications": {
            **{
                about: sent
                for about, sent in books.notifications.items()
                if not about.endswith(id) or "labelled" in about
            },
            f"return.{status.lower()}:{id}": "sent",
        },
        "unfinished": {**books.unfinished, (SAGA, id): "failed"},
    }
    return check_orders(dataclasses.replace(books, **(changed | more)), RULES)


@pytest.mark.parametrize("collected", [False, True])
def test_a_return_cancelled_at_any_moment_is_right(tmp_path: Path, collected: bool) -> None:
    # nothing was booked of one that was never collected
    verdict = cancelled(tmp_path, N, collected=collected)
    assert verdict.discrepancies == []
    assert verdict.returns["COMPENSATED"] == 2


def test_one_cancelled_after_its_refund_keeps_what_is_done(tmp_path: Path) -> None:
    assert cancelled(tmp_path, A, collected=True).discrepancies == []


def test_one_that_nobody_cancelled_must_end_as_planned(tmp_path: Path) -> None:
    books = agreeing(tmp_path / "told")
    verdict = cancelled(tmp_path, N, collected=False, told=books.told)
    assert of(N) in {found.id for found in verdict.discrepancies}


def test_one_that_is_refunded_although_nothing_came_is_seen(tmp_path: Path) -> None:
    verdict = cancelled(tmp_path, A, collected=False)
    said = [f"{found.id} {found.what}" for found in verdict.discrepancies]
    assert any(each.startswith(f"{A} money: the provider holds 0 EUR of it, {AMOUNT} are due") for each in said)
    assert any(each.startswith(f"{of(A)} movements") for each in said)


def test_one_whose_label_stays_valid_is_seen(tmp_path: Path) -> None:
    books = agreeing(tmp_path / "carrier")
    id = f"lbl-return-{N}"
    valid = [dataclasses.replace(each, status="created") if each.id == id else each for each in books.carrier]
    verdict = cancelled(tmp_path, N, collected=False, carrier=valid)
    assert any(found.id == of(N) and "labels" in found.what for found in verdict.discrepancies)


def test_a_call_that_the_carrier_refused_may_be_missing_then(tmp_path: Path) -> None:
    books = agreeing(tmp_path / "refused")
    unfinished = {id: status for id, status in books.unfinished.items() if id[0] != LABEL} | {(SAGA, of(X)): "failed"}
    assert cancelled(tmp_path, X, collected=True, unfinished=unfinished).discrepancies == []


def test_the_shops_workers_are_explained_as_the_others() -> None:
    tail = ("celery.exceptions.WorkerLostError: Could not start worker processes",)
    ended = Ended("shop-worker-1", "shop-worker", 1, tail)
    assert explanation(ended) is not None
    assert explanation(dataclasses.replace(ended, kind="shop-relay")) is None


def test_what_a_worker_ends_of_is_known_although_it_names_what_it_had_received_after_it() -> None:
    received = [f"Task chaos.deposit[{number}] received" for number in range(3 * TAIL)]
    fatal = [
        "Unrecoverable error: WorkerLostError('Could not start worker processes')",
        "WorkerLostError: Could not start worker processes",
    ]
    for log, is_known in ((["begins", *fatal, *received], True), ([*fatal[1:], *received], False), (received, False)):
        ended = Ended("worker-4", "worker", 1, last_words("\n".join(log)))
        assert (explanation(ended) is not None) is is_known
        assert ended.tail[-1] == received[-1]
        assert len(ended.tail) <= 2 * TAIL
