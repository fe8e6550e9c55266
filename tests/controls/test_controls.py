"""Each safeguard is removed once, and its oracle must report it; a control that proves nothing is noticed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import services
from idempotency.attempt import hints
from idempotency.store import ends
from tests.chaos.checker import Violation
from tests.controls.run import PATIENCE, Outcome, run
from tests.controls.safeguards import SAFEGUARDS, NothingToRemove, Removal, remove, without
from tests.controls.scenarios import CONTROLS

CONTROL = CONTROLS[0]
ITS_OWN = Violation(CONTROL.invariant, "a", "a write under an old fence")
ANOTHERS = Violation("I99", "a", "something else")
# The others take minutes together: `make controls` runs them all.
QUICK = {"confirm"}


@pytest.mark.controls
@pytest.mark.parametrize(
    "control",
    [
        pytest.param(control, id=control.name, marks=[pytest.mark.quick] * (control.name in QUICK))
        for control in CONTROLS
    ],
)
def test_the_oracle_is_silent_with_its_safeguard_and_tells_without_it(servers: services.Services, control: Any) -> None:
    if servers.broker == "redis":
        pytest.skip("needs RabbitMQ: what is removed is what only it can do")
    assert run(servers, control).problems == []


def test_every_safeguard_has_its_control() -> None:
    assert [control.name for control in CONTROLS] == list(SAFEGUARDS)


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        (Outcome(CONTROL, [], [], 1, 1), "green without its safeguard"),
        (
            Outcome(CONTROL, [], [ANOTHERS], 1, 1),
            "green without its safeguard",
        ),  # a report by another oracle is not enough
        (Outcome(CONTROL, [ANOTHERS], [ITS_OWN], 1, 1), "red with its safeguard in place"),
        (Outcome(CONTROL, [], [ITS_OWN], 1, PATIENCE + 1), "to tell"),
    ],
)
def test_a_control_that_proves_nothing_says_why(outcome: Any, complaint: str) -> None:
    assert [complaint in problem for problem in outcome.problems] == [True]


def test_a_control_that_tells_only_without_its_safeguard_is_right() -> None:
    assert Outcome(CONTROL, [], [ANOTHERS, ITS_OWN], 1, 1).problems == []


@pytest.mark.parametrize("name", [name for name in SAFEGUARDS if name != "delivery_limit"])
def test_a_removed_safeguard_is_gone_and_comes_back(name: Any) -> None:
    removal = Removal()
    SAFEGUARDS[name](removal)
    changed = [(owner, attribute, before) for owner, attribute, before in removal._before]
    assert changed
    assert all(getattr(owner, attribute) != before for owner, attribute, before in changed)
    removal.undo()
    assert all(getattr(owner, attribute) == before for owner, attribute, before in changed)


def test_a_missing_safeguard_is_an_error_and_nothing_stays_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for script in ("_DROP", "_DROP_ALL", "_TAKE"):
        monkeypatch.setattr(hints, script, "redis.call('UNLINK', KEYS[1])")
    before = ends._COMPLETE
    with pytest.raises(NothingToRemove, match="hints"):
        remove(["fence", "hint_compare"])
    assert before == ends._COMPLETE
    with pytest.raises(NothingToRemove, match="no statement has"), without("fence", "fence"):
        pass
    assert before == ends._COMPLETE


@pytest.mark.long
def test_an_unknown_control_is_refused_by_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.controls", "--only", "nonsense"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "nonsense" in done.stderr
