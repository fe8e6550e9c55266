"""Purchases as orders: each is checked out several times at once; some buyers change their minds, at once or later.

Importing this module reads the environment (celeryconfig), so set the servers' addresses first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from demo.input import Intake, Line
from demo.order_rules import Rules, pieces
from demo.processes import ProcessError
from demo.returns import Returns
from demo.submission import Submission
from idempotency import publish
from tasks import app
from tasks.checkout import request_cancellation, submit_order
from tasks.tenants import DEFAULT
from tasks.validation import MAX_QUANTITY
from tasks.warehouse import receive_stock

# Seconds in which a checkout that waits for another one has to succeed.
PATIENCE = 60.0


class Buyers(Submission):
    """Places orders, `copies` times each: all clicks at once, each in its own transaction.

    `placed`: the orders that the clicks on one purchase were told of. `people`: an engine of operators.
    """

    def __init__(
        self,
        engine: Engine,
        people: Engine,
        intake: Intake,
        *,
        copies: int,
        rules: Rules,
        deliveries: Mapping[str, int],
        carrier_url: str,
        returns: type[Returns] = Returns,
    ) -> None:
        super().__init__(engine, intake, copies=1)
        self._copies = copies
        self._rules = rules
        self._threads = self._open.enter_context(ThreadPoolExecutor(copies))
        self.returns = returns(
            self._transaction, people, carrier_url, copies=copies, rules=rules, threads=self._threads
        )
        self._open.callback(self.returns.close)
        self._hesitating: list[tuple[float, str]] = []
        self._cancelled = 0
        self.placed: dict[str, set[str]] = {}
        with self._transaction() as session:
            for article, quantity in deliveries.items():
                _deliver(session, article, quantity)

    @property
    def events(self) -> list[str]:
        """What buyers did."""
        did = {"asked to cancel": self._cancelled, **self.returns.done}
        return [
            f"each purchase was checked out {self._copies} times at once; "
            + ", ".join(f"{count} {what}" for what, count in did.items())
        ]

    def submit(self, batch: Sequence[Line]) -> None:
        """Place the orders of a batch; invalid lines are recorded as refused."""
        clicks = list(self._threads.map(lambda _: self._click(batch), range(self._copies)))
        now = time.monotonic()
        for line, *answers in zip(batch, *clicks, strict=True):
            if refusals := [str(answer) for answer in answers if isinstance(answer, ValueError)]:
                self._intake.refuse(line, refusals[0])
                continue
            self.accepted += 1
            told = {answer for answer in answers if isinstance(answer, str)}
            self.placed[line.id] = told
            self.returns.ordered(line, min(told))
            if (hesitation := self._rules.hesitation(line)) is not None:
                self._hesitating.append((now + hesitation, line.id))
        self._ask_again([line for line in batch if line.id in self.placed])

    def go_on(self) -> int:
        """Cancel what is due, and go on with returns; returns how many of both are still to come."""
        now = time.monotonic()
        if due := [id for when, id in self._hesitating if when <= now]:
            with self._transaction() as session:
                for id in due * self._copies:
                    request_cancellation(session, checkout_session_id=id)
            self._hesitating = [each for each in self._hesitating if each[0] > now]
            self._cancelled += len(due)
        return len(self._hesitating) + self.returns.go_on()

    def _click(self, batch: Sequence[Line]) -> list[str | ValueError]:
        """The ids of the orders, or why there is none."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                with self._transaction() as session:
                    return [self._check_out(session, line) for line in batch]
            except DBAPIError:
                continue  # mostly another click, which did not commit soon enough
        raise ProcessError(f"checkout of {batch[0].id} and others: not possible within {PATIENCE:g} s")

    def _check_out(self, session: Session, line: Line) -> str | ValueError:
        try:
            return submit_order(
                session,
                checkout_session_id=line.id,
                customer_id=line.customer_id,
                amount=line.amount,
                currency=line.currency,
                sku=self._rules.article(line),
                quantity=pieces(line),
            ).order_id
        except ValueError as error:
            return error

    def _ask_again(self, lines: Sequence[Line]) -> None:
        """The request for each order comes again, as another event with the same content."""
        with self._transaction() as session:
            for line in [*lines] * (self._copies - 1):
                told = {
                    "order_id": min(self.placed[line.id]),
                    "checkout_session_id": line.id,
                    "customer_id": line.customer_id,
                    "amount": line.amount,
                    "currency": line.currency,
                    "sku": self._rules.article(line),
                    "quantity": pieces(line),
                }
                publish(session, "order.placement_requested", told, app=app)

    @contextmanager
    def _transaction(self) -> Iterator[Session]:
        with Session(self._engine) as session, session.begin():
            session.execute(text("SELECT idempotency.about(:tenant)"), {"tenant": DEFAULT})
            yield session


def _deliver(session: Session, article: str, quantity: int) -> None:
    for number, first in enumerate(range(0, quantity, MAX_QUANTITY)):
        there = min(MAX_QUANTITY, quantity - first)
        receive_stock(session, delivery_id=f"{article}-{number}", sku=article, quantity=there)
