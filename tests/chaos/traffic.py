"""Accepted operations at a bounded rate: each a row and its message in one commit, and then the message twice more.

Some are called eagerly besides, some are only sent, and some have a copy that every worker must reject.

A commit whose answer was lost is neither accepted nor refused: the table `submitted` tells, when all is over.
"""

from __future__ import annotations

import json
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from amqp.exceptions import AMQPError
from kombu.exceptions import OperationalError as BrokerError
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency.application import runtime_of
from idempotency.store.statements import describe
from idempotency.wire.headers import SIGNATURE_HEADER
from idempotency.wire.message import Message
from idempotency.wire.signing import sign
from tests.chaos import application
from tests.chaos.monitor import is_of_the_storm

TENANTS = ("red", "blue")
# Copies of each message besides the one from the outbox.
COPIES = 2
# Of a hundred operations; what is not listed deposits.
SHARES = {
    "transfer": 11,
    "charge": 12,
    "announce": 8,
    "ordered": 8,
    "event": 5,
    "waited": 5,
    "flaky": 5,
    "deferred": 5,
    "refused": 5,
    "direct": 4,
    "changed": 4,
    "novel": 3,
    "stumble": 2,
    "refunded": 4,
    "hopeless": 2,
    "ungrateful": 2,
}
# One of so many kills the process that runs it, as often as it is run; and of one the failure can never be told.
RARE_EVERY = 400
RARE = {100: "poison", 200: "stuck"}
# What may be called eagerly besides; what is only sent always is.
EAGER = ("deposit", "waited", "transfer", "charge", "deferred", "flaky", "ordered", "changed")
CALLED = 0.2
# Copies that are past their `expires`, which the broker gives up.
EXPIRED = 0.03
# Of all ordered operations; each transaction takes two of them, in any order.
LINES = 3
# A connection that was reset is noticed by the first publish on it.
_RETRY = {"max_retries": 1, "interval_start": 0.1}
_BROKER_ERRORS = (AMQPError, BrokerError, OSError)

_MESSAGES = text("SELECT message FROM idempotency.outbox WHERE key = :key")
_MESSAGE = text("SELECT message FROM idempotency.outbox WHERE key = :key AND tenant = :tenant AND task = :task")
_CALL = text("INSERT INTO calls (task, tenant, arguments) VALUES (:task, :tenant, cast(:arguments AS jsonb))")


@dataclass
class Tally:
    """What became of the submissions, by the submitter's own knowledge."""

    committed: int = 0
    unknown: int = 0
    # what was committed, by kind
    kinds: Counter[str] = field(default_factory=Counter)
    copies: int = 0
    unsent: int = 0
    # copies that every worker must reject
    rejected: int = 0
    # submissions that no fault explains the refusal of
    refused: list[str] = field(default_factory=list)
    # (tenant, operation, key) of what was certainly committed
    certain: list[tuple[str, str, str]] = field(default_factory=list)


Copy = Callable[[], object]


class Traffic:
    """A thread that submits through `engine`, and one that sends the copies."""

    def __init__(
        self,
        engine: Engine,
        *,
        seed: int,
        rate: float,
        url: str,
        may_go_on: Callable[[], bool],
        shares: Mapping[str, int] = SHARES,
        rare: Mapping[int, str] = RARE,
    ) -> None:
        self._shares, self._rare = shares, rare
        self._engine = engine
        self._chance = random.Random(f"traffic {seed}")
        self._rate = rate
        self._url = url
        self._may_go_on = may_go_on
        self._stop = threading.Event()
        # bounded: while the broker is away copies are left out, not heaped up
        self._copies: queue.Queue[Copy] = queue.Queue(maxsize=1000)
        self._numbers = 0
        self.tally = Tally()
        self._threads = [
            threading.Thread(target=self._submit_all, name="submitter", daemon=True),
            threading.Thread(target=self._send_copies, name="copies", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Accept no more; returns when what was accepted has been copied."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    # ------------------------------------------------------------ submitting

    def _submit_all(self) -> None:
        pause = len(TENANTS) / self._rate
        due = time.monotonic()
        while not self._stop.wait(max(due - time.monotonic(), 0.0)):
            due = max(due + pause, time.monotonic() - 1.0)  # failed submissions are not caught up all at once
            if self._may_go_on():
                self._submit()

    def _submit(self) -> None:
        """One operation for each tenant, under the same key, in one transaction."""
        self._numbers += 1
        number, kind = str(self._numbers), self._draw()
        certain: list[tuple[str, str, str]] = []
        copies: list[Copy] = []
        try:
            with Session(self._engine) as session, session.begin():
                for tenant in TENANTS:
                    amount = self._chance.randrange(1, 1_000_000)
                    if kind == "event":
                        self._tell(session, tenant, number, amount, certain, copies)
                    else:
                        self._enqueue(session, kind, tenant, number, amount, certain, copies)
        except Exception as error:
            if is_of_the_storm(error):
                self.tally.unknown += 1  # perhaps committed: the answer may be what was lost
            else:
                self.tally.refused.append(f"{kind}: {describe(error)}")
            return
        self.tally.committed += 1
        self.tally.kinds[kind] += 1
        self.tally.certain += certain
        for copy in copies * COPIES:
            try:
                self._copies.put_nowait(copy)
            except queue.Full:
                self.tally.unsent += 1

    def _draw(self) -> str:
        if (rare := self._rare.get(self._numbers % RARE_EVERY)) is not None:
            return rare
        point = self._chance.randrange(100)
        for kind, share in self._shares.items():
            if point < share:
                return kind
            point -= share
        return "deposit"

    def _enqueue(
        self,
        session: Session,
        kind: str,
        tenant: str,
        number: str,
        amount: int,
        certain: list[tuple[str, str, str]],
        copies: list[Copy],
    ) -> None:
        task: Any = getattr(application, kind)
        arguments: dict[str, Any] = {"number": number, "account": f"{tenant}-{kind}-{number}", "amount": amount}
        if kind in ("transfer", "charge", "stumble", "refunded"):
            arguments["url"] = self._url
        if kind == "charge":
            arguments["asks"] = self._chance.random() < 0.5
        elif kind == "deferred":
            arguments["due"] = time.time() + self._chance.uniform(0.0, 2.0)
        elif kind == "announce":
            arguments["owner"] = tenant
        elif kind == "flaky":
            arguments["failures"] = self._chance.randrange(1, 4)
        application.accept(
            session, tenant=tenant, task=task.name, key=number, account=arguments["account"], amount=amount
        )
        task_id = None
        if kind != "direct":
            line = f"line-{self._chance.randrange(LINES)}" if kind == "ordered" else None
            task_id = task.enqueue(session, **arguments, tenant=tenant, ordering_key=line).task_id
            if self._chance.random() < EXPIRED:
                row = {"key": number, "tenant": tenant, "task": task.name}
                message = Message.from_text(session.execute(_MESSAGE, row).scalar_one())
                message.headers["expires"] = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
                copies.append(partial(_send, message))
                self.tally.rejected += 1
        if kind == "direct" or (kind in EAGER and self._chance.random() < CALLED):
            call = {"task": task.name, "tenant": tenant, "arguments": json.dumps(arguments)}
            session.execute(_CALL, call)
        certain.append((tenant, task.name, number))
        copies.append(
            lambda: task.apply_async(kwargs=arguments, task_id=task_id, tenant=tenant, retry=True, retry_policy=_RETRY)
        )

    def _tell(
        self,
        session: Session,
        tenant: str,
        number: str,
        amount: int,
        certain: list[tuple[str, str, str]],
        copies: list[Copy],
    ) -> None:
        account = f"{tenant}-event-{number}"
        event_id = application.tell(session, tenant=tenant, number=number, account=account, amount=amount)
        certain += [(tenant, consumer, event_id) for consumer in (application.LEDGER, application.MAILER)]
        for message in session.scalars(_MESSAGES, {"key": event_id}):
            copies.append(partial(_send, Message.from_text(message)))

    # ------------------------------------------------------------ copies

    def _send_copies(self) -> None:
        while not (self._stop.is_set() and self._copies.empty()):
            try:
                copy = self._copies.get(timeout=0.2)
            except queue.Empty:
                continue
            try:
                copy()
                self.tally.copies += 1
            except _BROKER_ERRORS:
                self.tally.unsent += 1


def _send(message: Message) -> None:
    """As a relay does, signed anew: what is not signed is refused before anything is asked about its copy."""
    exchange, routing_key = message.destination(application.app)
    secret = runtime_of(application.app).settings.message_secrets[0]
    signature = sign(message.headers, message.body, secret, at=time.time())
    with application.app.producer_or_acquire() as producer:
        producer.publish(
            message.body,
            exchange=exchange,
            routing_key=routing_key,
            headers={**message.headers, SIGNATURE_HEADER: signature},
            content_type="application/json",
            content_encoding="utf-8",
            delivery_mode=2,
            retry=True,
            retry_policy=_RETRY,
            **message.properties,
        )
