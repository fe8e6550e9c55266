"""The same job once for each key: our idempotent task beside what people would use instead, in turns, in one run.

All jobs are in the queue before the workers begin, so sending is not measured. The results are ratios of medians, because
absolute times on shared machines say little.
"""

from __future__ import annotations

from .contenders.contest import Contest, Rates

# What our task is compared with, and the name in RESULT lines.
OTHERS = ("plain", "dbos", "procrastinate", "powertools", "celery_once")


def measure(contest: Contest, *, rounds: int, messages: int) -> Rates:
    """Jobs per second, by contender and round."""
    with contest.others() as (procrastinate, dbos):
        celery = [contest.celery(name) for name in ("plain", "unique", "each", "powertools", "celery_once")]
        sides = (*celery, procrastinate, dbos)
        with contest.started(*sides, messages=messages):
            return contest.race(sides, rounds=rounds, messages=messages, description="unique: ours and others in turns")
