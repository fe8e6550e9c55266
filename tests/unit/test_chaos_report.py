"""The verdict on a chaos run: promises kept, broken, or nothing proved."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.chaos.checker import Counts, Violation
from tests.chaos.plan import WEIGHTS
from tests.chaos.report import LONG, SHORT_UNSEEN, Report, unproved
from tests.chaos.run import Options

KINDS = list(WEIGHTS)
ENOUGH = dict.fromkeys(WEIGHTS, 2)
GOOD = Counts(accepted=10, completed=9, failed=1, takeovers=3, fenced=1)
BROKEN = Violation("I1", "red/chaos.deposit/17", "2 committed results in generation 1")


def report(violations: Any = (), problems: Any = (), counts: Any = GOOD) -> Any:
    return Report(7, 60.0, ENOUGH, {}, counts, list(violations), list(problems))


def test_a_run_that_kept_its_promises_ends_with_0() -> None:
    assert report().status == 0


def test_a_violation_ends_with_1_even_if_the_run_proves_nothing() -> None:
    assert report([BROKEN], ["no takeover"]).status == 1


def test_a_run_that_proves_nothing_ends_with_2() -> None:
    assert report(problems=["no takeover"]).status == 2


def test_the_last_line_has_every_figure() -> None:
    assert report([BROKEN]).line == (
        f"RESULT seed=7 seconds=60 faults={2 * len(WEIGHTS)} kinds={len(WEIGHTS)} accepted=10 completed=9 failed=1 "
        "dead=0 duplicated=0 takeovers=3 fenced=1 lost=0 doubled=0 violations=1"
    )


def test_the_last_line_says_that_it_was_a_cluster() -> None:
    line = Report(7, 60.0, ENOUGH, {}, GOOD, [], [], is_cluster=True).line
    assert f"kinds={len(WEIGHTS)} cluster=1 accepted=10" in line


def test_a_run_against_a_cluster_needs_its_kinds_of_faults_too() -> None:
    kinds = Options(LONG, 7, is_cluster=True).kinds
    assert unproved(LONG, dict.fromkeys(kinds, 20), GOOD, kinds=kinds) == []
    but_one = dict.fromkeys(kinds, 20) | {"promote_standby": 0}
    assert unproved(LONG, but_one, GOOD, kinds=kinds) == ["never hit: promote_standby"]


def test_a_run_with_every_kind_takeover_and_fenced_write_is_a_proof() -> None:
    assert unproved(60, ENOUGH, GOOD) == []


@pytest.mark.parametrize(
    ("inflicted", "counts", "reason"),
    [
        (ENOUGH, GOOD, f"only {2 * len(WEIGHTS)} faults in 300 s"),
        (ENOUGH | dict.fromkeys(KINDS[:4], 0), GOOD, f"never hit: {', '.join(KINDS[:4])}"),
        (ENOUGH, Counts(accepted=1, completed=1, fenced=1), "no takeover"),
        (ENOUGH, Counts(accepted=1, completed=1, takeovers=1), "no fenced write"),
        (ENOUGH, Counts(takeovers=1, fenced=1), "0 operations accepted, 0 completed"),
    ],
)
def test_a_run_in_which_too_little_went_wrong_proves_nothing(inflicted: Any, counts: Any, reason: str) -> None:
    seconds = 300 if "300 s" in reason else 60
    assert unproved(seconds, inflicted, counts) == [reason]


def test_a_violation_is_shown_with_its_history_and_kept_with_the_logs(tmp_path: Path) -> None:
    broken = report([BROKEN])
    broken.histories, broken.logs = {BROKEN.key: ["1 records insert"]}, tmp_path
    screen = io.StringIO()
    broken.show(Console(file=screen, soft_wrap=True))
    for text in (screen.getvalue(), (tmp_path / "violations.txt").read_text()):
        assert "I1 red/chaos.deposit/17: 2 committed results in generation 1" in text
        assert "1 records insert" in text
    assert f"logs: {tmp_path}" in screen.getvalue()


def test_a_run_is_recorded_as_one_line_of_json() -> None:
    line = report([BROKEN]).as_json()
    assert "\n" not in line
    assert json.loads(line)["violations"][0]["invariant"] == "I1"


def test_a_run_in_which_a_fault_of_its_own_never_struck_proves_nothing() -> None:
    struck = {"swallowed replies": 3, "commands to release": 0}
    often = dict.fromkeys(WEIGHTS, 4)
    assert unproved(LONG, often, GOOD, struck) == ["never seen: commands to release"]
    assert unproved(LONG, often | {"cut_commit": 0}, GOOD) == ["never hit: cut_commit"]


def test_a_minute_need_not_have_seen_every_rare_event() -> None:
    unseen = {f"event {n}": 0 for n in range(SHORT_UNSEEN)}
    assert unproved(60, ENOUGH | dict.fromkeys(KINDS[:2], 0), GOOD, unseen | {"c": 1}) == []
    assert unproved(60, ENOUGH, GOOD, unseen | {"c": 0}) == [f"never seen: {', '.join(unseen)}, c"]
