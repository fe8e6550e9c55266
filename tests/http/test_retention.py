"""What becomes of requests over HTTP that have done something, once their clients do not come back in time."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from celery import Celery
from sqlalchemy import Engine, text

from idempotency.application import runtime_of
from idempotency.http import RequestAttempt
from idempotency.operate.replay import replay
from idempotency.upkeep.maintenance import purge
from idempotency.wire.keys import OperationId
from tests.http.test_handlers import post, with_effects
from tests.support import operations as op
from tests.support.edge import INSERT, Edge, new_key
from tests.support.operators import ANN

DAY = 24 * 3600.0


@pytest.fixture
def own(bank: Celery, engine: Engine) -> Edge:
    """The edge in a process of an application that has a relay."""
    return Edge(runtime_of(bank), engine)


def let_pass(edge: Edge, key: str, seconds: float) -> None:
    """What that much time does to a record."""
    times = ("updated_at", "created_at", "opened_at", "completed_at", "available_at", "expires_at")
    earlier = ", ".join(f"{time} = {time} - make_interval(secs => :seconds)" for time in times)
    with edge.engine.connect() as connection:
        connection.execute(
            text(f"UPDATE idempotency.records SET {earlier} WHERE key = :key"), {"seconds": seconds, "key": key}
        )


class Provider:
    """Acts once per key, and keeps its keys."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def charge(self, amount: int, *, idempotency_key: str) -> dict[str, int]:
        self.keys.add(idempotency_key)
        return {"charged": amount}

    def vanish(self, amount: int, *, idempotency_key: str) -> None:
        raise ConnectionError("no answer")


def reserve(attempt: RequestAttempt) -> None:
    attempt.step("reserve", lambda session: session.execute(INSERT, {"account": attempt.key}).rowcount)


HALVES = {
    "a charge": (lambda attempt: attempt.effect("charge", Provider().charge, 5), "unfinished"),
    "a call without an answer": (lambda attempt: attempt.effect("charge", Provider().vanish, 5), "effect_unknown"),
    "a step": (reserve, "abandoned"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("half", "code"), HALVES.values(), ids=HALVES)
def test_a_request_that_is_left_half_done_gets_a_dead_letter(bank: Celery, own: Edge, half: Any, code: str) -> None:
    key = new_key()

    def work(attempt: RequestAttempt) -> None:
        half(attempt)
        raise ValueError("after it")

    app = with_effects(own, work)
    assert post(app, key)[0].status_code == 500
    let_pass(own, key, DAY - 60)
    assert (purge(bank), own.letters(key)) == (0, [])  # the client still may
    let_pass(own, key, 120)
    assert (purge(bank), own.letters(key)) == (0, [code])
    record: Any = own.record(key)
    assert (record.status, record.error_code) == ("failed", code)
    before = own.entries(key)
    (late,) = post(app, key)
    assert (late.status_code, late.json()["code"], own.entries(key)) == (500, code, before)


@pytest.mark.long
def test_a_replayed_letter_whose_client_does_not_come_back_is_a_letter_again(bank: Celery, own: Edge) -> None:
    key, failures = new_key(), [ValueError("after it")]

    def work(attempt: RequestAttempt) -> Any:
        charged = attempt.effect("charge", provider.charge, 5)
        if failures:
            raise failures.pop()
        return charged

    provider = Provider()
    app = with_effects(own, work)
    post(app, key)
    for _ in range(2):
        let_pass(own, key, DAY + 60)
        purge(bank)
        with own.engine.connect() as connection:
            letter = op.dead_letters(connection, OperationId("default", "http", key))[-1]
        assert (letter.status, letter.reason) == ("open", "unfinished")
        replay(bank, letter.id, ANN)
    (answer,) = post(app, key)  # it does come back
    assert (answer.status_code, len(provider.keys)) == (201, 1)


@pytest.mark.long
@pytest.mark.parametrize(("acts", "days"), [(False, 1), (True, 3)], ids=["a row", "a charge"])
def test_a_key_is_free_when_nothing_outside_remembers_it(bank: Celery, own: Edge, acts: bool, days: int) -> None:
    key, provider = new_key(), Provider()

    def work(attempt: RequestAttempt) -> Any:
        charged = attempt.effect("charge", provider.charge, 5) if acts else None
        attempt.session.execute(INSERT, {"account": key})
        return charged

    app = with_effects(own, work)

    def late() -> httpx.Response:
        purge(bank)
        return post(app, key)[0]

    post(app, key)
    let_pass(own, key, days * DAY - 60)
    assert (late().headers.get("idempotency-replayed"), own.entries(key)) == ("true", 1)
    let_pass(own, key, 120)
    assert (late().headers.get("idempotency-replayed"), own.entries(key)) == (None, 2)
