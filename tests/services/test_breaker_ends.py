"""Ends that a second reader proved wrong: each test passes while the bug is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, Row, text
from sqlalchemy.orm import Session

from idempotency import (
    DidNotHappen,
    Happened,
    Operation,
    OperationId,
    PermanentError,
    StoredRefusal,
    effects,
    operators,
    records,
)
from idempotency.operators import Change
from tests import operations as op
from tests.deliveries import Deliveries
from tests.services.test_conclusions import Provider, code, deaths, lost, unwrite, write
from tests.services.test_core import age, make_task
from tests.services.test_operators import deliver_row
from tests.services.test_proven_ends import recover_now, replay, shown

ANN = Change("ann", "ticket 42")
Record = Callable[[str], Row[Any]]
Entries = Callable[[str], int]
told: list[tuple[str, Operation]] = []


def on_failed(session: Session, operation: Operation, error: PermanentError) -> None:
    told.append((error.code, operation))


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    told.clear()


@pytest.fixture
def connection(engine: Engine) -> Any:
    with engine.connect() as connection:
        yield connection


def test_a_handled_refusal_ends_the_operation_on_its_second_attempt(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    """Attempt 1: first card declined (StoredRefusal, caught), second card charged, reply lost. Attempt 2: the recorded
    refusal is raised as a plain PermanentError, so `except StoredRefusal` misses it: the operation ends although its body
    handles a declined card. Breaks: what an attempt concludes does not depend on how often it was delivered.
    """

    def first_card(*, idempotency_key: str) -> str:
        raise StoredRefusal("the card was declined", "card_declined")

    second_card = Provider(lost())

    def body(self: Any) -> Any:
        try:
            return self.effect("first", first_card)
        except StoredRefusal:
            return self.effect("second", second_card)

    task = make_task(bank, body, on_failed=on_failed)
    assert deliveries.deliver(task, key="k").state == "RETRY"
    age(engine, "k")
    outcome = deliveries.deliver(task, key="k", origin="retry")
    assert outcome.state == "FAILURE"  # and not {"charge": "ch_1"}
    assert (code(record("k")), record("k").attempts) == (("effect_unknown", "card_declined"), 2)
    assert [said for said, _ in told] == ["effect_unknown"]
    assert len(second_card.keys) == 1  # charged, and never asked about again


def test_a_handled_refusal_undoes_nothing_but_fails_a_payable_operation(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    """As before, with an ordinary error between the two cards: `failed: card_declined`, no second card is ever tried."""
    runs: list[int] = []

    class Declined(PermanentError):
        pass

    def first_card(*, idempotency_key: str) -> str:
        raise Declined("the card was declined", "card_declined")

    def body(self: Any) -> Any:
        try:
            return self.effect("first", first_card)
        except Declined:
            runs.append(1)
            if len(runs) == 1:
                raise ValueError("a deadlock, say") from None
            return self.effect("second", Provider())

    task = make_task(bank, body, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    age(engine, "k")
    deliveries.deliver(task, key="k", origin="retry")
    assert (record("k").status, code(record("k"))[0], len(runs)) == ("failed", "card_declined", 1)


def test_a_lower_max_attempts_skips_undo_and_on_failed(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, entries: Entries
) -> None:
    """Eight of ten attempts are used when a deploy lowers max_attempts to 2. The next claim ends the operation, and as
    attempts > 2 + ON_FAILED_TRIES neither the step's undo nor on_failed runs: "it has ended its process too often", which
    is untrue. The reservation stays, the business is never told. Breaks: undos run and on_failed is told at a plain end.
    """

    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=unwrite)
        raise ValueError("again")

    task = make_task(bank, body, max_attempts=10, on_failed=on_failed)
    for _ in range(8):
        assert deliveries.deliver(task, key="k", origin="retry").state == "RETRY"
        age(engine, "k")
    type(task).max_attempts = 2  # the deploy
    deliveries.deliver(task, key="k", origin="retry")
    assert record("k").status == "failed"
    assert code(record("k")) == ("unfinished", "attempts_exhausted")  # though nothing has happened outside
    assert (entries("reserved"), entries("undone reserved"), told) == (1, 0, [])
    with engine.connect() as connection:
        (letter,) = op.dead_letters(connection)
    assert letter.reason == "on_failed_error"


def test_a_lower_max_attempts_concludes_unknown_without_asking_the_provider(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    """Attempts 1 to 4 of 5 lost their replies; a deploy lowers max_attempts to 2. Attempt 5 is beyond 2 + 1, so there is no
    last look: `reconcile`, which knows the charge, is not asked. Breaks: before effect_unknown the provider is asked once.
    """
    provider, asked = Provider(*(lost() for _ in range(9))), []

    def find(*, doubt: Any) -> Happened:
        asked.append(doubt)
        return Happened({"charge": "ch_1"})

    answers: list[Any] = []

    def body(self: Any) -> Any:
        return self.effect("call", provider, reconcile=answers[0] if answers else None)

    task = make_task(bank, body, max_attempts=5, on_failed=on_failed)
    for _ in range(4):
        deliveries.deliver(task, key="k", origin="retry")
        age(engine, "k")
    answers.append(find)
    type(task).max_attempts = 2
    deliveries.deliver(task, key="k", origin="retry")
    assert (code(record("k")), asked) == (("effect_unknown", "attempts_exhausted"), [])


@pytest.mark.parametrize("value", ["declined\0", "declined\ud800"], ids=["NUL", "half a surrogate pair"])
def test_a_code_that_postgres_refuses_makes_a_declined_card_run_again_and_again(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, value: str
) -> None:
    """raise PermanentError("declined", code_of_the_provider): the failing statement is refused by Postgres in five rounds,
    the message is rejected, and the operation stays `started` until its lease is over; so at each attempt. It ends as
    attempts_exhausted. Breaks: a PermanentError ends the operation at once, as what it says.
    """
    runs: list[int] = []

    def body(self: Any) -> None:
        runs.append(1)
        raise PermanentError("the card was declined", value)

    task = make_task(bank, body, max_attempts=3, on_failed=on_failed)
    states = []
    for _ in range(4):
        states.append(deliveries.deliver(task, key="k", origin="recover").state)
        recover_now(bank, connection)
    assert states == ["REJECTED"] * 3 + ["FAILURE"]
    assert len(runs) == 3
    assert (record("k").status, code(record("k"))[0]) == ("failed", "attempts_exhausted")


def test_a_message_that_is_an_exception_makes_a_declined_card_unknown(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """raise PermanentError(error, "card_declined"): str() of it raises TypeError, also where the refusal is to be recorded.
    The refused effect stays begun, is called again under the same key until attempts are used up, and ends as
    effect_unknown. Breaks: the refusal of a first call closes the effect.
    """
    calls: list[str] = []

    def charge(*, idempotency_key: str) -> str:
        calls.append(idempotency_key)
        raise PermanentError(ValueError("declined"), "card_declined")  # type: ignore[arg-type]

    task = make_task(bank, lambda self: self.effect("call", charge), max_attempts=2, on_failed=on_failed)
    for _ in range(4):
        deliveries.deliver(task, key="k", origin="recover")
        age(engine, "k")
        recover_now(bank, connection)
    assert record("k").effects["call"]["state"] == "begun"
    assert (code(record("k"))[0], len(calls)) == ("effect_unknown", 2)


def test_a_refusal_with_a_nul_in_its_code_stays_open(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """The provider's error code goes into jsonb as it is (the message is made storable, the code is not): the refusal of a
    first call is not recorded, and the operation ends as effect_unknown. Breaks: a refused first call closes its effect.
    """

    def charge(*, idempotency_key: str) -> str:
        raise PermanentError("declined", "declined\0")

    task = make_task(bank, lambda self: self.effect("call", charge), max_attempts=2, on_failed=on_failed)
    for _ in range(4):
        deliveries.deliver(task, key="k", origin="recover")
        age(engine, "k")
        recover_now(bank, connection)
    assert (record("k").effects["call"]["state"], code(record("k"))[0]) == ("begun", "effect_unknown")
