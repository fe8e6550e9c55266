"""A purchase of the example application as a pool process of the demo sees it: a charge, its e-mail, a copy of either.

The provider and the mail server are the sandbox's, without its faults.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.app.trace import build_tracer
from celery.states import EXCEPTION_STATES
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from idempotency.application import close_runtime
from idempotency.wire.message import Message
from sandbox import process as sandbox

_MESSAGES = text("SELECT message FROM idempotency.outbox WHERE task = :task ORDER BY id")


@dataclass(frozen=True, slots=True)
class Deliveries:
    """Deliveries of a task's messages, each to be run once."""

    name: str
    task: Task
    messages: Iterator[Message]

    def run(self, many: int) -> None:
        """Carry out the next ones, as a pool process does."""
        tracer = build_tracer(self.task.name, self.task, app=self.task.app)
        for _ in range(many):
            message = next(self.messages)
            args, kwargs, _ = json.loads(message.body)
            route = {"exchange": "bench", "routing_key": "unique", "priority": None}
            request: Mapping[str, Any] = {**message.headers, "delivery_info": route, "args": args, "kwargs": kwargs}
            outcome = tracer(message.headers["id"], args, kwargs, request).info
            if outcome is not None and outcome.state in EXCEPTION_STATES:  # a copy is ignored
                raise RuntimeError(f"{self.task.name}: {outcome.state}")


@contextmanager
def accepted(database_url: str, directory: Path, many: int) -> Iterator[tuple[Celery, list[Deliveries]]]:
    """Accept so many purchases. Gives the application, and what is delivered of them, to be run in this order."""
    with (
        sandbox.running("provider", directory / "provider", "--faults", "") as provider,
        sandbox.running("mail", directory / "mail", "--faults", "") as mail,
    ):
        os.environ.update(STRIPE_API_BASE=provider.url, SMTP_URL=mail.url, DATABASE_URL=database_url)
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

        def messages(task: Task) -> Iterator[Message]:
            with engine.connect() as connection:  # at the first delivery: what causes the events has run by then
                found = connection.scalars(_MESSAGES, {"task": task.name}).all()
            yield from map(Message.from_text, found)

        names = {"charge": capture_payment, "its e-mail": send_notification, "copy of a charge": capture_payment}
        try:
            yield app, [Deliveries(name, task, messages(task)) for name, task in names.items()]
        finally:
            close_runtime(app)
            engine.dispose()
