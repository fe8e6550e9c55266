"""What the tests saw, as the matrix: a plug-in that collects it, and its rendering for the terminal, docs and JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import cast

import pytest
from rich import box
from rich.table import Table

from tests.faults.cells import (
    ALSO,
    BATCH_PHASES,
    CELLS,
    LEGEND,
    NO_EFFECT,
    OF_BATCHES,
    OF_SAGAS,
    PAIRS,
    PHASES,
    SAGA_PHASES,
    TITLES,
    Cell,
)
from tests.faults.conftest import SAW, VERSIONS

# As against a cell that has no effect by its nature and needs no test.
SHOWN_NO_EFFECT = f"{NO_EFFECT} ✓"
FAILED, MISSING, NOT_RUN, NOT_SELECTED = "FAILED", "missing", "not run", "not selected"


@dataclass
class Seen:
    """What became of one cell's tests."""

    outcomes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Collector:
    """A pytest plug-in: which tests show which cell, and what they saw."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str], Seen] = {key: Seen() for key in CELLS}
        self.versions: dict[str, str] = {}
        self.stray: list[str] = []
        self.seconds = 0.0
        self._started = time.monotonic()
        self._of: dict[str, tuple[str, str]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # before any selection: a cell that was not asked for is not a cell without a test
        for item in items:
            if (mark := item.get_closest_marker("cell")) is not None:
                key = (mark.args[0], mark.args[1] if len(mark.args) > 1 else "")
                if key in self.cells:
                    self.cells[key].tests.append(item.nodeid)
                    self._of[item.nodeid] = key
                else:
                    self.stray.append(f"{item.nodeid}: {key}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        key = self._of.get(report.nodeid)
        if key is None:
            return
        seen = self.cells[key]
        seen.seconds += report.duration
        if report.failed:
            seen.failed.append(f"{report.nodeid} ({report.when})")
        elif report.skipped:
            seen.not_run.append(str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "skipped")
        elif report.when == "call":
            for name, value in report.user_properties:
                if name == SAW and (letter := cast("tuple[str, str, str]", value)[-1]) not in seen.outcomes:
                    seen.outcomes.append(letter)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.seconds = time.monotonic() - self._started
        self.versions = session.config.stash.get(VERSIONS, {})

    # ------------------------------------------------------------ the verdict

    def word(self, cell: Cell) -> str:
        """What the matrix prints in a cell."""
        seen = self.cells[cell.fault, cell.phase]
        if seen.failed:
            return FAILED
        if seen.outcomes:
            return " · ".join(SHOWN_NO_EFFECT if each == NO_EFFECT else each for each in sorted(seen.outcomes))
        if seen.not_run:
            return NOT_RUN
        if seen.tests:
            return NOT_SELECTED
        return MISSING if cell.is_live else NO_EFFECT

    @property
    def is_complete(self) -> bool:
        """Whether no test was left out by a selection."""
        return all(self.word(cell) != NOT_SELECTED for cell in CELLS.values())

    @property
    def wrong(self) -> list[Cell]:
        """The cells that failed or that no test shows."""
        return [cell for cell in CELLS.values() if self.word(cell) in (FAILED, MISSING)]

    def reasons(self) -> Iterator[tuple[Cell, str]]:
        """Why cells were not run."""
        for cell in CELLS.values():
            for reason in dict.fromkeys(self.cells[cell.fault, cell.phase].not_run):
                yield cell, reason.removeprefix("Skipped: ")


# ---------------------------------------------------------------- for people

_COLOURS = {FAILED: "bold white on red", MISSING: "bold red", NOT_RUN: "yellow", NOT_SELECTED: "dim", NO_EFFECT: "dim"}


def table(collected: Collector) -> Table:
    """The matrix for a terminal."""
    matrix = Table("fault", "", *PHASES, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for fault, title in TITLES.items():
        words = [collected.word(CELLS[fault, phase]) for phase in PHASES]
        matrix.add_row(fault, title, *(_coloured(word) for word in words))
    matrix.add_section()
    matrix.add_row("sagas", "", *SAGA_PHASES, style="bold")
    for fault in OF_SAGAS:
        words = [collected.word(CELLS[fault, phase]) for phase in SAGA_PHASES]
        matrix.add_row(fault, TITLES[fault], *(_coloured(word) for word in words))
    matrix.add_section()
    matrix.add_row("batches", "", *BATCH_PHASES, style="bold")
    for fault in OF_BATCHES:
        words = [collected.word(CELLS[fault, phase]) for phase in BATCH_PHASES]
        matrix.add_row(fault, TITLES[fault], *(_coloured(word) for word in words))
    matrix.add_section()
    for pair, title in PAIRS.items():
        matrix.add_row(pair, title, _coloured(collected.word(CELLS[pair, ""])))
    return matrix


def _coloured(word: str) -> str:
    return f"[{_COLOURS.get(word, 'green')}]{'·' if word == NOT_SELECTED else word}[/]"


def summary(collected: Collector) -> str:
    """One line: how many live cells were shown, and what is wrong."""
    words = [collected.word(cell) for cell in CELLS.values() if cell.is_live]
    counted = {word: words.count(word) for word in (FAILED, MISSING, NOT_RUN, NOT_SELECTED)}
    shown = len(words) - sum(counted.values())
    rest = "".join(f" {word.lower().replace(' ', '_')}={count}" for word, count in counted.items())
    return f"FAULTS cells={len(words)} shown={shown}{rest} seconds={collected.seconds:.0f}"


def markdown(collected: Collector) -> str:
    """The page that is kept."""
    lines = [
        "# The fault matrix",
        "",
        "What was done to a running system, in which phase of an operation, and what came out. Each cell is a test in",
        "`tests/faults` against real servers: the process is held at the named moment, the fault is inflicted, and the",
        "outcome is read from what is left behind. Each also checks that every key has at most one committed effect, that",
        "rows are visible exactly when the record is completed, and that accepted = completed + failed + dead letters +",
        "still queued. `make faults` runs it and writes this page.",
        "",
        "| fault | " + " | ".join(PHASES) + " |",
        "|---|" + "---|" * len(PHASES),
    ]
    for fault, title in TITLES.items():
        words = (collected.word(CELLS[fault, phase]) for phase in PHASES)
        lines.append(f"| **{fault}** {title} | " + " | ".join(words) + " |")
    lines += ["", "| in a saga | " + " | ".join(SAGA_PHASES) + " |", "|---|" + "---|" * len(SAGA_PHASES)]
    for fault in OF_SAGAS:
        words = (collected.word(CELLS[fault, phase]) for phase in SAGA_PHASES)
        lines.append(f"| **{fault}** {TITLES[fault]} | " + " | ".join(words) + " |")
    lines += ["", "| in a batch | " + " | ".join(BATCH_PHASES) + " |", "|---|" + "---|" * len(BATCH_PHASES)]
    for fault in OF_BATCHES:
        words = (collected.word(CELLS[fault, phase]) for phase in BATCH_PHASES)
        lines.append(f"| **{fault}** {TITLES[fault]} | " + " | ".join(words) + " |")
    lines += ["", "| two faults at once | |", "|---|---|"]
    lines += [f"| **{pair}** {title} | {collected.word(CELLS[pair, ''])} |" for pair, title in PAIRS.items()]
    lines += [
        "",
        "Phases: "
        + " · ".join(f"**{phase}** {title}" for phase, title in (PHASES | SAGA_PHASES | BATCH_PHASES).items())
        + ".",
    ]
    legend = LEGEND | {SHOWN_NO_EFFECT: "no effect, and a test shows it"}
    lines += ["", "Outcomes: " + " · ".join(f"**{letter}** {meaning}" for letter, meaning in legend.items()) + "."]
    if ALSO:
        lines += ["", "Where an outcome is another one than was expected, and as good:", ""]
        lines += [
            f"- {fault}/{phase or 'both'}: {letter}, because {reason}"
            for (fault, phase), (letter, reason) in ALSO.items()
        ]
    if reasons := list(collected.reasons()):
        lines += ["", "Not run:", ""] + [f"- {cell.name}: {reason}" for cell, reason in reasons]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(collected.versions.items()))
    lines += ["", f"Seen with {versions}, in {collected.seconds:.0f} s.", "", f"    {summary(collected)}", ""]
    return "\n".join(lines)


def as_json(collected: Collector) -> dict[str, object]:
    """The same for programs; seconds are those of a cell's own tests."""
    return {
        "versions": dict(collected.versions),
        "seconds": round(collected.seconds, 1),
        "cells": [
            {"fault": cell.fault, "phase": cell.phase, "expected": cell.expected, "seen": collected.word(cell)}
            | {"is_live": cell.is_live}
            | _rounded(collected.cells[cell.fault, cell.phase])
            for cell in CELLS.values()
        ],
    }


def _rounded(seen: Seen) -> dict[str, object]:
    return asdict(seen) | {"seconds": round(seen.seconds, 1)}
