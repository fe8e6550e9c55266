"""The same job, up to a hundred in one transaction, beside plain Celery, which commits each."""

from __future__ import annotations

from .contenders.contest import Contest, Rates, in_turns


def measure(contest: Contest, *, rounds: int, messages: int) -> Rates:
    """Jobs per second, by task and round."""
    sides = [contest.celery(name) for name in ("plain", "batch")]
    with contest.started(*sides, messages=messages):
        return in_turns(
            sides,
            rounds,
            lambda side, round_: contest.turn(side, contest.numbers(messages if round_ else max(messages // 4, 1))),
            "batch: plain and ours in turns",
        )
