"""The same job, up to a hundred in one transaction, beside plain Celery, which commits each."""

from __future__ import annotations

from .contenders.contest import Contest, Rates


def measure(contest: Contest, *, rounds: int, messages: int) -> Rates:
    """Jobs per second, by task and round."""
    sides = [contest.celery(name) for name in ("plain", "batch")]
    with contest.started(*sides, messages=messages):
        return contest.race(sides, rounds=rounds, messages=messages, description="batch: plain and ours in turns")
