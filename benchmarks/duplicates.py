"""Messages whose operation has been completed before: each key ten times more, beside a plain task that does nothing.

Powertools reads the stored result; ours is acknowledged by a hint. celery-once is not here: it deletes its lock when a task
has ended, so it would insert the row ten times more. Nor are Procrastinate and DBOS, which have no messages: a second job of
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
    sides = [contest.celery("noop", like="plain"), contest.celery("powertools"), contest.celery("unique")]
    with contest.started(*sides, messages=messages):
        return in_turns(
            sides,
            rounds,
            lambda side, round_: _turn(contest, side, messages // (COPIES if round_ else 4 * COPIES)),
            "duplicates: ours and others in turns",
        )


def drained(contest: Contest, side: CeleryTask, count: int) -> float:
    """Let it consume the `count` messages in its queue. Returns messages per second.

    The last ones, at most as many as a worker prefetches, are still in hand when the queue is empty: they are not counted.
    """
    in_hand = side.layout.concurrency * int(side.task.app.conf.worker_prefetch_multiplier)
    if count <= in_hand:
        raise ValueError(f"{count} messages are not more than the {in_hand} that a worker prefetches")
    began = time.perf_counter()
    side.begin()
    while side.waiting():
        if time.perf_counter() - began > TIMEOUT:
            raise TimeoutError(f"{side.name}: the queue was not empty after {TIMEOUT:.0f} s")
        time.sleep(0.01)
    took = time.perf_counter() - began
    side.end()
    return (count - in_hand) / took


def _turn(contest: Contest, side: Contender, keys: int) -> float:
    assert isinstance(side, CeleryTask)
    numbers = contest.numbers(max(keys, 5))  # so that there are more messages than a worker prefetches
    if side.name != "noop":
        contest.turn(side, numbers)
    since = rows.mark(contest.database)
    side.send(numbers * COPIES)
    rate = drained(contest, side, len(numbers) * COPIES)
    rows.check(contest.database, since, side.name, [])
    return rate
