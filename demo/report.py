"""The report: a table for people, JSON for programs, and a result line."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.checking import Books, Discrepancy, Verdict
from demo.input import Intake

# Lines on the screen; the JSON report has all of them.
SHOWN = 20


@dataclass
class Report:
    """The totals, the result of the check, and every refused line and operation with its reason."""

    purchases: int
    refunds_requested: int
    verdict: Verdict
    duplicates_suppressed: int
    broker: str
    started: float
    refused: list[dict[str, Any]]
    events: list[str]
    problems: list[str]
    phases: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.seconds = max(time.time() - self.started, 0.0)

    @property
    def failed(self) -> int:
        """Purchases that were refused at input, declined, or failed."""
        return self.verdict.failed + len([entry for entry in self._refused_at_input() if entry["kind"] == "purchase"])

    @property
    def agrees(self) -> bool:
        """Whether every ledger agrees, every line is accounted for, and every fault took place."""
        return (
            not self.verdict.discrepancies
            and self.purchases == self.verdict.completed + self.failed
            and not self.problems
        )

    @property
    def line(self) -> str:
        """The result in one line."""
        verdict = self.verdict
        return "RESULT " + " ".join(
            f"{name}={value}"
            for name, value in (
                ("purchases", self.purchases),
                ("completed", verdict.completed),
                ("failed", self.failed),
                ("charged_cents", verdict.charged_cents),
                ("refunds", verdict.refunds),
                ("refunded_cents", verdict.refunded_cents),
                ("refunds_refused", self.refunds_requested - verdict.refunds),
                ("emails", verdict.emails),
                ("duplicates_suppressed", self.duplicates_suppressed),
                ("lost", verdict.lost),
                ("doubled", verdict.doubled),
                ("broker", self.broker),
                ("seconds", f"{self.seconds:.0f}"),
            )
        )

    def as_json(self) -> str:
        """The whole report."""
        verdict = self.verdict
        return json.dumps(
            {
                "agrees": self.agrees,
                "totals": {
                    "purchases": self.purchases,
                    "completed": verdict.completed,
                    "failed": self.failed,
                    "charged_cents": verdict.charged_cents,
                    "refunds": verdict.refunds,
                    "refunded_cents": verdict.refunded_cents,
                    "refunds_refused": self.refunds_requested - verdict.refunds,
                    "emails": verdict.emails,
                    "emails_repeated": verdict.repeated,
                    "duplicates_suppressed": self.duplicates_suppressed,
                    "lost": verdict.lost,
                    "doubled": verdict.doubled,
                    "broker": self.broker,
                    "seconds": round(self.seconds, 1),
                },
                "discrepancies": [asdict(found) for found in verdict.discrepancies],
                "faults": self.events,
                "problems": self.problems,
                "phases_seconds": {name: round(seconds, 1) for name, seconds in self.phases.items()},
                "refused": self.refused,
            },
            indent=1,
        )

    def show(self, console: Console) -> None:
        """Print the table and up to 20 of each kind of problem."""
        verdict = self.verdict
        table = Table("", "count", "cents", title="The ledgers agree" if self.agrees else "THE LEDGERS DO NOT AGREE")
        for column in table.columns[1:]:
            column.justify = "right"
        for name, count, cents in (
            ("purchases in the file", self.purchases, None),
            ("  completed", verdict.completed, verdict.charged_cents),
            ("  failed", self.failed, None),
            ("refunds in the file", self.refunds_requested, None),
            ("  refunded", verdict.refunds, verdict.refunded_cents),
            ("  refused", self.refunds_requested - verdict.refunds, None),
            ("e-mails", verdict.emails, None),
            ("  arrived again, same Message-ID", verdict.repeated, None),
            ("duplicates suppressed", self.duplicates_suppressed, None),
            ("lost", verdict.lost, None),
            ("doubled", verdict.doubled, None),
        ):
            table.add_row(name, f"{count:,}", "" if cents is None else f"{cents:,}")
        console.print(table)
        _print_lines(
            console, "refused", [f"{e['file']}:{e['line']} {e['id']}: {e['reason']}" for e in self._refused_at_input()]
        )
        _print_lines(console, "discrepancies", [_text(found) for found in verdict.discrepancies])
        _print_lines(console, "problems", self.problems)
        took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.phases.items())
        console.print(f"where the time went: {took}", highlight=False)

    def _refused_at_input(self) -> list[dict[str, Any]]:
        return [entry for entry in self.refused if entry["stage"] == "input"]


def refusals(intake: Intake, books: Books) -> list[dict[str, Any]]:
    """Every purchase and refund that failed, refused at input or later by its task, with the reason."""
    entries: list[dict[str, Any]] = []
    for kind in ("purchase", "refund"):
        for refused in intake.refused(kind):
            entries.append({"kind": kind, "stage": "input", **asdict(refused)})
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
