"""What is remembered about callers is bounded."""

from __future__ import annotations

from api.limits import REMEMBERED, RateLimit
from idempotency.http.recent import Recent


def test_the_entry_that_was_set_longest_ago_is_forgotten_first() -> None:
    recent: Recent[str, int] = Recent(2)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        recent[key] = value
    assert dict(recent) == {"a": 3, "c": 4}


def test_a_caller_among_too_many_begins_with_a_full_bucket() -> None:
    limit = RateLimit(burst=1, per_second=0.001)
    assert limit.take("first") == 0
    assert limit.take("first") > 0
    for number in range(REMEMBERED):
        assert limit.take(f"caller-{number}") == 0
    assert limit.take("first") == 0
