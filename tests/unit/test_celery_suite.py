"""The comparison with Celery's own tests: what counts as timed out, and what the page says of it."""

from __future__ import annotations

import pytest

from tests.celery_suite.report import Comparison
from tests.celery_suite.side import Seen

SLOW = "t/integration/test_canvas.py::test_chord::test_slow"
QUICK = Seen("passed", "", 2.0)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (Seen("failed", "celery.exceptions.TimeoutError: The operation timed out."), True),
        (Seen("failed", "TimeoutError: 'redis-count' was never incremented"), True),
        (Seen("failed", "Failed: Timeout (>180.0s) from pytest-timeout."), True),
        (Seen("failed", "assert 'timeout' == 'SUCCESS'"), False),
        (QUICK, False),
    ],
)
def test_a_test_that_waited_too_long_has_timed_out(seen: Seen, *, expected: bool) -> None:
    assert seen.has_timed_out is expected


def test_the_page_names_what_passed_with_more_time_alone() -> None:
    page = Comparison({SLOW: QUICK}, {SLOW: Seen("passed", "", 61.2, patience=240.0)}, seconds=1).markdown()
    assert "run again alone with 240 seconds" in page
    assert "| `test_canvas.py::test_chord::test_slow` | ours | passed | 61 |" in page


def test_the_page_says_nothing_of_more_time_where_nothing_has_timed_out() -> None:
    assert "run again alone with" not in Comparison({SLOW: QUICK}, {SLOW: QUICK}, seconds=1).markdown()
