"""The two sides compared: every test that passes on plain tasks and not on ours, with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

from rich import box
from rich.table import Table

from tests.celery_suite.reasons import RACES, REASONS
from tests.celery_suite.side import NOT_RUN, PASSED, Seen

# As many tests may remain that differ, each a documented decision; the variants of one test count once.
LIMIT = 12
UNEXPLAINED = "UNEXPLAINED"


@dataclass(frozen=True, slots=True)
class Difference:
    """A test that passes on plain tasks and not on ours."""

    test: str
    plain: Seen
    ours: Seen
    reason: str | None

    @property
    def may_pass_alone(self) -> bool:
        """Whether it is worth another run, on a machine that does nothing else."""
        return self.reason is None or self.reason in RACES


class Comparison:
    """What became of each test on both sides."""

    def __init__(self, plain: Mapping[str, Seen], ours: Mapping[str, Seen], *, seconds: float) -> None:
        self.plain, self.ours, self.seconds = plain, ours, seconds
        # a test that the run did not reach is a difference, too
        self.differences = [
            Difference(test, seen, ours.get(test, NOT_RUN), _reason(test))
            for test, seen in sorted(plain.items())
            if seen.outcome == PASSED and ours.get(test, NOT_RUN).outcome != PASSED
        ]

    @property
    def is_good(self) -> bool:
        """Whether each difference has a reason, and there are few of them."""
        return len(self._by_test()) <= LIMIT and all(each.reason for each in self.differences)

    def _by_test(self) -> dict[str, list[Difference]]:
        """The variants that differ, by their test."""
        found: dict[str, list[Difference]] = {}
        for each in self.differences:
            found.setdefault(_function(each.test), []).append(each)
        return found

    @property
    def obsolete(self) -> list[str]:
        """The tests that have a reason and pass."""
        differing = self._by_test()
        passing = {_function(test) for test, seen in self.ours.items() if seen.outcome == PASSED}
        return sorted(test for test in REASONS if test in passing and test not in differing)

    def summary(self) -> str:
        """One line of counts."""
        passed = sum(seen.outcome == PASSED for seen in self.plain.values())
        both = passed - len(self.differences)
        unexplained = sum(each.reason is None for each in self.differences)
        return (
            f"CELERY tests={len(self.plain)} plain={passed} both={both} differences={len(self.differences)} tests_that_differ={len(self._by_test())} "
            f"unexplained={unexplained} seconds={self.seconds:.0f}"
        )

    def table(self) -> Table:
        """The differences for a terminal."""
        table = Table("test", "plain", "ours", "reason", box=box.SIMPLE, padding=(0, 1, 0, 0))
        for each in self.differences:
            error = each.ours.error[:160].replace("[", r"\[")
            reason = each.reason or f"[bold red]{UNEXPLAINED}[/] {error}"
            table.add_row(_short(each.test).replace("[", r"\["), each.plain.outcome, each.ours.outcome, reason)
        return table

    def markdown(self) -> str:
        """The page that is kept."""
        lines = [
            "# Celery's own integration tests, on our tasks",
            "",
            f"The integration tests of Celery {version('celery')} (`t/integration` of its source distribution), run",
            "twice against real servers: on the tasks as they are, and with every task of the suite on `IdempotentTask`,",
            "each call under its own key, with a relay beside the worker. A test that fails on ours without a reason, or by a race,",
            "is run again, alone, before it counts. What has timed out, on either side, then waits for minutes where it waited for",
            "one. `make celery-suite` does all that and writes this page. Tests that fail on plain tasks, or that Celery skips here,",
            "say nothing about ours.",
            "",
            "| test | plain | ours | reason |",
            "|---|---|---|---|",
        ]
        for test, found in self._by_test().items():
            variants = f" ({len(found)} variants)" if len(found) > 1 else ""
            first = found[0]
            lines.append(
                f"| `{test}`{variants} | {first.plain.outcome} | {first.ours.outcome} | {first.reason or UNEXPLAINED} |"
            )
        if not self.differences:
            lines.append("| *(none)* | | | |")
        lines += ["", "| | plain | ours |", "|---|---|---|"]
        outcomes = sorted({seen.outcome for seen in (*self.plain.values(), *self.ours.values())})
        for outcome in outcomes:
            counts = (sum(s.outcome == outcome for s in side.values()) for side in (self.plain, self.ours))
            lines.append(f"| {outcome} | " + " | ".join(str(count) for count in counts) + " |")
        lines += self._patient()
        lines += ["", f"    {self.summary()}", ""]
        return "\n".join(lines)

    def _patient(self) -> list[str]:
        """The table of the tests that have timed out at first, if there are any."""
        sides = (("plain", self.plain), ("ours", self.ours))
        again = [(test, name, s) for name, side in sides for test, s in sorted(side.items()) if s.patience is not None]
        rows = [f"| `{_short(test)}` | {name} | {s.outcome} | {s.seconds:.0f} |" for test, name, s in again]
        if not rows:
            return []
        limit = max(s.patience or 0 for _, _, s in again)
        title = f"Timed out beside the others, and run again alone with {limit:.0f} seconds to wait:"
        return ["", title, "", "| test | side | then | seconds |", "|---|---|---|---|", *rows]

    def as_json(self) -> dict[str, object]:
        """The same for programs."""
        return {
            "celery": version("celery"),
            "seconds": round(self.seconds, 1),
            "tests": [
                {
                    "test": test,
                    "plain": self.plain.get(test, NOT_RUN).outcome,
                    "ours": (ours := self.ours.get(test, NOT_RUN)).outcome,
                    "error": ours.error,
                    "reason": _reason(test),
                }
                for test in sorted({*self.plain, *self.ours})
            ],
        }


def _short(test: str) -> str:
    return test.removeprefix("t/integration/")


def _function(test: str) -> str:
    return _short(test).partition("[")[0]


def _reason(test: str) -> str | None:
    return REASONS.get(_function(test))
