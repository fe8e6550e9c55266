"""Progress: counted in the database, shown as bars, or as plain lines without a terminal."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sqlalchemy import Connection, Engine, text

from demo.checking import CAPTURE, LOOK_AGAIN, MAIL, REFUND, SUPPORT, WEBHOOKS

# Seconds between lines without a terminal.
PLAIN_SECONDS = 5.0
# The pause between two counts, as a multiple of how long a count takes.
SHARE = 50

_COUNT = text("""
SELECT task, status IN ('completed', 'failed') AS ended, status = 'completed' AS completed, count(*)
FROM idempotency.records WHERE task <> 'http' GROUP BY 1, 2, 3
""")
_PENDING = text("SELECT count(*) FROM idempotency.outbox WHERE status = 'pending'")
_ORDERS = text("SELECT status, count(*) FROM orders GROUP BY 1")
_RETURNS = text("SELECT count(*) FROM returns WHERE status NOT IN ('REQUESTED', 'LABELLED', 'IN_TRANSIT', 'INSPECTED')")
_OPEN = text("""
SELECT task || ' ' || key || ': ' || status FROM idempotency.records WHERE status IN ('started', 'released') AND task <> 'http'
UNION ALL
SELECT 'outbox row ' || id || ' of ' || task || ' ' || key || ': ' || coalesce(last_error, status)
FROM idempotency.outbox WHERE status = 'pending'
UNION ALL
SELECT task || ' ' || key || ': sent, and no worker has taken it' FROM idempotency.outbox o
WHERE status = 'published' AND NOT EXISTS (
    SELECT FROM idempotency.records r WHERE (r.tenant, r.task, r.key) = (o.tenant, o.task, o.key)
)
LIMIT 10
""")


class Counted(Protocol):
    """How far a flow has come. `open`: records that have not ended; `pending`: messages in the outbox."""

    @property
    def ended(self) -> int: ...
    @property
    def open(self) -> int: ...
    @property
    def pending(self) -> int: ...
    @property
    def events_handled(self) -> int: ...
    @property
    def events_expected(self) -> int: ...
    @property
    def shown(self) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True)
class Counts:
    """Ended operations by kind. `completed`: purchases and refunds, each of which causes an e-mail.

    `events_handled` were handled by their consumer, of `events_expected`. `open`: all records that have not ended;
    `pending`: messages still in the outbox.
    """

    purchases: int = 0
    refunds: int = 0
    mails: int = 0
    completed: int = 0
    events_handled: int = 0
    events_expected: int = 0
    open: int = 0
    pending: int = 0

    @property
    def ended(self) -> int:
        """Purchases and refunds that have completed or failed."""
        return self.purchases + self.refunds

    @property
    def shown(self) -> dict[str, int]:
        """By the names of the bars."""
        return {"purchases": self.purchases, "refunds": self.refunds, "e-mails": self.mails}


@dataclass(frozen=True, slots=True)
class OrderCounts:
    """Orders that have ended, of those that are known. `handled`: operations that have ended, mostly of events."""

    processing: int = 0
    cancelled: int = 0
    returns: int = 0
    handled: int = 0
    open: int = 0
    pending: int = 0
    # an order has ended when none of its operations is still running
    events_handled: int = 0
    events_expected: int = 0

    @property
    def ended(self) -> int:
        """Orders that are PROCESSING or CANCELLED."""
        return self.processing + self.cancelled

    @property
    def shown(self) -> dict[str, int]:
        """By the names of the bars."""
        return {
            "processing": self.processing,
            "cancelled": self.cancelled,
            "returns": self.returns,
            "steps": self.handled,
        }


class Counter:
    """Counts in the database, taking at most about a fiftieth of the time."""

    def __init__(self, engine: Engine, count: Callable[[Connection], Counted]) -> None:
        self._engine = engine
        self._count = count
        self._next = 0.0
        self.counts: Counted

    def look(self) -> Counted:
        """The latest counts, updated if it is time."""
        if (began := time.monotonic()) >= self._next:
            with self._engine.connect() as connection:
                self.counts = self._count(connection)
            took = time.monotonic() - began
            self._next = time.monotonic() + max(0.1, SHARE * took)
        return self.counts

    def open_work(self) -> list[str]:
        """Up to ten operations and messages that have not ended."""
        with self._engine.connect() as connection:
            return list(connection.scalars(_OPEN))


def count_payments(connection: Connection) -> Counts:
    """How far payments and refunds have come."""
    ended, completed = defaultdict[str, int](int), defaultdict[str, int](int)  # by task
    still_open = 0
    for task, has_ended, is_completed, number in connection.execute(_COUNT):
        if has_ended:
            ended[task] += number
            completed[task] += number if is_completed else 0
        else:
            still_open += number
    return Counts(
        purchases=ended[CAPTURE],
        refunds=ended[REFUND],
        mails=ended[MAIL],
        completed=completed[CAPTURE] + completed[REFUND],
        events_handled=ended[MAIL] + ended[SUPPORT] + ended[LOOK_AGAIN] + ended[WEBHOOKS],
        # every purchase causes an event, captured or failed; only completed refunds do, and support hears of those, too;
        # webhooks are of what is completed
        events_expected=ended[CAPTURE] + completed[CAPTURE] + 3 * completed[REFUND],
        open=still_open,
        pending=connection.scalar(_PENDING) or 0,
    )


def count_orders(connection: Connection) -> OrderCounts:
    """How far orders have come."""
    orders: dict[str, int] = dict(tuple(row) for row in connection.execute(_ORDERS))
    handled = still_open = 0
    for _, has_ended, _, number in connection.execute(_COUNT):
        handled, still_open = (handled + number, still_open) if has_ended else (handled, still_open + number)
    return OrderCounts(
        processing=orders.get("PROCESSING", 0),
        cancelled=orders.get("CANCELLED", 0),
        returns=connection.scalar(_RETURNS) or 0,
        handled=handled,
        open=still_open,
        pending=connection.scalar(_PENDING) or 0,
    )


class Display:
    """Shows accepted and ended operations as bars on a terminal, otherwise as lines. `totals`: the bars."""

    def __init__(self, console: Console, totals: Mapping[str, int]) -> None:
        self._console = console
        self._totals = totals
        self._began = time.monotonic()
        self._next_line = 0.0
        self._bars: Progress | None = None
        if console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description:10}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                console=console,
            )
            self._tasks = {name: self._bars.add_task(name, total=total, rate="") for name, total in totals.items()}

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def event(self, text: str) -> None:
        """Print an event."""
        self._console.print(f"  {text}", highlight=False, markup=False)

    def show(self, counts: Counted, *, accepted: int, refused: int) -> None:
        """Show the progress."""
        rate = counts.ended / max(time.monotonic() - self._began, 0.001)
        if self._bars is not None:
            accepted_bar, total = self._tasks["accepted"], self._totals["accepted"] - refused
            self._bars.update(accepted_bar, completed=accepted, total=total, rate=f"{rate:.0f} operations/s")
            for name, done in counts.shown.items():
                if name in self._tasks:
                    self._bars.update(self._tasks[name], completed=done)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_SECONDS
            ended = ", ".join(f"{done} {name}" for name, done in counts.shown.items())
            self.event(f"accepted {accepted}, ended {ended}, {rate:.0f} operations/s")
