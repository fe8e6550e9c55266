"""Messages whose operation has been completed before: each key ten times more, beside a plain task that does nothing.

Powertools reads the stored result, and so does ours, for twenty at once with `batch=20`. celery-once is not here: it
deletes its lock when a task has ended, so it would insert the row ten times more. Nor are Procrastinate and DBOS, which have no messages: a second job of
the same key is another job in the former, and nothing at all in the latter, whose key is looked for on enqueueing.
"""

from __future__ import annotations

import time

from .contenders import rows
from .contenders.celery_side import CeleryTask
from .contenders.contender import Contender
from .contenders.contest import TIMEOUT, Contest, Rates, in_turns

COPIES = 10


def measure(contest: Contest, *, rounds: int, messages: int) -> Rates:
    """Messages per second, by contender and round; so many in each turn."""
    sides = [contest.celery("noop", like="plain"), *(contest.celery(name) for name in ("powertools", "unique", "each"))]
    with contest.started(*sides, messages=messages):
        return in_turns(
            sides,
            rounds,
            lambda side, round_: _turn(contest, side, messages // (COPIES if round_ else 4 * COPIES)),
            "duplicates: ours and others in turns",
        )


def drained(side: CeleryTask, count: int) -> float:
    """Let it consume the `count` messages in its queue until none is in hand any more. Returns messages per second."""
    began = time.perf_counter()
    side.begin()
    while side.waiting():
        if time.perf_counter() - began > TIMEOUT:
            raise TimeoutError(f"{side.name}: the queue was not empty after {TIMEOUT:.0f} s")
        time.sleep(0.01)
    side.carry_out()
    took = time.perf_counter() - began
    side.end()
    return count / took


def _turn(contest: Contest, side: Contender, keys: int) -> float:
    assert isinstance(side, CeleryTask)
    numbers = contest.numbers(keys)
    if side.name != "noop":
        contest.turn(side, numbers)
    since = rows.mark(contest.database)
    side.send(numbers * COPIES)
    rate = drained(side, len(numbers) * COPIES)
    rows.check(contest.database, since, side.name, [])
    return rate
