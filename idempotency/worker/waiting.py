"""Waiting for Postgres' answer about a delivery: the one rule for everything that comes before a claim is answered.

Only a defect of the message itself rejects it. A database that is away, a connection that broke, a grant or a table
that is missing, a pooler, an error of ours: none is the message's fault, and each may be over the next time. So the
delivery waits, unacknowledged, with growing pauses. Its slot and the broker's consumer time-out are not for ever: after
minutes, or when its time limit or a shutdown comes first, it is `Unanswered`, and the task puts it back.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from typing import Any, TypeVar

from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy.exc import DataError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..errors import CallRefused, Unanswered, UnknownVersion
from ..observe import metrics
from ..observe.logs import log
from ..store.statements import describe

T = TypeVar("T")

# What is wrong with the message, and would be at every delivery: its call, or values that no column takes. A newer rule than
# this code knows is no defect, but no wait of this process cures it: the dead-letter consumer puts the message back.
DEFECTS = (CallRefused, DataError, IntegrityError, UnknownVersion)
# Over at once in most cases (a connection that broke, a failover), and no load on a server that is starting.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0
# Longer than a restart or a failover; far below RabbitMQ's consumer time-out of 30 minutes.
PATIENCE = 300.0
# Of a hard time limit: what is left is for putting the message back, before its process is killed.
SHARE_OF_TIME_LIMIT = 0.8
# How soon a shutdown is noticed.
GLANCE = 0.2

# Whether the worker shuts down; shared with the pool's processes, which are not told and inherit this page.
_stopping = mmap.mmap(-1, 1)


class Waiting:
    """How long one delivery waits: `patience` seconds, and less when the worker stops or the soft time limit passes.

    An eager call waits only for a Postgres that is away: its caller is there to be told everything else.
    """

    def __init__(self, task: str, *, time_limit: float | None = None, is_eager: bool = False) -> None:
        self._task = task
        self._is_eager = is_eager
        patience = PATIENCE if time_limit is None else min(PATIENCE, SHARE_OF_TIME_LIMIT * time_limit)
        self._until = time.monotonic() + patience
        self._pause = 0.0
        self._told = False

    def answer(self, ask: Callable[[], T]) -> T:
        """Ask until there is an answer. Raises a defect of the message as it is, and `Unanswered`."""
        while True:
            try:
                self._rest()
                return ask()
            except SoftTimeLimitExceeded as error:
                # It may have interrupted an answer on its way: ask once more, and at once.
                self._pause, self._until = 0.0, time.monotonic()
                self._tell(error)
            except DEFECTS:
                raise
            except Exception as error:
                if self._is_eager and not isinstance(error, OperationalError | PoolTimeout):
                    raise
                self._tell(error)
                if time.monotonic() >= self._until or is_stopping():
                    raise Unanswered from error
                self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)

    def _rest(self) -> None:
        end = min(time.monotonic() + self._pause, self._until)
        while (left := end - time.monotonic()) > 0 and not is_stopping():
            time.sleep(min(left, GLANCE))

    def _tell(self, error: BaseException) -> None:
        if not self._told:  # once for a delivery, however long it waits
            log.warning("claim_waits", task=self._task, error=describe(error))
            metrics.waiting.labels(self._task, type(getattr(error, "orig", None) or error).__name__).inc()
        self._told = True


def is_stopping() -> bool:
    """Whether the worker of this process has been told to shut down."""
    return _stopping[0] == 1


def note_shutdown(**_: Any) -> None:
    _stopping[0] = 1


def note_start(**_: Any) -> None:
    _stopping[0] = 0
