"""What a process logs of an outage of Postgres, and how long it leaves Postgres alone."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from celery.app.task import Context
from sqlalchemy.exc import OperationalError

from idempotency.attempt.endings import Ended
from idempotency.observe import outages
from idempotency.observe.outages import Outage, Pauses
from idempotency.observe.unreachable import reason
from idempotency.store.answers import Busy
from idempotency.store.statements import is_news
from idempotency.worker.prepared import BUDGET, note_end
from idempotency.worker.waiting import Budget


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(outages, "time", clock)
    monkeypatch.setattr(outages, "postgres", Outage())
    return clock


def refused(orig: BaseException) -> OperationalError:
    return OperationalError("SELECT 1", None, orig)


def test_an_outage_is_news_once_however_long_it_lasts(clock: Clock) -> None:
    away = refused(psycopg.OperationalError("connection refused"))
    assert is_news(away)
    for _ in range(1000):
        clock.now += 30.0
        assert not is_news(away)
    clock.now += outages.QUIET + 1
    assert is_news(away)


@pytest.mark.parametrize(
    "error",
    [
        psycopg.errors.AdminShutdown(),
        psycopg.errors.CannotConnectNow(),
        psycopg.errors.TooManyConnections(),
        psycopg.errors.ConnectionFailure(),
    ],
)
def test_a_server_that_says_it_is_not_there_is_away(clock: Clock, error: psycopg.Error) -> None:
    assert [is_news(refused(error)), is_news(error)] == [True, False]


@pytest.mark.parametrize("error", [psycopg.errors.LockNotAvailable(), psycopg.errors.QueryCanceled()])
def test_what_an_answering_server_refuses_is_always_news(clock: Clock, error: psycopg.Error) -> None:
    assert is_news(refused(psycopg.OperationalError()))
    assert [is_news(refused(error)), is_news(refused(error)), is_news(ValueError())] == [True] * 3


def test_pauses_grow_until_there_is_an_answer() -> None:
    pauses = Pauses()
    assert [pauses.next() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    pauses.end()
    assert pauses.next() == 1.0


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            psycopg.OperationalError('connection failed: FATAL:  database "secret" does not exist'),
            "no such database or user",
        ),
        (psycopg.OperationalError("connection failed: password authentication failed for secret"), "wrong password"),
        (psycopg.OperationalError("secret"), "OperationalError"),
        (psycopg.errors.LockNotAvailable("canceling statement due to lock timeout"), "LockNotAvailable"),
    ],
)
def test_why_a_server_is_away_is_said_without_its_own_words(error: psycopg.Error, why: str) -> None:
    assert (reason(refused(error)), reason(error)) == (why, why)


@pytest.mark.parametrize(("outcome", "is_spent"), [(Busy(), True), (Ended(ValueError("no")), False)])
def test_what_redis_has_answered_is_no_answer_of_postgres(outcome: Any, is_spent: bool) -> None:
    """A hint says that another delivery runs: Postgres may be as far away as when the one before waited for it in vain."""
    budget = Budget(is_spent=True)
    note_end(Context({BUDGET: budget}), outcome)
    assert budget.is_spent is is_spent
