"""The process monitor: a process that ends by itself, unasked, is a finding to explain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from idempotency.store.statements import is_outage, sqlstate
from tests.chaos.evidence import Violation

# Of a log: enough for a traceback.
TAIL = 40
# Celery says it with a traceback, and then goes on to end: what it had received is named after it, which may be much.
FATAL = "Unrecoverable error"


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that ended without having been told to: its exit status (minus the signal) and its `last_words`."""

    name: str
    kind: str
    status: int
    tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """An end that is explained: of which kind of process, by which line of its log, and why the library is not the cause."""

    kind: str
    sign: str
    reason: str


KNOWN: Sequence[Known] = (
    Known(
        "worker",
        r"WorkerLostError: Could not start worker processes",
        # celery/worker/loops.py: before its first message the pool's children must all be alive (did_start_ok)
        "Celery: a child of the pool was killed while its worker was starting; nothing had been taken from the queue "
        "for good, and what starts the worker again is not Celery's business",
    ),
    Known(
        "worker",
        r"celery/concurrency/asynpool.py\", line \d+, in (_recv_message|process_flush_queues)",
        # celery/celery issue 2294: whatever cannot be unpickled ends the worker; each seen once in some thirty runs
        "Celery: what a child of the pool had sent could not be unpickled, and children are killed while they write; "
        "nothing was acknowledged for it, and the broker hands out again what the worker held",
    ),
    Known(
        "worker",
        r"celery/concurrency/asynpool\.py\", line \d+, in _track_child_process",
        # `_untrack_child_process` leaves None in a child that has ended; a reconnect before the pool is mended meets it
        "Celery: a child of the pool had just ended when its worker registered the pool with its event loop again; "
        "nothing was acknowledged for it, and the broker hands out again what the worker held",
    ),
    Known(
        "worker",
        r"celery/concurrency/asynpool\.py\", line \d+, in get_process_queues",
        # `on_close` mends the pool after a lost connection, before the pipes of the child that was killed are free again
        "Celery: a child of the pool was killed just before its worker lost the broker, and the pool found no pipes for "
        "another one; nothing was acknowledged for it, and the broker hands out again what the worker held",
    ),
)


# Of Postgres, where it is no outage: a deadlock or a conflict, a lock that was not free in time, a statement that was cancelled.
TRY_AGAIN = ("40", "55P03", "57014")


def is_of_the_storm(error: Exception) -> bool:
    """Whether faults explain that somebody has no answer from Postgres, or is to try again. Anything else is a finding."""
    if isinstance(error, PoolTimeout) or is_outage(error):
        return True
    return isinstance(error, DBAPIError) and (
        error.connection_invalidated or (sqlstate(error) or "").startswith(TRY_AGAIN)
    )


def memory_kills(counters: Path = Path("/proc/vmstat")) -> int:
    """How many processes the kernel of this machine has killed for want of memory since it was started."""
    try:
        counted = dict(line.split() for line in counters.read_text().splitlines())
    except OSError:  # not everywhere
        return 0
    return int(counted.get("oom_kill", 0))


def last_words(log: str) -> tuple[str, ...]:
    """The end of a log, and before it what the process said that it ends of."""
    lines = log.splitlines()
    end = max(len(lines) - TAIL, 0)
    fatal = max((number for number, line in enumerate(lines[:end]) if FATAL in line), default=end)
    return (*lines[fatal : min(fatal + TAIL, end)], *lines[end:])


def explanation(ended: Ended) -> str | None:
    """The reason of a known end; None for one that has to be explained."""
    for known in KNOWN:
        if known.kind == ended.kind.removeprefix("shop-") and any(re.search(known.sign, line) for line in ended.tail):
            return known.reason
    return None


def unexplained(ends: Sequence[Ended]) -> list[Violation]:
    """A violation for each process that ended by itself for no known reason."""
    return [
        Violation("monitor", ended.name, f"ended by itself with status {ended.status}: {_last(ended)}")
        for ended in ends
        if explanation(ended) is None
    ]


def _last(ended: Ended) -> str:
    said = [line for line in ended.tail if line.strip()]
    return said[-1] if said else "its log is empty"
