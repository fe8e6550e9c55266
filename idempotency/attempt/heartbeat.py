"""The heartbeat: one thread per process renews the leases of its attempts, in Postgres first."""

from __future__ import annotations

import _thread
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..observe import metrics
from ..observe.logs import log
from ..store.answers import Claimed, Renewal
from ..store.statements import is_news
from .hints import Hints


@dataclass(slots=True)
class JobTime:
    """The time of one job of the pool, by the monotonic clock: until when it begins bodies, and since when `max_run` counts for its
    claims that wait. That is restarted with each body, and while the job waits for Postgres.
    """

    ends_at: float = math.inf
    # What is raised once for a whole job has ended a body, or the body has handled it: no other is begun.
    is_interrupted: bool = False
    started_at: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be begun or committed together."""
        return self.is_interrupted or time.monotonic() >= self.ends_at

    def restart(self) -> None:
        """Count `max_run` from now."""
        self.started_at = time.monotonic()


@dataclass(slots=True, eq=False)
class Holding:
    """One attempt's hold on its operation. `lease` in seconds; the times are those of the monotonic clock."""

    claim: Claimed
    fingerprint: str
    lease: float
    # of a claim that waits in a batch, or shares its transaction
    job: JobTime | None = None
    # when its body could begin: later than its lease, if it has waited in a batch
    began: float = field(default_factory=time.monotonic)
    since: float = field(init=False)
    renewed_at: float = field(init=False)
    # it counts as the holder no more: its lease has ended, a write matched nothing, or a COMMIT was not answered
    given_up: bool = False

    def __post_init__(self) -> None:
        self.since = self.renewed_at = self.claim.asked_at

    @property
    def run_started_at(self) -> float:
        """Since when `max_run` counts."""
        return self.began if self.job is None else self.job.started_at

    @property
    def is_renewed(self) -> bool:
        """Whether a heartbeat has renewed it, and so left a hint in Redis."""
        return self.renewed_at > self.since

    @property
    def lost(self) -> bool:
        """Whether another attempt may hold the operation: one has it, or the lease is over by this process's clock.

        The clock is read because a process that was paused goes on before its heartbeat does.
        """
        return self.given_up or time.monotonic() - self.renewed_at > self.lease


class Heartbeat:
    """Renews all leases of a process from one thread, Postgres first. `lease`, `interval` and `longest_run` in seconds.

    Only Postgres can say that a lease is held or lost. Without an answer for a whole lease, by the monotonic clock, it
    counts as lost. A short attempt ends before its first renewal.

    The thread is a native one under gevent too, with its own hub: a body that computes for longer than its lease blocks
    the hub that it runs on.
    """

    def __init__(
        self,
        renew: Callable[[Sequence[Claimed]], dict[str, Renewal]],
        hints: Hints,
        *,
        lease: float,
        interval: float,
        longest_run: float,
    ) -> None:
        self._renew = renew
        self._hints = hints.with_own_connections()
        self._lease = lease
        self._interval = interval
        self._longest_run = longest_run
        self._holdings: dict[str, Holding] = {}
        self._lock = native("allocate_lock")()
        self._thread: int | None = None
        # locked while the heartbeat runs: unlike an Event, a native lock never switches to a gevent hub
        self._running = native("allocate_lock")()
        self._running.acquire()

    def hold(self, holding: Holding) -> None:
        with self._lock:
            self._holdings[holding.claim.token] = holding
            if self._thread is None:
                self._thread = native("start_new_thread")(self._run, ())

    def drop(self, token: str) -> None:
        """Renew no claim under this token any more, if there is one."""
        with self._lock:
            self._holdings.pop(token, None)

    def stop(self) -> None:
        if self._running.locked():
            self._running.release()

    def _run(self) -> None:
        while not self._running.acquire(timeout=self._interval):
            try:
                self.run_once()
                self._hints.flush()
            except Exception:  # a heartbeat that dies would lose every lease of the process
                log.exception("heartbeat_failed")

    def run_once(self) -> None:
        """Renew all leases once, and mark those that are lost."""
        with self._lock:
            holdings = list(self._holdings.values())
        now = time.monotonic()
        renewable = []
        for holding in holdings:
            if now - holding.run_started_at < self._longest_run:
                renewable.append(holding)
            elif not holding.given_up:
                self.lose(holding, "max_run")
        if not renewable:
            return
        try:
            verdicts = self._renew([holding.claim for holding in renewable])
        except Exception as error:
            if is_news(error):
                log.warning("heartbeat_unanswered", error=type(error).__name__)
            verdicts = {}
        held = []
        for holding in renewable:
            match verdicts.get(holding.claim.token, Renewal.UNKNOWN):
                case Renewal.HELD:
                    holding.renewed_at = now
                    held.append((holding.claim.id, holding.claim.token, holding.fingerprint))
                case Renewal.LOST:
                    self.lose(holding, "taken_over")
                case Renewal.UNKNOWN:
                    if time.monotonic() - holding.renewed_at > self._lease:
                        self.lose(holding, "unknown_for_a_lease")
        if held:
            self._hints.hold(held)

    def lose(self, holding: Holding, why: str) -> None:
        """Note that an attempt is not the holder any more, once."""
        with self._lock:
            if holding.given_up or self._holdings.get(holding.claim.token) is not holding:
                return  # known, or finished meanwhile
            holding.given_up = True
        metrics.leases_lost.labels(holding.claim.id.task).inc()
        log.warning("lease_lost", why=why, task=holding.claim.id.task, key=holding.claim.id.key)


def native(name: str) -> Any:
    """A function of `_thread`, as it was before gevent patched it."""
    monkey = sys.modules.get("gevent.monkey")
    return getattr(_thread, name) if monkey is None else monkey.get_original("_thread", name)
