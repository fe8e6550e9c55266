"""What the claims of a batch are for: while it runs, everyone else finds that its operations run, and ends or takes over none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from idempotency import IdempotentTask, OperationId
from idempotency.errors import DiscardRefused
from idempotency.operate import discard
from idempotency.operate.people import Person
from idempotency.relay.resend import resend_lost
from idempotency.store import letters
from idempotency.store.letters import BrokerLetter
from idempotency.upkeep import maintenance
from tests.support import operations as op
from tests.support.batches import accounts, many, put, run, states, together
from tests.support.operators import act
from tests.support.tasks import enqueued, make_task

BEN, EVE = Person("ben", "admin"), Person("eve", "operator")
KINDS = pytest.mark.parametrize("commit", ["together", "each"])
# Seconds.
SOON = 30


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@KINDS
def test_a_letter_cannot_be_discarded_while_a_batch_runs_its_operation(
    bank: Celery, engine: Engine, commit: str
) -> None:
    refused: list[str] = []

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        if account == "e0" and not refused:
            with pytest.raises(DiscardRefused) as error:
                give_up(letter.id)
            refused.append(str(error.value))

    def give_up(letter: int) -> None:
        act(bank, discard.request, EVE, letter, "give it up")
        act(bank, discard.approve, BEN, letter)

    task = make_task(bank, body, key="{account}", batch=10, max_attempts=1, batch_commit=commit)
    id = OperationId("default", task.name, "e1")
    with engine.connect() as connection:
        enqueued(connection, task, "e1")
        (row,) = op.outbox(connection, id)
        op.sent(connection, id)
        found = ("default", task.name, "e1", None, row.fingerprint, row.queue, task.name, op.SERVICE)
        why = ("unhandled", None, "x", 0, "{}", row.message, "digest")
        letters.store_message(connection, BrokerLetter(row.message_id, *found, *why))
        (letter,) = op.dead_letters(connection, id)
    run(bank, task, *many(bank, task))
    assert "the operation is running" in refused[0]
    with engine.connect() as connection:
        assert [each.status for each in op.dead_letters(connection, id)] == ["open"]
    assert (accounts(engine)["e1"], states(engine)["e1"]) == ([1], "completed")


def test_what_a_long_batch_runs_is_not_taken_for_lost(bank: Celery, engine: Engine) -> None:
    """Also if no worker can be asked what it holds, as without remote control."""
    resent: list[int] = []

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        if account == "e2":
            with engine.connect() as connection:
                connection.execute(
                    text("UPDATE idempotency.outbox SET published_at = published_at - interval '2 minutes'")
                )
            resent.append(resend_lost(bank).resent)

    task = together(bank, body)
    with engine.connect() as connection:
        for n in range(3):
            enqueued(connection, task, f"e{n}")
            op.sent(connection, OperationId("default", task.name, f"e{n}"))
    run(bank, task, *many(bank, task))
    assert resent == [0]
    assert accounts(engine) == {"e0": [1], "e1": [1], "e2": [1]}


@pytest.mark.few(1)
@KINDS
def test_what_hangs_in_a_batch_is_taken_over_and_commits_nothing_when_it_goes_on(
    bank: Celery, engine: Engine, threads: ThreadPoolExecutor, configure: Any, commit: str
) -> None:
    configure(lease=1.0, heartbeat=0.25, max_run=2.0, retention_http=3600.0)
    hangs, wake = threading.Event(), threading.Event()

    def body(self: IdempotentTask, account: str) -> None:
        if account == "e1" and not hangs.is_set():
            hangs.set()
            assert wake.wait(SOON)
        put(self, account)

    task = make_task(bank, body, key="{account}", batch=10, batch_commit=commit)
    of_batch = threads.submit(run, bank, task, *many(bank, task))
    assert hangs.wait(SOON)
    until = time.monotonic() + SOON
    while states(engine).get("e1") != "released" and time.monotonic() < until:
        time.sleep(0.25)
        maintenance.recover(bank)
    assert states(engine)["e1"] == "released"
    with engine.connect() as connection:
        again = {row.key: row.origin for row in op.outbox(connection)}
    assert again["e1"] == "recover"
    wake.set()
    of_batch.result(SOON)
    run(bank, task, *many(bank, task))
    assert accounts(engine) == {"e0": [1], "e1": [1], "e2": [1]}
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed")
