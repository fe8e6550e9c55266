"""What a run has to have seen before it proves anything."""

from __future__ import annotations

from tests.chaos.evidence import Counts
from tests.chaos.plan import WEIGHTS
from tests.chaos.report import LONG, unproved

SEEN = Counts(accepted=9, completed=9, takeovers=1, fenced=1)
EACH = dict.fromkeys(WEIGHTS, 4)
KINDS = list(WEIGHTS)


def test_a_long_run_has_to_have_seen_everything() -> None:
    assert unproved(LONG, EACH, SEEN, {"refunds": 1}) == []
    assert unproved(LONG, EACH | {KINDS[0]: 0}, SEEN, {"refunds": 1}) == [f"never hit: {KINDS[0]}"]
    assert unproved(LONG, EACH, SEEN, {"refunds": 0}) == ["never seen: refunds"]


def test_in_a_short_run_two_of_either_may_be_missing_and_no_more() -> None:
    struck = dict.fromkeys("abc", 0)
    assert unproved(60, EACH | dict.fromkeys(KINDS[:2], 0), SEEN, {"a": 0, "b": 0, "c": 1}) == []
    assert unproved(60, EACH | dict.fromkeys(KINDS[:3], 0), SEEN) == [f"never hit: {', '.join(KINDS[:3])}"]
    assert unproved(60, EACH, SEEN, struck) == ["never seen: a, b, c"]


def test_a_run_without_faults_takeovers_or_fenced_writes_proves_nothing_however_short() -> None:
    assert unproved(30, {}, Counts())[0] == "only 0 faults in 30 s"
    assert unproved(30, EACH, Counts(accepted=1, completed=1)) == ["no takeover", "no fenced write"]
    assert unproved(30, EACH, Counts(takeovers=1, fenced=1)) == ["0 operations accepted, 0 completed"]
