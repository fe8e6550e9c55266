"""Submitting lines: the business row and its message in one commit, then copies of the message as duplicates.

Importing this module reads the environment (celeryconfig), so set the servers' addresses first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

from amqp.exceptions import NotFound
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from demo.input import Intake, Line
from demo.processes import QUEUES, ProcessError
from idempotency import Handle
from idempotency.queues import dead_letter_queues
from tasks import app
from tasks.payments import capture_payment, submit_payment
from tasks.refunds import refund_payment, submit_refund
from tasks.tenants import DEFAULT

# Seconds until the first worker has to be ready.
PATIENCE = 90.0


class Submission:
    """Submits lines and counts them. `copies`: how often each message is sent in total, at least 1."""

    def __init__(self, engine: Engine, intake: Intake, *, copies: int) -> None:
        self._engine = engine
        self._intake = intake
        self._duplicates = copies - 1
        self._open = ExitStack()
        self._producer: Any = self._open.enter_context(app.producer_or_acquire())
        self.accepted = 0
        if self._duplicates and app.connection_for_read().transport.driver_type == "amqp":
            _wait_for_queues()

    @property
    def events(self) -> list[str]:
        """What is worth a line once everything is submitted."""
        return []

    def submit(self, batch: Sequence[Line]) -> None:
        """Accept a batch in one commit; invalid lines are recorded as refused."""
        accepted: list[tuple[Line, Handle]] = []
        with Session(self._engine) as session, session.begin():
            session.execute(text("SELECT idempotency.about(:tenant)"), {"tenant": DEFAULT})
            for line in batch:
                try:
                    accepted.append((line, _submit(session, line)))
                except ValueError as error:
                    self._intake.refuse(line, str(error))
        self.accepted += len(accepted)
        for line, handle in accepted:
            task, argument = (
                (capture_payment, "payment_id") if line.kind == "purchase" else (refund_payment, "refund_id")
            )
            for _ in range(self._duplicates):
                task.apply_async(kwargs={argument: line.id}, task_id=handle.task_id, producer=self._producer)

    def go_on(self) -> int:
        """Do what is due after the lines that were submitted; returns how much is still to come."""
        return 0

    def messages_waiting(self) -> int:
        """How many messages in the broker's queues have not been handed to a worker."""
        waiting = 0
        with app.connection_for_read() as connection, connection.channel() as channel:
            for name in QUEUES:
                try:
                    waiting += app.amqp.queues[name](channel).queue_declare(passive=True).message_count
                except connection.channel_errors:
                    # Redis does not keep empty queues.
                    continue
        return waiting

    def wipe_broker(self, url: str) -> int:
        """Delete every queue and its messages, with an address that may; returns how many were waiting."""
        waiting = self.messages_waiting()
        queues = list(app.amqp.queues.values())
        delayed = [f"celery_delayed_{level}" for level in range(28)]
        names = [queue.name for queue in [*queues, *dead_letter_queues(queues)]] + delayed
        with app.connection_for_write(url) as connection, connection.channel() as channel:
            for name in names:
                channel.queue_delete(name)
        return waiting

    def close(self) -> None:
        """Return the connection to the broker."""
        self._open.close()


def _wait_for_queues() -> None:
    """Wait until workers have declared the queues: an application's user may not."""
    deadline = time.monotonic() + PATIENCE
    with app.connection_for_read() as connection:
        for name in QUEUES:
            while time.monotonic() < deadline:
                with suppress(NotFound), connection.channel() as channel:
                    app.amqp.queues[name](channel).queue_declare(passive=True)
                    break
                time.sleep(0.1)
            else:
                raise ProcessError(f"no worker declared the queue {name} within {PATIENCE:g} s")


def _submit(session: Session, line: Line) -> Handle:
    if line.kind == "purchase":
        return submit_payment(
            session, payment_id=line.id, customer_id=line.customer_id, amount=line.amount, currency=line.currency
        )
    return submit_refund(
        session, refund_id=line.id, payment_id=line.purchase_id, amount=line.amount, reason=line.reason
    )
