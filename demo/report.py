"""The report: a table for people, JSON for programs, and a result line."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from demo.checking import Books, Discrepancy, Findings, Verdict
from demo.input import Intake, Kind
from demo.order_books import COMPENSATED, OrderVerdict

# Those whose saga a person has cancelled come last, whatever their parcels were doing.
RETURN_ENDS = ("REFUNDED", "REJECTED", "ESCALATED", "ABORTED", COMPENSATED)
# Lines on the screen; the JSON report has all of them.
SHOWN = 20


class Row(NamedTuple):
    """A line of the table."""

    name: str
    number: int
    cents: int | None = None


@dataclass(kw_only=True)
class Report:
    """The result of the check, and every refused line and operation with its reason. What was counted depends on the flow."""

    purchases: int
    found: Findings
    broker: str
    started: float
    refused: list[dict[str, Any]]
    events: list[str]
    problems: list[str]
    phases: dict[str, float]
    # charges of which a webhook has told the end, in a run in which nothing else does
    by_webhook: int | None = None
    seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = max(time.time() - self.started, 0.0)

    @property
    def counts(self) -> dict[str, int | str]:
        """What the result line counts."""
        raise NotImplementedError

    @property
    def rows(self) -> list[Row]:
        """The table."""
        raise NotImplementedError

    @property
    def accounted(self) -> int:
        """The purchases that ended as they may."""
        raise NotImplementedError

    @property
    def agrees(self) -> bool:
        """Whether every ledger agrees, every line is accounted for, and every fault took place."""
        return not self.found.discrepancies and self.purchases == self.accounted and not self.problems

    @property
    def line(self) -> str:
        """The result in one line."""
        told = {} if self.by_webhook is None else {"by_webhook": self.by_webhook}
        counts = {**self.counts, **told, "broker": self.broker, "seconds": f"{self.seconds:.0f}"}
        return "RESULT " + " ".join(f"{name}={value}" for name, value in counts.items())

    def as_json(self) -> str:
        """The whole report."""
        return json.dumps(
            {
                "agrees": self.agrees,
                "totals": {
                    **self.counts,
                    "emails_repeated": self.found.repeated,
                    "broker": self.broker,
                    "seconds": round(self.seconds, 1),
                },
                "discrepancies": [asdict(found) for found in self.found.discrepancies],
                "faults": self.events,
                "problems": self.problems,
                "phases_seconds": {name: round(seconds, 1) for name, seconds in self.phases.items()},
                "refused": self.refused,
            },
            indent=1,
        )

    def show(self, console: Console) -> None:
        """Print the table and up to 20 of each kind of problem."""
        table = Table("", "count", "cents", title="The ledgers agree" if self.agrees else "THE LEDGERS DO NOT AGREE")
        for column in table.columns[1:]:
            column.justify = "right"
        for name, number, cents in self.rows:
            table.add_row(name, f"{number:,}", "" if cents is None else f"{cents:,}")
        console.print(table)
        _print_lines(
            console, "refused", [f"{e['file']}:{e['line']} {e['id']}: {e['reason']}" for e in self.refused_at_input()]
        )
        _print_lines(console, "discrepancies", [_text(found) for found in self.found.discrepancies])
        _print_lines(console, "problems", self.problems)
        took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.phases.items())
        console.print(f"where the time went: {took}", highlight=False)

    def refused_at_input(self) -> list[dict[str, Any]]:
        """The lines that were not accepted."""
        return [entry for entry in self.refused if entry["stage"] == "input"]


@dataclass(kw_only=True)
class PaymentReport(Report):
    """Of payments and refunds."""

    found: Verdict
    refunds_requested: int
    duplicates_suppressed: int

    @property
    def failed(self) -> int:
        """Purchases that were refused at input, declined, or failed."""
        return self.found.failed + len([entry for entry in self.refused_at_input() if entry["kind"] == "purchase"])

    @property
    def accounted(self) -> int:
        """Completed or failed."""
        return self.found.completed + self.failed

    @property
    def counts(self) -> dict[str, int | str]:
        """Purchases, then refunds, then what has to be zero."""
        verdict = self.found
        return {
            "purchases": self.purchases,
            "completed": verdict.completed,
            "failed": self.failed,
            "charged_cents": verdict.charged_cents,
            "refunds": verdict.refunds,
            "refunded_cents": verdict.refunded_cents,
            "refunds_refused": self.refunds_requested - verdict.refunds,
            "emails": verdict.emails,
            "duplicates_suppressed": self.duplicates_suppressed,
            "lost": verdict.lost,
            "doubled": verdict.doubled,
        }

    @property
    def rows(self) -> list[Row]:
        """The same, for people."""
        verdict = self.found
        return [
            Row("purchases in the file", self.purchases),
            Row("  completed", verdict.completed, verdict.charged_cents),
            Row("  failed", self.failed),
            Row("refunds in the file", self.refunds_requested),
            Row("  refunded", verdict.refunds, verdict.refunded_cents),
            Row("  refused", self.refunds_requested - verdict.refunds),
            Row("e-mails", verdict.emails),
            Row("  arrived again, same Message-ID", verdict.repeated),
            Row("duplicates suppressed", self.duplicates_suppressed),
            Row("lost", verdict.lost),
            Row("doubled", verdict.doubled),
        ]


@dataclass(kw_only=True)
class OrderReport(Report):
    """Of orders and returns."""

    found: OrderVerdict

    @property
    def accounted(self) -> int:
        """Refused at input, or an order that has ended."""
        return len(self.refused_at_input()) + self.found.processing + self.found.cancelled

    @property
    def counts(self) -> dict[str, int | str]:
        """Orders, then returns, then what has to be zero."""
        verdict = self.found
        return {
            "flow": "orders",
            "orders": verdict.orders,
            "processing": verdict.processing,
            "cancelled": verdict.cancelled,
            "returns": verdict.returns.total(),
            **{end.lower(): verdict.returns[end] for end in RETURN_ENDS},
            "stock_lost": verdict.stock_lost,
            "lost": verdict.lost,
            "doubled": verdict.doubled,
        }

    @property
    def rows(self) -> list[Row]:
        """The same, for people."""
        verdict = self.found
        return [
            Row("purchases in the file", self.purchases),
            Row("orders", verdict.orders),
            Row("  processing", verdict.processing, verdict.kept_cents),
            *(Row(f"  cancelled: {reason}", count) for reason, count in sorted(verdict.reasons.items())),
            Row("returns", verdict.returns.total()),
            *(Row(f"  {end.lower()}", verdict.returns[end]) for end in RETURN_ENDS),
            Row("given back", verdict.refunds, verdict.given_back_cents),
            Row("pieces of stock delivered", verdict.delivered),
            Row("e-mails", verdict.emails),
            Row("  arrived again, same Message-ID", verdict.repeated),
            Row("pieces lost", verdict.stock_lost),
            Row("lost", verdict.lost),
            Row("doubled", verdict.doubled),
        ]


def refused_lines(intake: Intake, *kinds: Kind) -> list[dict[str, Any]]:
    """Every line that was refused at input, with the reason."""
    return [{"kind": kind, "stage": "input", **asdict(refused)} for kind in kinds for refused in intake.refused(kind)]


def refusals(intake: Intake, books: Books) -> list[dict[str, Any]]:
    """Every purchase and refund that failed, refused at input or later by its task, with the reason."""
    entries = refused_lines(intake, "purchase", "refund")
    for kind, lines, rows in (
        ("purchase", books.purchases, books.payments),
        ("refund", books.refund_requests, books.refunds),
    ):
        for line in lines:
            row: Any = rows.get(line.id)
            if row is not None and row.status in ("failed", "refused", "unknown"):
                entries.append(
                    {"kind": kind, "stage": "task", "line": line.number, "id": line.id, "reason": row.failure}
                )
    return entries


def _print_lines(console: Console, title: str, lines: list[str]) -> None:
    if lines:
        console.print(f"{title}: {len(lines)}")
    for line in lines[:SHOWN]:
        console.print(f"  {line}", highlight=False, markup=False)
    if len(lines) > SHOWN:
        console.print(f"  … and {len(lines) - SHOWN} more (--report FILE has all)")


def _text(found: Discrepancy) -> str:
    return f"{found.kind}: {found.id}: {found.what}"
