"""The rows that jobs have inserted: how many there are, and whether each job has its one."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import Engine, text

# Seconds from one look to the next: a turn takes seconds, and each look costs the servers what the turn is measured by.
LOOK = 0.03
_LAST = text("SELECT coalesce(max(id), 0) FROM jobs")
_COUNT = text("SELECT count(*) FROM jobs WHERE id > :mark")
_NUMBERS = text("SELECT number FROM jobs WHERE id > :mark AND job = :job")
_DOUBLED = text("SELECT job, number FROM jobs WHERE number >= :first GROUP BY job, number HAVING count(*) > 1 LIMIT 1")


def mark(database: Engine) -> int:
    """Where the rows of the next turn begin."""
    with database.connect() as connection:
        return int(connection.execute(_LAST).scalar_one())


def wait(database: Engine, since: int, count: int, timeout: float) -> None:
    """Wait until there are so many. Only rows of this turn are looked at, so that looking costs the same in every round."""
    deadline = time.monotonic() + timeout
    with database.connect() as connection:
        while (found := connection.execute(_COUNT, {"mark": since}).scalar_one()) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{found} of {count} jobs were done within {timeout:.0f} s")
            time.sleep(LOOK)


def check(database: Engine, since: int, job: str, numbers: Sequence[int]) -> None:
    """Raise `RuntimeError` unless there is one row for each number, and no other row."""
    with database.connect() as connection:
        found = sorted(connection.execute(_NUMBERS, {"mark": since, "job": job}).scalars())
        rows = connection.execute(_COUNT, {"mark": since}).scalar_one()
    if (found, rows) != (sorted(numbers), len(numbers)):
        missing, others = len(set(numbers) - set(found)), rows - len(set(found) & set(numbers))
        raise RuntimeError(
            f"{job}: of {len(numbers)} jobs, {missing} have no row; {others} rows are doubled or of no job"
        )


def check_all(database: Engine, first: int) -> None:
    """Raise `RuntimeError` if a job whose number is not below `first` has had a second row since."""
    with database.connect() as connection:
        for job, number in connection.execute(_DOUBLED, {"first": first}):
            raise RuntimeError(f"{job}: job {number} has more than one row")
