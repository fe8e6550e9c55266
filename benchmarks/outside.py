"""A row and a call outside: an effect of our task, beside a plain task that calls the same function after its insert.

The function does nothing, so what is measured is two commits more: that the call begins, and its result.
"""

from __future__ import annotations

from .contenders.contest import Contest, Rates


def measure(contest: Contest, *, rounds: int, messages: int) -> Rates:
    """Jobs per second, by contender and round."""
    sides = [contest.celery(name) for name in ("plain_outside", "outside")]
    with contest.started(*sides, messages=messages):
        return contest.race(
            sides, rounds=rounds, messages=messages, description="outside: plain and an effect in turns"
        )
