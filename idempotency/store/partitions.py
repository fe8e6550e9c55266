"""The partitions of the records: made ahead, and dropped whole once nothing in them is needed.

A partition that has ended is cleared first: what has not ended, is not past its retention, or is needed by something else moves
to the partition of today; what is deleted together with other rows is deleted one by one. Each is a transaction of its own, so
that a process may die between any two: what has moved is there once, and the next pass goes on. The drop looks again, while
nobody else can change anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from ..observe.crash_points import crash_point
from ..observe.logs import log
from .inserting import IS_PARTITIONED, is_partitioned
from .migrations.partitioning import PARTITIONS
from .purge import KEEP, OPERATIONS
from .schema import TRY_AGAIN
from .statements import describe
from .sweeps import BATCH, is_row_error, sweep_settings

# How long the partitions of a kind are, and how many are made ahead. What comes while none is there goes to the default one.
WIDTHS = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(weeks=1)}
AHEAD = {"hour": 6, "day": 3, "week": 2}
# A Monday: weeks begin there.
_FIRST = datetime(2001, 1, 1, tzinfo=UTC)
# Made in the middle of a period, because none was made before: begins so much later, so that nothing of before belongs there.
MARGIN = timedelta(seconds=10)
# A partition in which more is needed than this, and than a tenth of it, is not moved: what is past its time there is deleted row by
# row, until less is left.
MOVED = 10_000
# How many keys are asked for at once.
FETCHED = 20 * BATCH
# Seconds until a partition that could not go is looked at again by this process.
PAUSE = 3600.0
# Transactions that were open during the look at a partition may have committed rows since, with ids that are so much lower.
OLDER = 1000
# What a partition does not take away within this time after its own is deleted row by row, in seconds.
GRACE = 3600.0

# no_data_found by its name, undefined_table: another process has dropped it.
GONE = ("P0002", "42P01")

_MAY = """
SELECT has_schema_privilege(n.oid, 'USAGE') FROM pg_namespace n, pg_class c
WHERE n.nspname = %(schema)s AND c.oid = 'idempotency.records'::regclass AND c.relkind = 'p'
  AND has_table_privilege('idempotency.dead_letters'::regclass, 'DELETE')
"""
_WIDTH = f"SELECT obj_description(to_regnamespace('{PARTITIONS}'), 'pg_namespace')"
_BOUNDS = f"SELECT name, begins_at, ends_at, is_default, estimated, clock_timestamp() AS now FROM {PARTITIONS}.bounds()"
_MAKE = f"SELECT {PARTITIONS}.make(%(name)s, %(begins)s, %(ends)s)"
_KEYS = f"""
SELECT tenant, task, key FROM {PARTITIONS}.{{function}}(
    %(partition)s, %(service)s, make_interval(secs => %(horizon)s), %(most)s)
"""
_COUNT = f"SELECT count(*) FROM ({_KEYS.format(function='living')}) living"
_MOVE = f"SELECT {PARTITIONS}.move(%(partition)s, %(tenants)s::text[], %(tasks)s::text[], %(keys)s::text[])"
_NEWEST = """
SELECT (SELECT coalesce(max(id), 0) FROM idempotency.outbox) AS row,
       (SELECT coalesce(max(id), 0) FROM idempotency.dead_letters) AS letter
"""
_REMOVE = f"SELECT {PARTITIONS}.remove(%(partition)s, %(service)s, %(row)s, %(letter)s)"

# As the purge deletes what is due, with its rows: for operations that are named.
_DELETE = f"""
WITH given AS MATERIALIZED (
    SELECT DISTINCT * FROM unnest(%(tenants)s::text[], %(tasks)s::text[], %(keys)s::text[]) AS g(tenant, task, key)
), due AS MATERIALIZED (
    SELECT r.tenant, r.task, r.key, {OPERATIONS.columns}
    FROM given JOIN idempotency.records r USING (tenant, task, key)
    WHERE {OPERATIONS.due.replace("r.service = %(service)s", "(r.service = %(service)s) IS NOT FALSE")}
    FOR UPDATE OF r SKIP LOCKED
) {OPERATIONS.then}
"""

# The names of partitions that could not go, with the time until which this process leaves them alone.
_waiting: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class Partition:
    """A range of creation. Without `begins_at`: the table of before; without `ends_at`: the default one."""

    name: str
    begins_at: datetime | None
    ends_at: datetime | None
    is_default: bool
    estimated: float

    @property
    def most_moved(self) -> int:
        """How many of its operations are moved at most, so that it can go."""
        return max(MOVED, int(self.estimated / 10))


@dataclass(frozen=True, slots=True)
class Partitions:
    """All partitions of the records, how long new ones are, and the database's time."""

    width: str
    all: Sequence[Partition]
    now: datetime

    @property
    def default_name(self) -> str:
        return next(each.name for each in self.all if each.is_default)

    @property
    def last(self) -> datetime | None:
        """When the last one ends; None or in the past: what comes goes to the default one."""
        return max((each.ends_at for each in self.all if each.ends_at is not None), default=None)

    @property
    def wanted(self) -> datetime:
        """Until when there should be partitions: the present one, and those made ahead."""
        return border(self.now, self.width) + AHEAD[self.width] * WIDTHS[self.width]


def found(connection: Connection) -> Partitions | None:
    """The partitions of the records; None if they are in a plain table."""
    if not connection.exec_driver_sql(IS_PARTITIONED).scalar_one():
        return None
    width = connection.exec_driver_sql(_WIDTH).scalar_one()
    rows = connection.exec_driver_sql(_BOUNDS).all()
    return Partitions(
        width,
        [Partition(each.name, each.begins_at, each.ends_at, each.is_default, each.estimated) for each in rows],
        rows[0].now,
    )


def keep_up(
    connection: Connection, service: str, *, retention: float, horizon: float, limit: int
) -> tuple[int, bool, float]:
    """Make, empty and drop partitions, as they are due, for a connection in AUTOCOMMIT mode. Nothing for a plain table.

    Returns how many operations of `service` went with their partitions, whether more may be due, and for how many seconds the
    purge leaves those alone that are past their retention: their partition is about to take them away.
    """
    if not is_partitioned(connection):
        return 0, False, 0.0
    if not may_keep_up(connection):
        return 0, False, 0.0  # the doctor says so; all is deleted row by row
    try:
        make_ahead(connection)
    except DBAPIError as error:
        if not is_row_error(error):
            raise
        log.warning("partition_not_made", error=describe(error))  # a lock; until then there is the default one
    partitions = found(connection)
    if partitions is None:
        return 0, False, 0.0
    moved = empty_default(connection, partitions, limit=limit)
    dropped, more = drop_past(connection, partitions, service, retention=retention, horizon=horizon, limit=limit)
    return dropped, more or moved >= limit, WIDTHS[partitions.width].total_seconds() + GRACE


def may_keep_up(connection: Connection) -> bool | None:
    """Whether this role may make and drop partitions; None if it need not, since it purges nothing or there are none."""
    answer: bool | None = connection.exec_driver_sql(_MAY, {"schema": PARTITIONS}).scalar_one_or_none()
    return answer


def rests(connection: Connection, partitions: Partitions) -> bool:
    """Whether the default partition has records that nobody is working at."""
    return bool(_keys(connection, partitions.default_name, "waiting", "", 0.0, 1))


def make_ahead(connection: Connection) -> int:
    """Make the partitions of the present and of the time to come that are missing. Returns how many were made.

    Raises SQLAlchemy's errors, also if a lock is not there within 200 ms.
    """
    partitions, made = found(connection), 0
    if partitions is None:
        return 0
    for begins, ends in missing(partitions):
        fields = {"name": name_of(begins), "begins": begins, "ends": ends}
        if not connection.exec_driver_sql(_MAKE, fields).scalar_one():
            break  # another process is making them
        made += 1
    return made


def missing(partitions: Partitions) -> list[tuple[datetime, datetime]]:
    """The ranges for which there should be partitions and are none."""
    soon, ranges = partitions.now + MARGIN, []
    begins = partitions.last
    if begins is None or begins < soon:
        begins = soon.replace(microsecond=0) + timedelta(seconds=1)
    begins = begins.astimezone(UTC)
    while begins < partitions.wanted:
        ends = border(begins, partitions.width)
        ranges.append((begins, ends))
        begins = ends
    return ranges


def name_of(begins: datetime) -> str:
    """The name of the partition of rows from this time on."""
    return f"records_{begins.astimezone(UTC):%Y%m%dt%H%M%S}"


def border(at: datetime, width: str) -> datetime:
    """The end of the period in which this time is."""
    return _FIRST + ((at - _FIRST) // WIDTHS[width] + 1) * WIDTHS[width]


def empty_default(connection: Connection, partitions: Partitions, *, limit: int) -> int:
    """Move what came while no partition was there to that of today; what is running stays until it has ended. Returns how many."""
    is_there = any(
        each.ends_at and (each.begins_at or each.ends_at) <= partitions.now < each.ends_at for each in partitions.all
    )
    if not is_there:
        return 0
    return _move(connection, partitions.default_name, "waiting", "", 0.0, limit)


def drop_past(
    connection: Connection, partitions: Partitions, service: str, *, retention: float, horizon: float, limit: int
) -> tuple[int, bool]:
    """Drop the partitions in which nothing is needed that ended more than `retention` seconds ago.

    Returns how many operations went, and whether more may be due: one by one, at most about `limit` go of each partition.
    `horizon`: for how many seconds after the last publish of its message an operation is needed. What cannot go now is tried
    again by a later pass: too much in it is needed, or it is in use, or Postgres refuses a row of it.
    """
    dropped, more = 0, False
    for each in partitions.all:
        if each.ends_at is None or each.ends_at + timedelta(seconds=retention) > partitions.now:
            continue
        if _waiting.get(each.name, 0.0) > time.monotonic():
            continue
        try:
            gone, deleted = _drop(connection, each, service, horizon, limit)
            dropped += gone
            more = more or deleted >= limit
        except DBAPIError as error:
            if not is_row_error(error):
                raise
            if getattr(error.orig, "sqlstate", None) not in (*TRY_AGAIN, *GONE):
                log.error("partition_stays", partition=each.name, error=describe(error))
                _waiting[each.name] = time.monotonic() + PAUSE
    return dropped, more


def _drop(connection: Connection, each: Partition, service: str, horizon: float, limit: int) -> tuple[int, int]:
    """Returns how many operations went, and how many of them one by one."""
    bounds = {"partition": each.name, "service": service, "horizon": horizon}
    counted = bounds | {"most": each.most_moved + 1}
    if connection.exec_driver_sql(_COUNT, counted).scalar_one() > each.most_moved:
        _waiting[each.name] = time.monotonic() + PAUSE
        return 0, 0
    _move(connection, each.name, "survivors", service, horizon, each.most_moved)
    deleted = _delete_laden(connection, each.name, service, horizon, limit)
    crash_point("partition.cleared")
    newest = connection.exec_driver_sql(_NEWEST).one()
    # what could not be moved or deleted: it is locked, running, or too much
    if any(_keys(connection, each.name, function, service, horizon, 1) for function in ("survivors", "laden")):
        return deleted, deleted
    seen = {"row": max(newest.row - OLDER, 0), "letter": max(newest.letter - OLDER, 0)}
    gone = connection.exec_driver_sql(_REMOVE, bounds | seen).scalar_one()
    if gone is None:
        return deleted, deleted
    log.info("partition_dropped", partition=each.name, operations=gone)
    return deleted + int(gone), deleted


def _move(connection: Connection, name: str, function: str, service: str, horizon: float, limit: int) -> int:
    """Move what a function names, in transactions of their own, until nothing more can be moved."""
    statement, fields = _MOVE, {"partition": name}
    return _one_batch_after_another(connection, statement, fields, name, function, service, horizon, limit)


def _delete_laden(connection: Connection, name: str, service: str, horizon: float, limit: int) -> int:
    statement, fields = _DELETE, {"service": service, "keep": KEEP, "horizon": horizon}
    with sweep_settings(connection):  # as the purge does, for outbox rows that somebody has locked
        return _one_batch_after_another(connection, statement, fields, name, "laden", service, horizon, limit)


def _one_batch_after_another(
    connection: Connection,
    statement: str,
    fields: Mapping[str, object],
    name: str,
    function: str,
    service: str,
    horizon: float,
    limit: int,
) -> int:
    handled, done = 0, 1
    while done and handled < limit:
        # to find them may cost a look at the whole partition
        rows = _keys(connection, name, function, service, horizon, FETCHED)
        done = sum(
            connection.exec_driver_sql(statement, {**fields, **_columns(rows[first : first + BATCH])}).scalar_one()
            for first in range(0, len(rows), BATCH)
        )
        handled += done
    return handled


def _keys(
    connection: Connection, name: str, function: str, service: str, horizon: float, most: int
) -> Sequence[Row[Any]]:
    fields = {"partition": name, "service": service, "horizon": horizon, "most": most}
    return connection.exec_driver_sql(_KEYS.format(function=function), fields).all()


def _columns(rows: Sequence[Row[Any]]) -> dict[str, list[str]]:
    return {
        "tenants": [each.tenant for each in rows],
        "tasks": [each.task for each in rows],
        "keys": [each.key for each in rows],
    }
