"""Hints in Redis, which save work.

Redis may say that an operation is held, never that it is free. A message is acknowledged because of a hint alone only if
the hint carries the mark "counted", which is set after a duplicate was counted on the record. Losing Redis, or
everything in it, costs round trips and nothing else.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import time
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..observe import metrics
from ..observe.logs import log
from ..sentinel import client_of_primary, is_sentinel
from ..tls import redis_options
from ..wire.keys import OperationId

if TYPE_CHECKING:
    from redis.connection import ConnectionPool

# Sent as text each time: EVALSHA would cost a round trip to ask whether a restarted Redis still knows the script.
# Value of a hint: "<token> <fingerprint>", with " counted" behind it once a duplicate was counted.
_DROP = """
for i = {first}, #KEYS do
    local value = redis.call('GET', KEYS[i])
    if value == ARGV[i + 1] or value == ARGV[i + 1] .. ' counted' then redis.call('DEL', KEYS[i]) end
end
"""
_DROP_ALL = _DROP.format(first=1)
# The hints dropped since the last call go with it.
_TAKE = f"""
{_DROP.format(first=2)}
local value = redis.call('GET', KEYS[1])
if not value then
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[1])
    return ARGV[2]
end
return value
"""
_COUNT = """
if redis.call('GET', KEYS[1]) == ARGV[2] then
    return redis.call('SET', KEYS[1], ARGV[2] .. ' counted', 'KEEPTTL')
end
"""
# Postgres confirmed these holders: restore a missing or foreign hint, and keep the mark of a counted one.
_RENEW = """
for i = 1, #KEYS do
    local value = redis.call('GET', KEYS[i])
    if value ~= ARGV[i + 1] .. ' counted' then value = ARGV[i + 1] end
    redis.call('SET', KEYS[i], value, 'PX', ARGV[1])
end
"""


class Hint(StrEnum):
    FREE = "free"  # ours now, or nothing is known
    HELD = "held"  # there is a holder: ask Postgres, counting a duplicate first
    COUNTED = "counted"  # a duplicate of this request was counted: acknowledge this one


class Hints:
    """The hints in Redis. Every call is one round trip of at most `timeout` seconds, and none ever raises.

    Behind Sentinel, a new connection asks for the primary first, for as long again at each Sentinel that does not answer.

    `lease`: seconds after which a hint expires. `pause`: seconds without Redis after an error.
    """

    def __init__(self, url: str | None, *, owner: str, lease: float, timeout: float, pause: float) -> None:
        self.owner = owner
        self._lease_ms = max(int(lease * 1000), 1)
        self._pause = pause
        self._skip_until = 0.0
        self._dropped: deque[tuple[str, str]] = deque()
        self._redis = None if url is None else _Connections(url, timeout)

    def with_own_connections(self) -> Hints:
        """The same hints over separate connections: under gevent no socket may serve two threads."""
        other = copy.copy(self)
        if self._redis is not None:
            other._redis = self._redis.separate()
        return other

    def take(self, id: OperationId, token: str, fingerprint: str) -> Hint:
        """Ask whether there is a holder, and leave our hint if there is none.

        The hints dropped since the last call go in the same round trip.
        """
        mine = f"{token} {fingerprint}"
        value = self._call(_TAKE, [(self._name(id), mine), *self._take_dropped()])
        if value is None or str(value).startswith(mine):
            return Hint.FREE
        return Hint.COUNTED if str(value).endswith(f" {fingerprint} counted") else Hint.HELD

    def count(self, id: OperationId, token: str, fingerprint: str) -> None:
        """Mark the holder's hint: one duplicate was counted, so further ones need not ask Postgres."""
        self._call(_COUNT, [(self._name(id), f"{token} {fingerprint}")])

    def hold(self, held: Sequence[tuple[OperationId, str, str]]) -> None:
        """Set the hints of holders that Postgres confirmed (operation, token, fingerprint), whatever is there now."""
        self._call(_RENEW, [(self._name(id), f"{token} {fingerprint}") for id, token, fingerprint in held])

    def drop(self, id: OperationId, token: str, fingerprint: str) -> None:
        """Drop our own hint, and no other's. Sent with the next `take`, so that nothing waits for it."""
        if self._redis is not None:
            self._dropped.append((self._name(id), f"{token} {fingerprint}"))

    def flush(self) -> None:
        """Drop now what would be dropped with the next `take`."""
        if dropped := self._take_dropped():
            self._call(_DROP_ALL, dropped)

    def _take_dropped(self) -> list[tuple[str, str]]:
        dropped = []
        with contextlib.suppress(IndexError):  # empty, or emptied by another thread meanwhile
            while True:
                dropped.append(self._dropped.popleft())
        return dropped

    def _name(self, id: OperationId) -> str:
        return hint_name(id, self.owner)

    def _call(self, script: str, hints: Sequence[tuple[str, str]]) -> object | None:
        """One round trip over hints (name, value). Returns the script's answer; None without Redis."""
        if self._redis is None or time.monotonic() < self._skip_until:
            return None  # hints expire by themselves
        from redis import RedisError

        names = [name for name, _ in hints]
        values = [value for _, value in hints]
        try:
            return self._redis.ask("EVAL", script, len(names), *names, self._lease_ms, *values)
        # what redis-py raises for options that it does not like, too; but not all, as a soft time limit is an Exception
        except (RedisError, TypeError, ValueError, AttributeError, LookupError) as error:
            # One slow call is enough: for the next seconds every task asks Postgres alone.
            self._skip_until = time.monotonic() + self._pause
            metrics.redis_unavailable.inc()
            log.warning("redis_unavailable", error=type(error).__name__, pause_seconds=self._pause)
            return None


class _Connections:
    """Connections to Redis, for one command at a time each.

    They are redis-py's, without its client: that looks after cluster nodes, its own metrics and retries around each command,
    which costs three times the command itself.
    """

    def __init__(self, url: str, timeout: float) -> None:
        from redis.backoff import NoBackoff
        from redis.connection import ConnectionPool
        from redis.retry import Retry

        self._url, self._timeout = url, timeout
        options: dict[str, Any] = {
            "decode_responses": True,
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            # redis-py's own retries can outlast a lease
            "retry": Retry(NoBackoff(), 0),
        }
        self._pool: ConnectionPool = (
            client_of_primary(url, **options).connection_pool
            if is_sentinel(url)
            else ConnectionPool.from_url(url, **redis_options(url), **options)
        )
        self._idle: deque[Any] = deque()

    def separate(self) -> _Connections:
        """The same, over other connections."""
        return _Connections(self._url, self._timeout)

    def ask(self, *command: Any) -> object:
        """Send a command and wait for its answer. Raises `RedisError`.

        Sent once more if an idle connection turns out to be closed, as after a restart: our scripts find what they have
        done themselves, and change nothing the second time.
        """
        from redis.exceptions import ConnectionError as Closed
        from redis.exceptions import TimeoutError as TimedOut

        try:
            return self._ask(self._idle.pop(), command)
        except IndexError:
            pass
        except Closed:
            self._idle.clear()
        except TimedOut:
            # the others may lead to the same server, which is away or no longer the primary
            self._idle.clear()
            raise
        # not by the pool, which counts those that are lost, and gives no more after a hundred
        connection = self._pool.connection_class(**self._pool.connection_kwargs)
        connection.connect()  # by itself, a command does not ask the Sentinels
        return self._ask(connection, command)

    def _ask(self, connection: Any, command: Sequence[Any]) -> object:
        try:
            connection.send_command(*command)
            answer: object = connection.read_response()
        except BaseException:  # an answer that is still to come would be the next command's
            connection.disconnect()
            raise
        self._idle.append(connection)
        return answer


@lru_cache(maxsize=256)  # asked for when a hint is taken, renewed and dropped
def hint_name(id: OperationId, owner: str) -> str:
    """The key of a hint. Applications may share a Redis, and even a database: `owner` names database and application."""
    return f"{_prefix(owner)}{id.digest}"


def acl(owner: str, password: str, *, name: str) -> str:
    """The users of a Redis for hints, as an ACL file: one that may use these hints, and no default user.

    INFO and TIME are for the doctor. Contains an unsalted hash of the password, the only kind Redis supports, so make the
    password random.
    """
    secret = hashlib.sha256(password.encode()).hexdigest()
    commands = " ".join(f"+{each}" for each in ("eval", "get", "set", "del", "select", "ping", "info", "time"))
    return f"user {name} reset on #{secret} ~{_prefix(owner)}* {commands}\nuser default off\n"


def _prefix(owner: str) -> str:
    return f"idempotency:hint:{hashlib.sha256(owner.encode()).hexdigest()[:8]}:"
