"""The dead-letter consumer stops for all: each test passes while the bug is there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.orm import Session

from idempotency import OperationId, dead_letter_queue
from idempotency.dead_letter_queue import BATCH, DeadLetterConsumer
from tests import bank as b
from tests import operations as op
from tests.dead_messages import headers, reject


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection


def kill(app: Celery, accounts: list[str]) -> None:
    """Put messages into the dead-letter queue, as if a worker had rejected them."""
    queue = f"{app.conf.task_default_queue}-dead"
    with app.connection_for_write() as broker:
        channel = broker.channel()
        producer = broker.Producer(channel)
        for account in accounts:
            body = json.dumps([[account], {}, {}])
            death = {"x-first-death-queue": app.conf.task_default_queue, "x-first-death-reason": "rejected"}
            producer.publish(
                body,
                exchange="",
                routing_key=queue,
                content_type="application/json",
                content_encoding="utf-8",
                headers=headers() | death,
            )
        op.eventually(lambda: channel.queue_declare(queue, passive=True).message_count >= len(accounts))


def test_two_hundred_letters_that_wait_for_a_lock_stop_all_others(
    bank: Celery, engine: Engine, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session left open (psql, an idle report) holds the records of 200 dead messages. They are held, each for another
    try, and from 200 held ones on nothing is taken: a 201st message, of an operation that nobody locks, is not stored, its
    operation not ended, however often the consumer passes. There is no bound of tries without an on_failed, and a pass
    waits 3 s for each of them. Breaks: a letter that waits for a lock keeps no other one waiting.
    """
    monkeypatch.setattr(dead_letter_queue, "LOCK_PATIENCE", "1ms")  # 3 s each in earnest: ten minutes for a pass
    monkeypatch.setattr(dead_letter_queue, "HELD_PAUSE", 0.0)
    accounts = [f"locked-{number}" for number in range(BATCH)]
    for account in accounts:
        op.due(connection, OperationId("default", b.deposit.name, account), fingerprint=fingerprint(account))
    connection.execute(text("DELETE FROM idempotency.outbox"))
    consumer = DeadLetterConsumer(bank)
    consumer.run_once()
    kill(bank, accounts)
    own = create_engine(engine.url)
    with own.connect() as holder:
        holder.execute(text("SELECT * FROM idempotency.records FOR UPDATE"))
        assert consumer.run_once() == BATCH
        kill(bank, ["free"])
        for _ in range(12):
            assert consumer.run_once() == 0
        assert op.dead_letters(connection) == []
        assert op.record(connection, OperationId("default", b.deposit.name, "free")) is None
    own.dispose()
    consumer.close()


def fingerprint(account: str) -> str:
    from idempotency import keys

    return keys.fingerprint({"account": account, "amount": 1})


def test_an_on_failed_that_hangs_stops_letters_alarms_and_purge(
    bank: Celery, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An on_failed that waits for an answer (a web hook without a time-out) runs in the relay's one thread for dead
    letters, alerts, alarms and the purge. Nothing bounds it, and its tries are not counted up while it hangs: no other
    letter is stored, no alarm is looked for. Breaks: one letter whose on_failed cannot go on keeps none of the others.
    """
    hangs, entered = threading.Event(), threading.Event()

    def on_failed(session: Session, operation: Any, error: Any) -> None:
        if operation.key == "hangs":
            entered.set()
            hangs.wait(60)

    monkeypatch.setattr(bank.tasks[b.deposit.name], "on_failed", on_failed)
    consumer, stop, watched = DeadLetterConsumer(bank), threading.Event(), []
    consumer.run_once()
    reject(bank, json.dumps([["hangs"], {}, {}]))
    thread = threading.Thread(target=consumer.run, args=(stop, lambda: watched.append(1)))
    thread.start()
    try:
        assert entered.wait(20)
        kill(bank, [f"a{number}" for number in range(5)])
        before = len(watched)
        assert not hangs.wait(8)  # eight passes
        assert (op.dead_letters(connection), len(watched)) == ([], before)
    finally:
        stop.set()
        hangs.set()
        thread.join(30)
