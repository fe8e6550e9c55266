"""What a run submits, counts and checks: payments and refunds, or orders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sqlalchemy import Connection, Engine

from demo import checking, order_books, progress
from demo.input import Intake
from demo.order_rules import Rules
from demo.processes import Processes
from demo.report import OrderReport, PaymentReport, Report, refusals, refused_lines
from idempotency.observe import metrics
from idempotency.operate.change import Change
from idempotency.operate.people import TOKEN_VARIABLE, add_operator

if TYPE_CHECKING:
    from demo.orders import Buyers
    from demo.submission import Submission

# Over HTTP, the copies of a request go to different ones.
SERVERS = 2


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run. `copies`: how often each message or request is sent; `started`: seconds since the epoch."""

    copies: int
    seed: int
    workers: int
    started: float
    via: Literal["enqueue", "http"] = "enqueue"
    flow: Literal["payments", "orders"] = "payments"
    # whether the provider decides each charge later, and says so by webhook only
    webhooks: bool = False


class Engines(NamedTuple):
    """By role. The operator's sees all tenants; what the owner's does, no process of the application may."""

    owner: Engine
    operator: Engine
    application: Engine


class Payments:
    """Payments and refunds. `window`: operations in progress, enough to keep the workers busy."""

    window = 500

    def __init__(self, intake: Intake, options: Options) -> None:
        self._intake = intake
        self._options = options
        self.lines = intake.purchases + intake.refunds
        # of the display
        self.bars = {
            "accepted": self.lines,
            "purchases": intake.purchases,
            "refunds": intake.refunds,
            "e-mails": self.lines,
        }

    def start(self, engines: Engines, processes: Processes, carrier_url: str) -> Submission:
        """How lines are submitted. Importing the tasks reads the addresses from the environment."""
        options = self._options
        if options.via == "enqueue":
            from demo.submission import Submission

            return Submission(engines.application, self._intake, copies=options.copies)
        from demo.over_http import Requests

        urls = [processes.start_server() for _ in range(SERVERS)]
        return Requests(engines.owner, self._intake, copies=options.copies, urls=urls, seed=options.seed)

    def count(self, connection: Connection) -> progress.Counted:
        """How far they have come."""
        return progress.count_payments(connection)

    def report(self, engine: Engine, outside: Mapping[str, Path], counters: Path, **common: Any) -> Report:
        """Compare the books. `outside`: the directories of the stand-ins; `counters`: of all processes."""
        books = checking.read_books(engine, self._intake, outside["provider"], outside["mail"])
        return PaymentReport(
            purchases=self._intake.purchases,
            found=checking.check(books),
            refused=refusals(self._intake, books),
            refunds_requested=self._intake.refunds,
            duplicates_suppressed=_suppressed(counters),
            **common,
        )


class Orders:
    """Orders. `window`: those in progress, each of which is some twenty operations."""

    window = 60

    def __init__(self, intake: Intake, options: Options) -> None:
        self._intake = intake
        self._copies = options.copies
        self._rules = Rules(options.seed)
        self._buyers: Buyers
        # before anything is refused
        self._deliveries = self._rules.deliveries(intake.accepted("purchase"))
        self.lines = intake.purchases
        self.bars = {"accepted": self.lines, "processing": self.lines, "cancelled": self.lines, "returns": 0}

    def start(self, engines: Engines, processes: Processes, carrier_url: str) -> Submission:
        """How orders are placed. Importing the tasks reads the addresses from the environment."""
        from demo.orders import Buyers

        # commands that move money take the token of a person, which they read there
        os.environ[TOKEN_VARIABLE] = _person(engines.owner)
        self._buyers = Buyers(
            engines.application,
            engines.operator,
            self._intake,
            copies=self._copies,
            rules=self._rules,
            deliveries=self._deliveries,
            carrier_url=carrier_url,
        )
        return self._buyers

    def count(self, connection: Connection) -> progress.Counted:
        """How far they have come."""
        return progress.count_orders(connection)

    def report(self, engine: Engine, outside: Mapping[str, Path], counters: Path, **common: Any) -> Report:
        """Compare the books."""
        told = order_books.Told(list(self._intake.accepted("purchase")), self._buyers.placed, self._deliveries)
        books = order_books.read_order_books(engine, told, outside)
        return OrderReport(
            purchases=self._intake.purchases,
            found=order_books.check_orders(books, self._rules),
            refused=refused_lines(self._intake, "purchase"),
            **common,
        )


def _suppressed(directory: Path) -> int:
    """How many deliveries were recognised as duplicates, by all workers including killed ones."""
    counted = metrics.totals(directory)
    return sum(counted.get(name, 0) for name in ("idempotency_duplicates_total", "idempotency_busy_total"))


def _person(owner: Engine) -> str:
    """The token of a person of the demo."""
    with owner.begin() as connection:
        return add_operator(connection, Change("demo", "a person for the demo"), "demo", "operator", days=1)
