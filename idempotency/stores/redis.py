"""Records in Redis: one server, behind Sentinel, or a cluster.

Two keys for each operation, with one tag, so that a cluster has them in one slot:

    …:{digest}:lease     SET … PX: whose claim it is (a token), or "released" until the next attempt is due
    …:{digest}:record    a hash: what is known of the operation, with a time to live of its own

Each change is one script, which compares the fence and the token before it writes, and finds by them what it has done
itself if its answer was lost. Times are Redis' own: no clock of a process is compared with another's.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..store.answers import Claimed, Completed, Failed, Renewal, error_fields
from ..wire.keys import OperationId
from . import addresses
from .store import AT_ONCE, FENCE_KEPT, Answer, StoreAway, StoreBusy, Stored, Watch, mismatch

if TYPE_CHECKING:
    from redis import Redis, RedisCluster

# Characters of a result. Redis takes values of up to 512 MB; in practice `result_limit` is the limit.
ROOM = 64 * 1024 * 1024

# The fence is at least Redis' time in microseconds. It grows, too, for a key whose record has expired or was lost, without
# a counter of its own that would have to be kept forever. Lua prints numbers of that size only if it is told how.
_CLAIM = """
local r = redis.call('HMGET', KEYS[2], 'state', 'fingerprint', 'fence', 'token', 'attempts', 'opened', 'result', 'error')
local state, token = r[1], ARGV[1]
if state then
    local is_same = false
    for i = 6, #ARGV do is_same = is_same or r[2] == ARGV[i] end
    if not is_same then return {'mismatch', r[2]} end
    if state == 'completed' then return {'completed', r[7]} end
    if state == 'failed' then return {'failed', r[8]} end
end
local is_mine = state == 'started' and r[4] == token
-- of this message, whose answer came too late: nothing has run under it
local is_void = state == 'started' and string.find(ARGV[5], r[4], 1, true) ~= nil
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= token and not (is_void and holder == r[4]) then return {'busy', redis.call('PTTL', KEYS[1]), holder} end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local fence = string.format('%.0f', math.max(now, (tonumber(r[3]) or 0) + 1))
local attempts = (tonumber(r[5]) or 0) + ((is_mine or is_void) and 0 or 1)
local opened = r[6] or string.format('%.0f', now)
local fingerprint = r[2] or ARGV[6]
redis.call('HSET', KEYS[2], 'state', 'started', 'fingerprint', fingerprint, 'fence', fence, 'token', token,
           'attempts', attempts, 'opened', opened, 'holder', ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('SET', KEYS[1], token, 'PX', ARGV[2])
local taken_over = state == 'started' and not is_mine and not is_void
return {'claimed', fence, attempts, string.format('%.0f', now - opened), taken_over and 1 or 0, fingerprint}
"""
_MINE = """
local r = redis.call('HMGET', KEYS[2], 'state', 'fence', 'token', 'attempts')
local function is_mine(state) return r[1] == state and r[2] == ARGV[1] and r[3] == ARGV[2] end
"""
# 2: it has ended, by this very claim, while the heartbeat was asking.
_RENEW = f"""{_MINE}
if r[2] == ARGV[1] and r[3] == ARGV[2] and r[1] ~= 'started' then return 2 end
if not is_mine('started') then return 0 end
redis.call('PEXPIRE', KEYS[2], ARGV[4])
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""
_END = f"""{_MINE}
if is_mine(ARGV[4]) then return 1 end
if not is_mine('started') then return 0 end
redis.call('HSET', KEYS[2], 'state', ARGV[4], ARGV[5], ARGV[6])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('DEL', KEYS[1])
return 1
"""
_RELEASE = f"""{_MINE}
if is_mine('released') then return 1 end
if not is_mine('started') then return 0 end
redis.call('HSET', KEYS[2], 'state', 'released', 'attempts', r[4] - ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
if tonumber(ARGV[4]) > 0 then redis.call('SET', KEYS[1], 'released', 'PX', ARGV[4]) else redis.call('DEL', KEYS[1]) end
return 1
"""
# The fence stays for a while, so that it grows also if Redis' clock is set back.
_DROP = f"""
local state = redis.call('HGET', KEYS[2], 'state')
if state ~= 'completed' and state ~= 'failed' then return 0 end
local fence = redis.call('HGET', KEYS[2], 'fence')
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[2], 'fence', fence)
redis.call('PEXPIRE', KEYS[2], {int(FENCE_KEPT * 1000)})
return 1
"""


class RedisStore:
    """Records in the Redis at an address: `redis://`, `rediss://`, `sentinel://`, `redis+cluster://`. Connects when it is used.

    `service`: the application, whose records are its own; `timeout`: seconds for one answer.
    """

    name = "redis"
    room = ROOM

    def __init__(self, address: str, *, service: str, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        self._prefix = f"idempotency:store:{hashlib.sha256(service.encode()).hexdigest()[:8]}"
        self._made: Redis | RedisCluster | None = None

    def with_own_connections(self) -> RedisStore:
        other = copy.copy(self)
        other._made = None
        return other

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None

    def claim(
        self,
        id: OperationId,
        *,
        token: str,
        fingerprints: Sequence[str],
        holder: str,
        lease: float,
        keep: float,
        watch: Watch = AT_ONCE,
    ) -> Answer:
        asked_at = time.monotonic()
        answer, *fields = self._run(_CLAIM, id, token, _ms(lease), _ms(keep), holder, watch.unanswered, *fingerprints)
        match answer:
            case "claimed":
                fence, attempts, age, taken_over, fingerprint = fields
                return Claimed(
                    id,
                    int(fence),
                    token,
                    int(attempts),
                    1,
                    int(age) / 1e6,
                    {},
                    taken_over=bool(taken_over),
                    fingerprint=fingerprint,
                    has_hint=False,
                    asked_at=asked_at,
                )
            case "completed":
                return Completed(fields[0])
            case "failed":
                return Failed(**error_fields(fields[0]))
            case "mismatch":
                return mismatch(fields[0])
        left, holder = fields
        return StoreBusy(max(int(left), 0) / 1000 if holder == "released" else None)

    def renew(self, held: Sequence[Claimed], *, lease: float, keep: float) -> dict[str, Renewal]:
        verdicts = (Renewal.LOST, Renewal.HELD, Renewal.UNKNOWN)
        return {
            each.token: verdicts[self._run(_RENEW, each.id, each.fence, each.token, _ms(lease), _ms(keep))]
            for each in held
        }

    def complete(self, held: Claimed, result: str, *, retention: float) -> bool:
        return self._change(_END, held, _ms(retention), "completed", "result", result)

    def fail(self, held: Claimed, error: str, *, retention: float) -> bool:
        return self._change(_END, held, _ms(retention), "failed", "error", error)

    def release(self, held: Claimed, *, delay: float, keep: float, give_back: bool) -> bool:
        # not forgotten before it is due
        return self._change(_RELEASE, held, _ms(keep + delay), int(delay * 1000), int(give_back))

    def drop(self, id: OperationId) -> bool:
        return bool(self._run(_DROP, id))

    def read(self, id: OperationId) -> Stored | None:
        with _away():
            found: Any = self._client.hgetall(self._keys(id)[1])
        if "state" not in found:
            return None
        return Stored(
            found["state"],
            int(found["fence"]),
            int(found["attempts"]),
            found["fingerprint"],
            found["holder"],
            found.get("result"),
            found.get("error"),
        )

    def servers(self) -> list[tuple[dict[str, Any], float]]:
        """What the doctor looks at: INFO of the server, or of each primary of a cluster, and by how many seconds its clock is ahead.

        Raises `StoreAway`.
        """
        client: Any = self._client
        with _away():
            if not hasattr(client, "get_primaries"):
                return [_looked_at(client)]
            return [_looked_at(client.get_redis_connection(node)) for node in client.get_primaries()]

    def _change(self, script: str, held: Claimed, *arguments: Any) -> bool:
        return bool(self._run(script, held.id, held.fence, held.token, *arguments))

    def _run(self, script: str, id: OperationId, *arguments: Any) -> Any:
        # sent as text each time: EVALSHA would cost a round trip to ask whether a restarted Redis still knows the script
        with _away():
            return self._client.eval(script, 2, *self._keys(id), *arguments)

    def _keys(self, id: OperationId) -> tuple[str, str]:
        tagged = f"{self._prefix}:{{{id.digest}}}"
        return f"{tagged}:lease", f"{tagged}:record"

    @property
    def _client(self) -> Any:
        if self._made is None:
            self._made = addresses.redis_client(self._address, self._timeout)
        return self._made


def _ms(seconds: float) -> int:
    return max(int(seconds * 1000), 1)


@contextmanager
def _away() -> Iterator[None]:
    from redis import RedisError

    try:
        yield
    except (RedisError, OSError) as error:
        # its own message may have the address in it
        raise StoreAway(f"Redis: {type(error).__name__}") from error


def _looked_at(client: Any) -> tuple[dict[str, Any], float]:
    """INFO of a server, and by how many seconds its clock is ahead of this process's."""
    info, asked = client.info(), time.time()
    seconds, microseconds = client.time()
    return info, seconds + microseconds / 1e6 - (asked + time.time()) / 2
