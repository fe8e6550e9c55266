"""What Celery does in its own way in each version that is supported."""

from __future__ import annotations

from celery import Celery
from sqlalchemy import Connection, text

from idempotency.letters.consumer import DeadLetterConsumer
from tests.support import bank as b
from tests.support.processes import Processes, eventually
from tests.support.queues import depth


def test_a_failed_operation_has_one_dead_letter_whichever_way_its_message_leaves(
    bank: Celery, processes: Processes, connection: Connection, consumer: DeadLetterConsumer
) -> None:
    """Acknowledged since Celery 5.7; before, through the dead-letter queue."""
    processes.worker("--concurrency", "1")
    b.failing.delay("a", "permanent")
    letters = text("SELECT source, reason FROM idempotency.dead_letters")
    (letter,) = eventually(lambda: connection.execute(letters).all(), what="the letter of the operation")
    eventually(lambda: depth(bank) == 0)
    if not hasattr(b.failing, "acks_on_timeout") or b.failing.acks_on_failure_or_timeout is False:
        assert eventually(consumer.run_once) == 1
    assert consumer.run_once() == 0
    assert connection.execute(letters).all() == [letter]
    assert (letter.source, letter.reason) == ("operation", "no_account")
