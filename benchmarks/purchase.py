"""A purchase of the example application as a pool process of the demo sees it: a charge, its e-mail, a copy of the charge.

The provider and the mail server are the sandbox's, without its faults.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from celery import Celery, Task
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from idempotency.application import close_runtime
from idempotency.wire.message import Message
from sandbox import process as sandbox

from .attempts import Delivered, carry_out

_MESSAGES = text("SELECT message FROM idempotency.outbox WHERE task = :task ORDER BY id")


@dataclass(frozen=True, slots=True)
class Deliveries:
    """Deliveries of a task's messages, each to be run once."""

    name: str
    task: Task
    messages: Iterator[Delivered]

    def run(self, many: int) -> None:
        """Carry out the next ones."""
        carry_out(self.task, islice(self.messages, many))


@contextmanager
def accepted(database_url: str, directory: Path, many: int) -> Iterator[tuple[Celery, list[Deliveries]]]:
    """Accept so many purchases in the database of the environment. Gives the application, and what is delivered of them, to be run in this order."""
    with (
        sandbox.running("provider", directory / "provider") as provider,
        sandbox.running("mail", directory / "mail") as mail,
    ):
        os.environ.update(STRIPE_API_BASE=provider.url, SMTP_URL=mail.url)
        # importing the application reads the environment
        from tasks import app
        from tasks.migrate import migrate
        from tasks.notifications import send_notification
        from tasks.payments import capture_payment, submit_payment

        engine = create_engine(database_url)
        migrate(engine)
        with Session(engine) as session, session.begin():
            for number in range(many):
                submit_payment(session, payment_id=f"p{number}", customer_id=f"{number}", amount=1500, currency="USD")

        def messages(task: Task) -> Iterator[Delivered]:
            with engine.connect() as connection:  # at the first delivery: what causes the events has run by then
                found = connection.scalars(_MESSAGES, {"task": task.name}).all()
            for message in map(Message.from_text, found):
                args, kwargs, _ = json.loads(message.body)
                yield Delivered(message.headers, args, kwargs)

        names = {"charge": capture_payment, "its e-mail": send_notification, "copy of a charge": capture_payment}
        try:
            yield app, [Deliveries(name, task, messages(task)) for name, task in names.items()]
        finally:
            close_runtime(app)
            engine.dispose()
