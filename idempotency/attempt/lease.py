"""Leases: the hint in Redis that saves work, and the heartbeat that keeps what an attempt holds.

Redis may say "somebody is on it", never "go", and its word alone acknowledges a message only while the lease
carries the guarded mark, which is set after a duplicate was counted on the record. Losing Redis, or everything in
it, costs round trips and nothing else.
"""

from __future__ import annotations

import _thread
import contextlib
import copy
import hashlib
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..observe import metrics
from ..observe.logs import log
from ..store.records import Claimed, Renewal
from ..wire.keys import OperationId

# Sent as text each time: EVALSHA would cost a round trip to ask whether a restarted Redis still knows the script.
# Value of a lease: "<token> <fingerprint>", with " guarded" behind it once a duplicate was counted.
_DROP = """
for i = {first}, #KEYS do
    local value = redis.call('GET', KEYS[i])
    if value == ARGV[i + 1] or value == ARGV[i + 1] .. ' guarded' then redis.call('DEL', KEYS[i]) end
end
"""
_DROP_ALL = _DROP.format(first=1)
# The leases dropped since the last call go with it.
_TAKE = f"""
{_DROP.format(first=2)}
local value = redis.call('GET', KEYS[1])
if not value then
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[1])
    return ARGV[2]
end
return value
"""
_GUARD = """
if redis.call('GET', KEYS[1]) == ARGV[2] then
    return redis.call('SET', KEYS[1], ARGV[2] .. ' guarded', 'KEEPTTL')
end
"""
# The holder's word is Postgres': a missing or foreign lease is set again, a guarded one keeps its mark.
_RENEW = """
for i = 1, #KEYS do
    local value = redis.call('GET', KEYS[i])
    if value ~= ARGV[i + 1] .. ' guarded' then value = ARGV[i + 1] end
    redis.call('SET', KEYS[i], value, 'PX', ARGV[1])
end
"""


class Hint(StrEnum):
    FREE = "free"  # ours now, or nothing known
    HELD = "held"  # somebody is on it: ask Postgres, duplicate first
    GUARDED = "guarded"  # a duplicate of this request was counted: this one may go


class Leases:
    """The leases in Redis. Every call is one round trip of at most `redis_timeout`, and none ever raises."""

    def __init__(self, url: str | None, *, database: str, lease: float, timeout: float, pause: float) -> None:
        self._database = database
        self._lease_ms = max(int(lease * 1000), 1)
        self._pause = pause
        self._skip_until = 0.0
        self._url = url
        self._timeout = timeout
        self._dropped: deque[tuple[str, str]] = deque()
        self._redis = self._client()

    def apart(self) -> Leases:
        """The same leases over connections of their own: under gevent no socket may serve two threads."""
        other = copy.copy(self)
        other._redis = self._client()
        return other

    def _client(self) -> redis.Redis | None:
        if self._url is None:
            return None
        return redis.Redis.from_url(
            self._url,
            decode_responses=True,
            socket_timeout=self._timeout,
            socket_connect_timeout=self._timeout,
            # redis-py's own retries can outlast a lease, and find their own first answer on the second try.
            retry=Retry(NoBackoff(), 0),
        )

    def take(self, id: OperationId, token: str, fingerprint: str) -> Hint:
        """Ask whether somebody is on it, and leave our lease if nobody is.

        The leases dropped since the last call go in the same round trip.
        """
        mine = f"{token} {fingerprint}"
        value = self._call(_TAKE, [(self._name(id), mine), *self._take_dropped()])
        if value is None or str(value).startswith(mine):
            return Hint.FREE
        return Hint.GUARDED if str(value).endswith(f" {fingerprint} guarded") else Hint.HELD

    def guard(self, id: OperationId, token: str, fingerprint: str) -> None:
        """Mark the holder's lease: one duplicate was counted, so further ones need no Postgres."""
        self._call(_GUARD, [(self._name(id), f"{token} {fingerprint}")])

    def hold(self, held: Sequence[tuple[OperationId, str, str]]) -> None:
        """Set the leases of confirmed holders (operation, token, fingerprint), whatever is there now."""
        self._call(_RENEW, [(self._name(id), f"{token} {fingerprint}") for id, token, fingerprint in held])

    def drop(self, id: OperationId, token: str, fingerprint: str) -> None:
        """Drop our own lease; somebody else's stays. It leaves with the next `take`: nobody waits for it."""
        if self._redis is not None:
            self._dropped.append((self._name(id), f"{token} {fingerprint}"))

    def flush(self) -> None:
        """Send what was dropped and has not left yet."""
        if dropped := self._take_dropped():
            self._call(_DROP_ALL, dropped)

    def _take_dropped(self) -> list[tuple[str, str]]:
        dropped = []
        with contextlib.suppress(IndexError):  # empty, or emptied by another thread meanwhile
            while True:
                dropped.append(self._dropped.popleft())
        return dropped

    def _name(self, id: OperationId) -> str:
        return lease_name(id, self._database)

    def _call(self, script: str, leases: Sequence[tuple[str, str]]) -> object | None:
        """One round trip over leases (name, value). Returns the script's answer; None when there is none."""
        if self._redis is None or time.monotonic() < self._skip_until:
            return None  # leases run out by themselves
        names = [name for name, _ in leases]
        values = [value for _, value in leases]
        try:
            answer: object = self._redis.eval(script, len(names), *names, self._lease_ms, *values)
            return answer
        except redis.RedisError as error:
            # One slow call is enough: every task of the next seconds goes to Postgres alone.
            self._skip_until = time.monotonic() + self._pause
            metrics.redis_unavailable.inc()
            log.warning("redis_unavailable", error=type(error).__name__, pause_seconds=self._pause)
            return None


def lease_name(id: OperationId, database: str) -> str:
    """The key of a lease. Applications may share a Redis: what one database knows says nothing about another."""
    return f"idempotency:lease:{hashlib.sha256(database.encode()).hexdigest()[:8]}:{id.digest}"


@dataclass(slots=True, eq=False)
class Holding:
    """One attempt's hold on its operation. `lost` is a property of the attempt, not of the key or the task."""

    claim: Claimed
    fingerprint: str
    lease: float
    since: float = field(init=False)
    renewed_at: float = field(init=False)
    taken: bool = False

    def __post_init__(self) -> None:
        self.since = self.renewed_at = self.claim.asked_at

    @property
    def lost(self) -> bool:
        """Whether another attempt may hold the operation: one has it, or the lease is over by this process's clock.

        The clock is read because a process that was paused runs on before its heartbeat does.
        """
        return self.taken or time.monotonic() - self.renewed_at > self.lease


class Heartbeat:
    """Renews all leases of a process from one thread, every `interval` seconds, Postgres first.

    Only Postgres can say held or lost. An answer that stays away for a whole lease counts as lost, by the
    monotonic clock. A short attempt never meets the thread at all.

    The thread is a native one under gevent too, where it waits on a hub of its own: a body that computes for longer
    than its lease stops the hub of the others.
    """

    def __init__(
        self,
        renew: Callable[[Sequence[Claimed]], dict[str, Renewal]],
        leases: Leases,
        *,
        lease: float,
        interval: float,
        longest_run: float,
    ) -> None:
        self._renew = renew
        self._leases = leases.apart()
        self._lease = lease
        self._interval = interval
        self._longest_run = longest_run
        self._holdings: dict[str, Holding] = {}
        self._lock = _native("allocate_lock")()
        self._thread: int | None = None
        # held until the heartbeat is to stop: unlike an Event, a native lock never asks a hub
        self._running = _native("allocate_lock")()
        self._running.acquire()

    def hold(self, holding: Holding) -> None:
        with self._lock:
            self._holdings[holding.claim.token] = holding
            if self._thread is None:
                self._thread = _native("start_new_thread")(self._run, ())

    def drop(self, holding: Holding) -> None:
        with self._lock:
            self._holdings.pop(holding.claim.token, None)

    def stop(self) -> None:
        if self._running.locked():
            self._running.release()

    def _run(self) -> None:
        while not self._running.acquire(timeout=self._interval):
            try:
                self.run_once()
                self._leases.flush()
            except Exception:  # a heartbeat that dies would lose every lease of the process
                log.exception("heartbeat_failed")

    def run_once(self) -> None:
        """Renew everything that is held, once, and mark what is lost."""
        with self._lock:
            holdings = list(self._holdings.values())
        now = time.monotonic()
        renewable = []
        for holding in holdings:
            if now - holding.since < self._longest_run:
                renewable.append(holding)
            elif not holding.taken:
                self.lose(holding, "max_run")
        if not renewable:
            return
        try:
            verdicts = self._renew([holding.claim for holding in renewable])
        except Exception as error:
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
            self._leases.hold(held)

    def lose(self, holding: Holding, why: str) -> None:
        """Note that an attempt is not the holder any more, once."""
        with self._lock:
            if holding.taken or self._holdings.get(holding.claim.token) is not holding:
                return  # known, or finished meanwhile
            holding.taken = True
        metrics.leases_lost.labels(holding.claim.id.operation).inc()
        log.warning("lease_lost", why=why, operation=holding.claim.id.operation, key=holding.claim.id.key)


def _native(name: str) -> Any:
    """A primitive of real threads, also where gevent has put its own in its place."""
    monkey = sys.modules.get("gevent.monkey")
    return getattr(_thread, name) if monkey is None else monkey.get_original("_thread", name)
