"""A row and a call outside: an effect of our task, beside a plain task that calls the same function after its insert.

The function does nothing, so what is measured is two commits more: that the call begins, and its result.
"""

from __future__ import annotations

from .contenders.contest import Contest, Rates, in_turns


def measure(contest: Contest, *, rounds: int, messages: int) -> Rates:
    """Jobs per second, by contender and round."""
    plain, ours = contest.celery("plain_outside"), contest.celery("outside")
    with contest.started(plain, ours, messages=messages):
        return in_turns(
            (plain, ours),
            rounds,
            lambda side, round_: contest.turn(side, contest.numbers(messages if round_ else max(messages // 4, 1))),
            "outside: plain and an effect in turns",
        )
