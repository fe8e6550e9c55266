"""Where each consumer of a stream is, and who may move that on: one row for each partition.

The position moves in the commit of what the messages have done, and only from where its owner had read it, under the owner's
fence: a former owner's commit matches nothing. A lease says for how long others leave a partition alone; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DataError

from ..errors import IdempotencyError
from .record import SETTINGS, idle_ms
from .statements import driver_error, execute
from .stream_places import IS_SHOWN, THIS_PLACE, Place

# SQLSTATE of an advance that has matched nothing.
_DIVISION_BY_ZERO = "22012"
# In the place of a beginning: nothing is there, at an offset that nobody knows. Whatever comes is new.
EMPTY = -1


class PartitionLost(IdempotencyError):
    """The position is not where this process has read it: another one, or a person, has the partition."""

    def __init__(self, place: Place | str) -> None:
        super().__init__(f"{place}: the position is another's")


@dataclass(frozen=True, slots=True)
class Held:
    """A partition, as its owner has taken it: the offset of the next message, None before the first, and the owner's fence.

    `is_from_silent`: the owner before was another process, and had not given it back. `source`: what the position is of.
    `stopped`: why it went no further under the owner before.
    """

    place: Place
    position: int | None
    fence: int
    is_from_silent: bool = False
    source: str | None = None
    stopped: str | None = None

    def at(self, position: int) -> Held:
        """The same, further on."""
        return replace(self, position=position)


_MINE = f"{THIS_PLACE} AND fence = %(fence)s"
_LEASE = "clock_timestamp() + make_interval(secs => %(lease)s)"
_FENCE = "pg_catalog.nextval('idempotency.fence')"
# Never behind the position, which would say that nothing waits. Without one that its owner knows, as far as was known.
_END = "greatest(%(to)s::bigint, coalesce(%(end)s::bigint, end_position))"

# What it returns of the owner before is as the statement began: one that has come and gone since is not seen. What a position
# is of stays as it is: a topic and a stream may have one name, and an offset of one means nothing in the other. The new owner
# has not seen where the stream ends yet.
_TAKE = f"""
INSERT INTO idempotency.stream_positions AS p (service, consumer, topic, partition, fence, owner, locked_until, source)
VALUES (%(service)s, %(consumer)s, %(topic)s, %(partition)s, {_FENCE}, %(owner)s, {_LEASE}, %(source)s)
ON CONFLICT (service, consumer, topic, partition) DO UPDATE SET fence = {_FENCE}, owner = %(owner)s, locked_until = {_LEASE},
    end_position = NULL,
    source = CASE WHEN p.position IS NULL THEN excluded.source ELSE coalesce(p.source, excluded.source) END
WHERE %(regardless)s OR p.owner IS NULL OR p.owner = %(owner)s OR p.locked_until < clock_timestamp()
   OR p.owner = ANY(%(dead)s::text[])
RETURNING position, fence, source, stopped,
    (SELECT b.owner <> %(owner)s FROM idempotency.stream_positions b WHERE {THIS_PLACE}) IS TRUE AS is_from_silent
"""

# Of an owner whose commit had no answer: it waits for that commit's lock, and what comes of it later matches nothing.
_TAKE_AGAIN = f"""
UPDATE idempotency.stream_positions SET fence = {_FENCE}, locked_until = {_LEASE}
WHERE {_MINE} RETURNING position, fence
"""

_BEGIN = (
    f"UPDATE idempotency.stream_positions SET position = %(position)s WHERE {_MINE} AND position IS NULL RETURNING 1"
)

# Of two processes that begin at once, the second finds what the first has noted.
_LOCK_TOPIC = "SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended(%(topic_of)s, 0))"
_HAS_BEGUN = """
SELECT FROM idempotency.stream_positions
WHERE (service, consumer, topic) = (%(service)s, %(consumer)s, %(topic)s) AND (position IS NOT NULL OR advanced_at IS NOT NULL) LIMIT 1
"""
_BEGIN_TOPIC = f"""
INSERT INTO idempotency.stream_positions AS p (service, consumer, topic, partition, position, fence, source, advanced_at)
SELECT %(service)s, %(consumer)s, %(topic)s, partition, nullif(position, {EMPTY}), {_FENCE}, %(source)s, clock_timestamp()
FROM unnest(%(partitions)b::int[], %(positions)b::bigint[]) AS given(partition, position)
WHERE NOT EXISTS ({_HAS_BEGUN})
ON CONFLICT (service, consumer, topic, partition) DO UPDATE
SET position = excluded.position, advanced_at = excluded.advanced_at, source = excluded.source WHERE p.position IS NULL
"""

# Raises division_by_zero if it matches no row, so that no COMMIT can follow. An owner that freezes from here on is disconnected
# within half a lease, as the holder of an operation is: the next one waits for this row.
_ADVANCE = f"""
WITH {SETTINGS}, moved AS (
    UPDATE idempotency.stream_positions
    SET position = %(to)s, locked_until = {_LEASE}, stopped = NULL, advanced_at = clock_timestamp(), end_position = {_END}
    FROM settings WHERE {_MINE} AND position = %(position)s RETURNING 1
)
SELECT 1 / count(*) FROM moved
"""

# For a message that has ended before: its own commit may have moved the position, and its answer was lost.
_PASS = f"""
UPDATE idempotency.stream_positions
SET position = %(to)s, locked_until = {_LEASE}, stopped = NULL, advanced_at = clock_timestamp(), end_position = {_END}
WHERE {_MINE} AND position BETWEEN %(position)s AND %(to)s RETURNING 1
"""

# A skipped row is locked, perhaps by its own commit: it is not lost.
_RENEW = """
WITH held AS (
    SELECT * FROM unnest(%(topics)b::text[], %(partitions)b::int[], %(fences)b::bigint[], %(ends)b::bigint[])
        AS h(topic, partition, fence, end_position)
), mine AS MATERIALIZED (
    SELECT p.id, h.end_position FROM idempotency.stream_positions p JOIN held h USING (topic, partition)
    WHERE p.service = %(service)s AND p.consumer = %(consumer)s AND p.fence = h.fence
    ORDER BY p.id FOR UPDATE OF p SKIP LOCKED
), renewed AS (
    UPDATE idempotency.stream_positions p
    SET locked_until = clock_timestamp() + make_interval(secs => %(lease)s),
        end_position = coalesce(mine.end_position, p.end_position)
    FROM mine WHERE p.id = mine.id RETURNING 1
)
SELECT h.topic, h.partition, h.fence, (SELECT count(*) FROM renewed) AS renewed FROM held h
JOIN idempotency.stream_positions p USING (topic, partition)
WHERE p.service = %(service)s AND p.consumer = %(consumer)s AND p.fence = h.fence
"""

_STOP = f"UPDATE idempotency.stream_positions SET stopped = %(why)s WHERE {_MINE} AND stopped IS DISTINCT FROM %(why)s"

_RELEASE = (
    f"UPDATE idempotency.stream_positions SET owner = NULL, locked_until = NULL WHERE {_MINE} AND owner IS NOT NULL"
)

_JOIN = """
INSERT INTO idempotency.stream_members (service, consumer, member, locked_until)
VALUES (%(service)s, %(consumer)s, %(member)s, clock_timestamp() + make_interval(secs => %(lease)s))
ON CONFLICT (service, consumer, member) DO UPDATE SET locked_until = excluded.locked_until
"""
_LEAVE = """
DELETE FROM idempotency.stream_members
WHERE service = %(service)s AND consumer = %(consumer)s AND (member = ANY(%(members)s) OR locked_until < clock_timestamp())
"""
_MEMBERS = """
SELECT member FROM idempotency.stream_members
WHERE service = %(service)s AND consumer = %(consumer)s AND locked_until > clock_timestamp() ORDER BY member
"""

_OWNERS = """
SELECT topic, partition, fence, owner, (locked_until < clock_timestamp()) IS TRUE AS is_over FROM idempotency.stream_positions
WHERE service = %(service)s AND consumer = %(consumer)s ORDER BY topic, partition
"""

_LOCK = f"""
SELECT position, fence, owner, locked_until > clock_timestamp() AS is_owned, {IS_SHOWN} AS is_shown
FROM idempotency.stream_positions WHERE {THIS_PLACE} FOR UPDATE
"""

# Without an owner: the present one, if there is one, finds its fence gone, takes the partition again and reads from here.
_SEEK = f"""
UPDATE idempotency.stream_positions SET position = %(to)s, fence = {_FENCE}, owner = NULL, locked_until = NULL, stopped = NULL,
    source = NULL
WHERE {THIS_PLACE} RETURNING fence
"""

# A role without `pg_read_all_stats` sees of others' connections that they are there, and not what they do. A base backup, say,
# replays nothing. Positions in the log are in bytes.
_STANDBYS = """
SELECT count(replay_lsn) AS standbys, max(extract(epoch FROM replay_lag))::float8 AS lag,
       min(pg_catalog.pg_wal_lsn_diff(replay_lsn, '0/0'))::bigint AS replayed,
       pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_lsn(), '0/0')::bigint AS written,
       coalesce(bool_or(state IS NULL), false) AS is_hidden
FROM pg_catalog.pg_stat_replication
"""


def take(
    connection: Connection,
    place: Place,
    owner: str,
    *,
    source: str,
    lease: float,
    regardless: bool,
    dead: Collection[str] = (),
) -> Held | None:
    """Become the owner of a partition, under a new fence; None: another one's lease is not over.

    `regardless` of that, if the broker has given it to this process. `dead`: owners that are known to be gone. `lease` in
    seconds. `source`: what is read; what `Held` has is what the position is of.
    """
    fields = {"owner": owner, "source": source, "lease": lease, "regardless": regardless, "dead": list(dead)}
    row = execute(connection, _TAKE, place.fields() | fields).fetchone()
    if row is None:
        return None
    return Held(place, row.position, row.fence, row.is_from_silent, row.source, row.stopped)


def take_again(connection: Connection, held: Held, *, lease: float) -> Held | None:
    """Move the fence of one's own partition after a doubt, and read where it is; None: it is another's."""
    row = execute(connection, _TAKE_AGAIN, _mine(held) | {"lease": lease}).fetchone()
    return None if row is None else Held(held.place, row.position, row.fence)


def begin(connection: Connection, held: Held, position: int) -> Held | None:
    """Note the offset of the first message that there is, before one is handled; None: not the owner."""
    row = execute(connection, _BEGIN, _mine(held) | {"position": position}).fetchone()
    return None if row is None else held.at(position)


def has_begun(connection: Connection, service: str, consumer: str, topic: str) -> bool:
    """Whether the consumer has a position in any partition of the topic."""
    fields = {"service": service, "consumer": consumer, "topic": topic}
    return execute(connection, _HAS_BEGUN, fields).fetchone() is not None


def begin_topic(
    connection: Connection, service: str, consumer: str, topic: str, positions: Mapping[int, int], *, source: str
) -> None:
    """Note where a consumer begins in all partitions that a topic has now (or `EMPTY`), in the caller's transaction, unless it has begun.

    A partition that is found later was added later, so its first message came after this.
    """
    fields = {"service": service, "consumer": consumer, "topic": topic}
    execute(connection, _LOCK_TOPIC, {"topic_of": "/".join(fields.values())})
    given = {"partitions": list(positions), "positions": list(positions.values()), "source": source}
    execute(connection, _BEGIN_TOPIC, fields | given)


def advance(connection: Connection, held: Held, to: int, *, lease: float, end: int | None = None) -> None:
    """Move the position on, in the caller's transaction. Raises `PartitionLost` if it is not where the owner has read it.

    `end`: where the stream ends, as far as the owner knows.
    Only this statement's error means that: a constraint of the application's at COMMIT may divide by zero, too.
    """
    try:
        execute(connection, _ADVANCE, _mine(held) | {"to": to, "end": end, "lease": lease, "idle_ms": idle_ms(lease)})
    except DataError as error:
        if getattr(driver_error(error), "sqlstate", None) != _DIVISION_BY_ZERO:
            raise
        raise PartitionLost(held.place) from None


def pass_over(connection: Connection, held: Held, to: int, *, lease: float, end: int | None = None) -> bool:
    """Move the position beyond a message that has ended, unless its end has done so. False: not the owner."""
    return execute(connection, _PASS, _mine(held) | {"to": to, "end": end, "lease": lease}).fetchone() is not None


def renew(
    connection: Connection, service: str, consumer: str, held: Mapping[Held, int | None], *, lease: float
) -> set[Held]:
    """Renew the leases of a consumer's partitions, and note the ends of their streams. Returns those that are still its own."""
    each = list(held)
    rows = execute(
        connection,
        _RENEW,
        {
            "service": service,
            "consumer": consumer,
            "topics": [one.place.topic for one in each],
            "partitions": [one.place.partition for one in each],
            "fences": [one.fence for one in each],
            "ends": [held[one] for one in each],
            "lease": lease,
        },
    ).fetchall()
    found = {(row.topic, row.partition, row.fence) for row in rows}
    return {one for one in each if (one.place.topic, one.place.partition, one.fence) in found}


def stop(connection: Connection, held: Held, why: str | None) -> None:
    """Say why a partition does not go on; None: it does."""
    execute(connection, _STOP, _mine(held) | {"why": why})


def release(connection: Connection, held: Held) -> None:
    """Give a partition back. Of another's, nothing changes."""
    execute(connection, _RELEASE, _mine(held))


def join(connection: Connection, service: str, consumer: str, member: str, *, lease: float) -> list[str]:
    """Be, or go on being, one of those among whom partitions are divided; returns all of them, in one order."""
    fields = {"service": service, "consumer": consumer, "member": member, "lease": lease}
    execute(connection, _JOIN, fields)
    found = {row.member for row in execute(connection, _MEMBERS, fields).fetchall()}
    return sorted({*found, member})  # also if this process was frozen between the two, and is not there any more


def leave(connection: Connection, service: str, consumer: str, members: Sequence[str]) -> None:
    """Take these away from those among whom partitions are divided, and those whose leases are over."""
    execute(connection, _LEAVE, {"service": service, "consumer": consumer, "members": list(members)})


def owners(connection: Connection, service: str, consumer: str) -> Sequence[Row[Any]]:
    """Topic, partition, fence and owner of each of a consumer's partitions, and whether the owner's lease `is_over`."""
    rows: Sequence[Row[Any]] = execute(connection, _OWNERS, {"service": service, "consumer": consumer}).fetchall()
    return rows


def lock(connection: Connection, place: Place) -> Row[Any] | None:
    """Where a partition is and who owns it, locked; None: it is not known."""
    return connection.exec_driver_sql(_LOCK, place.fields()).one_or_none()


def seek(connection: Connection, place: Place, to: int) -> int:
    """Move a position to where a person wants it, and the fence with it. Returns the new fence."""
    fence: int = connection.exec_driver_sql(_SEEK, place.fields() | {"to": to}).scalar_one()
    return fence


def standbys(connection: Connection) -> Any:
    """How many `standbys` there are, and whether how far they are `is_hidden` from this role.

    `lag`: by how many seconds the slowest was behind when it last replayed something; None: none is. `replayed` and `written`:
    how far the slowest is in the log, and how far that goes.
    """
    return execute(connection, _STANDBYS).fetchone()


def _mine(held: Held) -> dict[str, Any]:
    return held.place.fields() | {"fence": held.fence, "position": held.position}
