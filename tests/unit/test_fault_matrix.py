"""The instruments of the fault matrix: each of them can fail a cell."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults import report
from tests.faults.accounts import Account, Books
from tests.faults.cells import ALSO, CELLS, LEGEND, find
from tests.faults.conftest import SAW, SeenCell

DONE = {"status": "completed", "effects": {}}


def account(**changes: Any) -> Account:
    """A key whose books are in order: completed, one row."""
    well: dict[str, Any] = {"key": "k", "record": DONE, "rows": 1, "step_rows": 0, "failure_rows": 0, "letters": 0}
    well |= {"in_outbox": 0, "in_queues": 0, "acts": {}}
    return Account(**well | changes)


def test_books_in_order_show_no_violation() -> None:
    step = {"kind": "step", "state": "done"}
    assert account().violations() == []
    assert account(record=DONE | {"effects": {"one": step}}, step_rows=1).violations() == []
    assert account(record=None, rows=0, in_outbox=1).violations() == []
    assert account(record=None, rows=0, in_queues=1).violations() == []
    assert account(record=None, rows=0, letters=1).violations() == []
    assert account(record=DONE | {"status": "failed"}, rows=0, letters=1, failure_rows=1).violations() == []


@pytest.mark.parametrize(
    ("invariant", "changes"),
    [
        ("I1", {"rows": 2}),
        ("I1", {"step_rows": 2}),
        ("I3", {"rows": 0}),
        ("I3", {"record": DONE | {"status": "started"}, "in_outbox": 1}),
        ("I3", {"record": None, "in_queues": 1}),
        ("I3", {"step_rows": 1}),
        ("I3", {"record": DONE | {"effects": {"one": {"kind": "step", "state": "done"}}}}),
        ("I3", {"failure_rows": 1}),
        ("I12", {"acts": {"call": 2}}),
        ("I13", {"record": DONE | {"status": "failed"}, "rows": 0}),
        ("I15", {"record": None, "rows": 0}),
        ("I15", {"record": DONE | {"status": "released"}, "rows": 0}),
    ],
)
def test_books_that_do_not_agree_name_the_invariant(invariant: str, changes: Any) -> None:
    assert [each for each in account(**changes).violations() if each.startswith(f"k: {invariant}:")]


def test_a_provider_that_acted_under_an_unknown_key_is_a_violation() -> None:
    assert Books({"k": account()}).violations() == []
    assert Books({"k": account()}, ["idem-1"]).violations() == [
        "I12: the provider acted under idem-1, a key of no operation"
    ]


# ---------------------------------------------------------------- the matrix


def test_every_outcome_of_the_matrix_is_explained() -> None:
    letters = {part for cell in CELLS.values() for outcome in cell.outcomes for part in outcome.split(",")}
    assert letters - set(LEGEND) == set()
    assert set(ALSO) <= set(CELLS)


def test_a_cell_that_is_not_in_the_matrix_is_refused() -> None:
    assert find("F1", "P2").outcomes == {"R,S"}
    with pytest.raises(ValueError, match="no cell F1/P12"):
        find("F1", "P12")


def test_a_test_may_only_have_seen_what_its_cell_expects() -> None:
    noted: list[str] = []
    cell = SeenCell(find("F1", "P2"), noted.append)
    cell.saw("R,S")
    with pytest.raises(AssertionError, match="F1/P2: seen '–', the matrix expects 'R,S'"):
        cell.saw("–")
    assert noted == ["R,S", "–"]


# ---------------------------------------------------------------- the report


def collected(*reports: tuple[str, str, str, list[str]]) -> report.Collector:
    """What is collected of tests in F1/P0, F1/P1 …: (node id, outcome, when, letters)."""
    collector = report.Collector()
    items: list[Any] = []
    for number in range(4):
        mark = SimpleNamespace(args=("F1", f"P{number}"))
        items.append(SimpleNamespace(nodeid=f"t{number}", get_closest_marker=lambda name, mark=mark: mark))
    collector.pytest_collection_modifyitems(items)
    for nodeid, outcome, when, letters in reports:
        seen: Any = SimpleNamespace(
            nodeid=nodeid,
            when=when,
            duration=1.0,
            failed=outcome == "failed",
            skipped=outcome == "skipped",
            longrepr=("file", 1, "Skipped: no root"),
            user_properties=[(SAW, ("F1", "P0", letter)) for letter in letters],
        )
        collector.pytest_runtest_logreport(seen)
    return collector


def test_a_cell_prints_what_was_seen_or_why_not() -> None:
    seen = collected(
        ("t0", "passed", "call", ["R"]),
        ("t1", "failed", "call", ["R,S"]),
        ("t2", "skipped", "setup", []),
    )
    assert [seen.word(CELLS["F1", f"P{number}"]) for number in range(5)] == [
        "R",
        report.FAILED,
        report.NOT_RUN,
        report.NOT_SELECTED,
        report.MISSING,
    ]
    assert seen.word(CELLS["F1", "P9"]) == "–"
    assert [(cell.name, reason) for cell, reason in seen.reasons()] == [("F1/P2", "no root")]
    assert not seen.is_complete
    words = Counter(seen.word(cell) for cell in seen.wrong)
    assert (words[report.FAILED], CELLS["F1", "P1"] in seen.wrong, CELLS["F1", "P4"] in seen.wrong) == (1, True, True)
    assert "shown=1 failed=1" in report.summary(seen)


def test_a_violation_found_after_a_test_has_passed_fails_its_cell() -> None:
    seen = collected(("t0", "passed", "call", ["R"]), ("t0", "failed", "teardown", ["R"]))
    assert seen.word(CELLS["F1", "P0"]) == report.FAILED


def test_the_kept_page_shows_every_fault_and_every_letter() -> None:
    page = report.markdown(collected(("t0", "passed", "call", ["R"])))
    assert all(f"**{cell.fault}**" in page for cell in CELLS.values())
    assert all(f"**{letter}**" in page for letter in LEGEND)
