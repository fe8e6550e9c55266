"""Progress: counted in the database, shown as bars, or as plain lines without a terminal."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sqlalchemy import Engine, text

from demo.checking import CAPTURE, MAIL, REFUND, SUPPORT

# Seconds between lines without a terminal.
PLAIN_SECONDS = 5.0
# The pause between two counts, as a multiple of how long a count takes.
SHARE = 50

_COUNT = text("""
SELECT task, status IN ('completed', 'failed') AS ended, status = 'completed' AS completed, count(*)
FROM idempotency.records WHERE task <> 'http' GROUP BY 1, 2, 3
""")
_PENDING = text("SELECT count(*) FROM idempotency.outbox WHERE status = 'pending'")
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


class Counter:
    """Counts in the database, taking at most about a fiftieth of the time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next = 0.0
        self.counts = Counts()

    def look(self) -> Counts:
        """The latest counts, updated if it is time."""
        if (began := time.monotonic()) >= self._next:
            self.counts = self._count()
            took = time.monotonic() - began
            self._next = time.monotonic() + max(0.1, SHARE * took)
        return self.counts

    def open_work(self) -> list[str]:
        """Up to ten operations and messages that have not ended."""
        with self._engine.connect() as connection:
            return list(connection.scalars(_OPEN))

    def _count(self) -> Counts:
        ended, completed = (dict.fromkeys((CAPTURE, REFUND, MAIL, SUPPORT), 0) for _ in range(2))
        still_open = 0
        with self._engine.connect() as connection:
            for task, has_ended, is_completed, number in connection.execute(_COUNT):
                if has_ended:
                    ended[task] += number
                    completed[task] += number if is_completed else 0
                else:
                    still_open += number
            pending = connection.scalar(_PENDING) or 0
        return Counts(
            purchases=ended[CAPTURE],
            refunds=ended[REFUND],
            mails=ended[MAIL],
            completed=completed[CAPTURE] + completed[REFUND],
            events_handled=ended[MAIL] + ended[SUPPORT],
            # every purchase causes an event, captured or failed; only completed refunds do
            events_expected=ended[CAPTURE] + completed[REFUND],
            open=still_open,
            pending=pending,
        )


class Display:
    """Shows accepted and ended operations as bars on a terminal, otherwise as lines."""

    def __init__(self, console: Console, *, purchases: int, refunds: int) -> None:
        self._console = console
        self._total = purchases + refunds
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
            totals = {"accepted": self._total, "purchases": purchases, "refunds": refunds, "e-mails": self._total}
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

    def show(self, counts: Counts, *, accepted: int, refused: int) -> None:
        """Show the progress."""
        rate = counts.ended / max(time.monotonic() - self._began, 0.001)
        if self._bars is not None:
            self._bars.update(self._tasks["accepted"], completed=accepted, total=self._total - refused)
            self._bars.update(self._tasks["purchases"], completed=counts.purchases, rate=f"{rate:.0f} operations/s")
            self._bars.update(self._tasks["refunds"], completed=counts.refunds)
            self._bars.update(self._tasks["e-mails"], completed=counts.mails, total=max(counts.completed, 1))
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_SECONDS
            self.event(
                f"accepted {accepted}, ended {counts.purchases} purchases and {counts.refunds} refunds,"
                f" {counts.mails} e-mails, {rate:.0f} operations/s"
            )
