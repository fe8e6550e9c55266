"""Waiting for Postgres to answer about a delivery, or for `cell_of`: the one rule for everything up to the answer to its claim.

Only a defect of the message itself rejects it. A database that is away, a broken connection, a missing grant or table,
a pooler, a bug of ours: none is the message's fault, and each may be over the next time. So the delivery waits,
unacknowledged, with growing pauses. But it occupies a slot, and the broker has a consumer time-out: after minutes, or
when its time limit or a shutdown comes first, it is `Unanswered`, and the task puts it back.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy.exc import DataError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..attempt.heartbeat import JobTime
from ..errors import CallRefused, Unanswered, UnknownVersion
from ..observe import metrics
from ..observe.logs import log
from ..store.statements import describe, is_news

T = TypeVar("T")

# Wrong with the message itself, at every delivery: its call, or values that no column accepts. A rule newer than this code
# is not a defect, but waiting here does not help: the dead-letter consumer puts such a message back.
DEFECTS = (CallRefused, DataError, IntegrityError, UnknownVersion)
# Seconds. Most causes are over at once (a broken connection, a failover); a server that starts must not be flooded.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0
# Seconds. Longer than a restart or a failover; far below RabbitMQ's consumer time-out of 30 minutes.
PATIENCE = 300.0
# At most this many times `PATIENCE`, summed over the messages of one job.
OUTAGES = 2
# Of a hard time limit: the rest is for putting the message back before the process is killed.
SHARE_OF_TIME_LIMIT = 0.8
# Seconds until a shutdown is noticed.
GLANCE = 0.2

# Whether the worker shuts down. The pool's processes get no signal of that, so they share this page of memory.
_stopping = mmap.mmap(-1, 1)
# The hard time limit of the worker itself, by its option or its setting, in seconds: its processes are forked after it is known.
_worker_limit: float | None = None


@dataclass(slots=True)
class Budget:
    """What the deliveries of one job of the pool share: how long they may wait, and its time. `limit`: its shorter time limit, in seconds."""

    limit: float | None = None
    began: float = field(default_factory=time.monotonic)
    # One of them has waited in vain, and none has been answered since.
    is_spent: bool = False
    # Seconds that some of them have waited in vain, all together.
    in_vain: float = 0.0
    job: JobTime = field(default_factory=JobTime)


class Waiting:
    """How long one delivery waits: `PATIENCE` seconds, and less when the worker stops or the soft time limit passes.

    Once one of a batch has waited in vain, those after it ask only once, until one is answered, and after `OUTAGES` of them all
    do. An eager call waits only for a Postgres that is away; everything else is raised to its caller.
    """

    def __init__(
        self,
        task: str,
        *,
        time_limit: Callable[[], float | None] = lambda: None,
        is_eager: bool = False,
        budget: Budget | None = None,
    ) -> None:
        self._task = task
        self._is_eager = is_eager
        self._budget = budget or Budget()
        self._began = time.monotonic()
        self._time_limit = time_limit
        self._is_cut_short = False
        self._pause = 0.0
        self._is_logged = False

    def answer(self, ask: Callable[[], T]) -> T:
        """Ask until there is an answer. Raises a defect of the message as it is, and `Unanswered`."""
        while True:
            try:
                if self._pause:
                    self._rest()
                return ask()
            except SoftTimeLimitExceeded as error:
                # It may have interrupted an answer on its way: ask once more, at once.
                self._pause, self._is_cut_short = 0.0, True
                self._log_once(error)
            except DEFECTS:
                raise
            except Exception as error:
                if self._is_eager and not isinstance(error, OperationalError | PoolTimeout):
                    raise
                self._log_once(error)
                if time.monotonic() >= self._until() or is_stopping():
                    self._budget.is_spent = True
                    self._budget.in_vain += time.monotonic() - self._began
                    raise Unanswered from error
                self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)

    def _until(self) -> float:
        """When patience ends. Asked only after a failure: hardly any delivery has one."""
        if self._is_cut_short or self._budget.is_spent:
            return self._began
        until = self._began + min(PATIENCE, OUTAGES * PATIENCE - self._budget.in_vain)
        limit = min(filter(None, (self._budget.limit, self._time_limit(), _worker_limit)), default=None)
        return until if limit is None else min(until, self._budget.began + SHARE_OF_TIME_LIMIT * limit)

    def _rest(self) -> None:
        end = min(time.monotonic() + self._pause, self._until())
        while (left := end - time.monotonic()) > 0 and not is_stopping():
            time.sleep(min(left, GLANCE))
            self._budget.job.restart()  # the others wait for this one

    def _log_once(self, error: BaseException) -> None:
        news = is_news(error)  # asked each time, so that a long outage stays one
        if not self._is_logged:
            if news:
                log.warning("claim_waits", task=self._task, error=describe(error))
            metrics.waiting.labels(self._task, type(getattr(error, "orig", None) or error).__name__).inc()
        self._is_logged = True


def is_stopping() -> bool:
    """Whether the worker of this process has been told to shut down."""
    return _stopping[0] == 1


def note_shutdown(**_: Any) -> None:
    _stopping[0] = 1


def note_start(sender: Any = None, **_: Any) -> None:
    global _worker_limit
    _stopping[0] = 0
    _worker_limit = getattr(sender, "time_limit", None)
