"""Changes of people and sweeps that Postgres ends because a body and they wait for each other: they are made again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from idempotency.store.statements import DEADLOCK, TRIES, repeatable, sqlstate

TAKE = text("UPDATE entries SET amount = amount + 1 WHERE account = :account")
# Seconds.
SOON = 30


@pytest.fixture
def meeting(engine: Engine) -> threading.Barrier:
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO entries (account, amount) VALUES ('a', 0), ('b', 0)"))
    return threading.Barrier(2)


def test_of_two_changes_that_wait_for_each_other_both_are_made(engine: Engine, meeting: threading.Barrier) -> None:
    tries: list[str] = []
    transactional = engine.execution_options(isolation_level="READ COMMITTED")

    @repeatable
    def change(first: str, second: str) -> None:
        tries.append(first)
        with transactional.begin() as connection:
            connection.execute(TAKE, {"account": first})
            if len(tries) <= 2:
                meeting.wait(SOON)
            connection.execute(TAKE, {"account": second})

    with ThreadPoolExecutor(2) as threads:
        for made in (threads.submit(change, "a", "b"), threads.submit(change, "b", "a")):
            made.result(SOON)
    # three, as a rule: the other's process may be woken later than the pause after a deadlock takes
    assert 3 <= len(tries) <= 1 + TRIES
    with engine.connect() as connection:
        assert connection.execute(text("SELECT amount FROM entries ORDER BY account")).scalars().all() == [2, 2]


def test_what_is_always_ended_says_so_in_the_end(engine: Engine) -> None:
    tries: list[int] = []

    @repeatable
    def change() -> None:
        tries.append(1)
        with engine.begin() as connection:
            connection.execute(text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40P01'; END $$"))

    with pytest.raises(DBAPIError) as refused:
        change()
    assert (sqlstate(refused.value), len(tries)) == (DEADLOCK, TRIES)
