"""One key ten thousand times at once: how long it takes until one message has been carried out and all are gone."""

from __future__ import annotations

from rich.progress import track

from .contenders import rows
from .contenders.contest import Contest
from .duplicates import drained

COPIES = 10_000


def measure(contest: Contest, *, rounds: int, messages: int) -> list[float]:
    """Messages per second, by round. Fewer of them if a run is a small one."""
    side, rates, copies = contest.celery("unique"), [], min(COPIES, 10 * messages)
    with contest.started(side, messages=messages):
        for round_ in track(range(rounds + 1), description=f"storm: one key {copies} times"):
            numbers = contest.numbers(1)
            since = rows.mark(contest.database)
            side.send(numbers * copies)
            rate = drained(side, copies)
            rows.check(contest.database, since, side.name, numbers)
            if round_:
                rates.append(rate)
    return rates
