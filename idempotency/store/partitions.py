"""The partitions of the records: made ahead, and dropped whole once nothing in them is needed.

A partition that has ended is cleared first: what has not ended, is not past its retention, or is needed by something else moves
to the partition of today; what is deleted together with other rows is deleted one by one. Each is a transaction of its own, so
that a process may die between any two: what has moved is there once, and the next pass goes on. The drop looks again, while
nobody else can change anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from ..observe.crash_points import crash_point
from ..observe.logs import log
from . import left_alone
from .inserting import KEYS_AT_ONCE, asked_again
from .migrations.partitioning import PARTITIONS
from .periods import WIDTHS, Partition, Partitions, found, missing, name_of
from .purge import KEEP, OPERATIONS
from .schema import NO_LOCK, TRY_AGAIN
from .statements import TIMED_OUT, describe, sqlstate
from .sweeps import (
    AT_ONCE,
    BATCH,
    NOT_ASIDE,
    RECORD_ID,
    Pace,
    is_row_error,
    one_by_one,
    statements_within,
    sweep_settings,
)

# A partition in which more is needed than this, and than a tenth of it, is not moved: what is past its time there is deleted
# row by row, until less is left.
MOVED = 10_000
# How many keys are asked for at once.
FETCHED = 20 * BATCH
# Transactions that were open during the look at a partition may have committed rows since, with ids that are so much lower.
OLDER = 1000
# Seconds after the end of its period until what no drop has taken away is deleted row by row.
GRACE = 3600.0
# Seconds that a look at a partition may take, which joins all of it with the outbox, or its removal. What takes longer stays,
# and its rows are deleted one by one.
LOOK_WITHIN = 300.0

# The name under which a row that Postgres refuses to move or to delete is set aside, and tried again later, as by a sweep.
SWEEP = "partitions"

# no_data_found by its name, undefined_table: another process has dropped it.
GONE = ("P0002", "42P01")
# disk_full, out_of_memory (also: no room for a lock), configuration_limit_exceeded (as of temporary files): the server has
# answered, and another partition may need less than this one. Dropping one makes room.
TOO_MUCH = ("53100", "53200", "53400")

_MAY = """
SELECT has_schema_privilege(n.oid, 'USAGE') FROM pg_namespace n, pg_class c
WHERE n.nspname = %(schema)s AND c.oid = 'idempotency.records'::regclass AND c.relkind = 'p'
  AND has_table_privilege('idempotency.dead_letters'::regclass, 'DELETE')
"""
# These lock all records until their commit is over, so that waits for no standby. What is committed after it does, and comes
# after it in the log; a standby that is promoted without it has it done again.
_FOR_NO_STANDBY = "set_config('synchronous_commit', 'local', true)"
_MAKE = f"SELECT {PARTITIONS}.make(%(name)s, %(begins)s, %(ends)s), {_FOR_NO_STANDBY}"
# Functions that return keys of a partition's operations (`migrations/partitioning.py`). `living`: of what has not ended, is
# within its retention, or is another application's. `survivors`: of these, and of what is past its retention and needed by
# something else; they move. `laden`: of what is deleted together with other rows, once the survivors have moved. `waiting`: of
# what no attempt is working on; the default partition is emptied of these.
_KEYS = f"""
SELECT tenant, task, key FROM {PARTITIONS}.{{function}}(
    %(partition)s, %(service)s, make_interval(secs => %(horizon)s), %(most)s)
"""
# Without what Postgres has refused a while ago, of which there may be as many as are fetched.
_FETCHED = f"""
%(most)s + (SELECT count(*) FROM idempotency.set_aside a WHERE a.sweep = '{SWEEP}' AND a.until > clock_timestamp())
"""
_TO_HANDLE = f"""
SELECT r.tenant, r.task, r.key, {RECORD_ID} AS row_id FROM ({_KEYS.replace("%(most)s", _FETCHED)}) r
WHERE {NOT_ASIDE.format(name=SWEEP, id=RECORD_ID)}
"""
_COUNT = f"SELECT count(*) FROM ({_KEYS.format(function='living')}) living"
_MOVE = f"SELECT {PARTITIONS}.move(%(partition)s, %(tenants)s::text[], %(tasks)s::text[], %(keys)s::text[])"
_NEWEST = """
SELECT (SELECT coalesce(max(id), 0) FROM idempotency.outbox) AS row,
       (SELECT coalesce(max(id), 0) FROM idempotency.dead_letters) AS letter
"""
_REMOVE = f"SELECT {PARTITIONS}.remove(%(partition)s, %(service)s, %(row)s, %(letter)s), {_FOR_NO_STANDBY}"

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


def keep_up(
    connection: Connection, service: str, *, retention: float, horizon: float, limit: int, pace: Pace = AT_ONCE
) -> tuple[int, bool, float]:
    """Make, empty and drop partitions, as they are due, for a connection in AUTOCOMMIT mode. Nothing for a plain table.

    Returns how many operations of `service` went with their partitions, whether more may be due, and for how many seconds the
    purge leaves those alone that are past their retention: their partition is about to take them away.
    """
    if not asked_again(connection):
        return 0, False, 0.0
    if not may_keep_up(connection):
        return 0, False, 0.0  # the doctor says so; all is deleted row by row
    if not left_alone.is_left(connection):
        try:
            make_ahead(connection)
        except DBAPIError as error:
            if not _is_passed_over(error):
                raise
            log.warning("partition_not_made", error=describe(error))  # until then there is the default one
            _note_refused_lock(connection, error)
    partitions = found(connection)
    if partitions is None:
        return 0, False, 0.0
    moved = 0
    with statements_within(connection, LOOK_WITHIN):
        if not (left_alone.is_left(connection) or left_alone.is_left(connection, name := partitions.default_name)):
            try:
                moved = empty_default(connection, partitions, limit=limit, pace=pace)
            except DBAPIError as error:
                _note(connection, name, error)
        dropped, more = drop_past(
            connection, partitions, service, retention=retention, horizon=horizon, limit=limit, pace=pace
        )
    return dropped, more or moved >= limit, WIDTHS[partitions.width].total_seconds() + GRACE


def may_keep_up(connection: Connection) -> bool | None:
    """Whether this role may make and drop partitions; None if it need not, since it purges nothing or there are none."""
    answer: bool | None = connection.exec_driver_sql(_MAY, {"schema": PARTITIONS}).scalar_one_or_none()
    return answer


def default_waits(connection: Connection, partitions: Partitions) -> bool:
    """Whether the default partition has records that could move: no attempt is working on them."""
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
        left_alone.note_lock(connection)
        made += 1
    return made


def empty_default(connection: Connection, partitions: Partitions, *, limit: int, pace: Pace = AT_ONCE) -> int:
    """Move what came while no partition was there to that of today; what is running stays until it has ended. Returns how many."""
    is_there = any(
        each.ends_at and (each.begins_at or each.ends_at) <= partitions.now < each.ends_at for each in partitions.all
    )
    if not is_there:
        return 0
    return _move(connection, partitions.default_name, "waiting", "", 0.0, limit, pace)


def drop_past(
    connection: Connection,
    partitions: Partitions,
    service: str,
    *,
    retention: float,
    horizon: float,
    limit: int,
    pace: Pace = AT_ONCE,
) -> tuple[int, bool]:
    """Drop the partitions in which nothing is needed that ended more than `retention` seconds ago.

    Returns how many operations went, and whether more may be due: of each partition, about `limit` at most move one by one, and
    as many are deleted. `horizon`: for how many seconds after the last publish of its message an operation is needed. What
    cannot go now is tried again by a later pass: too much in it is needed, or it is in use, or Postgres refuses a row of it. A
    lock that is not there in time ends the pass: whoever has it (a dump, a report) has all of them, and claims wait behind each
    try.
    """
    dropped, more = 0, False
    for each in partitions.all:
        if each.ends_at is None or each.ends_at + timedelta(seconds=retention) > partitions.now:
            continue
        if left_alone.is_left(connection):
            break
        if left_alone.is_left(connection, each.name):
            continue
        try:
            gone, handled = _drop(connection, each, service, horizon, limit, pace)
            dropped += gone
            more = more or handled >= limit
        except DBAPIError as error:
            _note(connection, each.name, error)
    return dropped, more


def _note(connection: Connection, name: str, error: DBAPIError) -> None:
    """Go on without a partition that cannot be emptied or dropped now. Raises an error that is about more than this partition."""
    if not _is_passed_over(error):
        raise error
    if not _is_over_soon(error):
        log.error("partition_stays", partition=name, error=describe(error))
        left_alone.leave(connection, name)


def _note_refused_lock(connection: Connection, error: DBAPIError) -> None:
    """If a lock of the whole table was not granted in time, try for none for a while."""
    if sqlstate(error) == NO_LOCK:
        left_alone.leave_all(connection)


def _is_passed_over(error: DBAPIError) -> bool:
    """Whether to go on with the other partitions, and with the rest of the purge."""
    return is_row_error(error) or (not error.connection_invalidated and sqlstate(error) in TOO_MUCH)


def _is_over_soon(error: DBAPIError) -> bool:
    """Whether another process was there first, or holds a lock: no row is refused."""
    return sqlstate(error) in (*TRY_AGAIN, *GONE)


def _drop(
    connection: Connection, each: Partition, service: str, horizon: float, limit: int, pace: Pace
) -> tuple[int, int]:
    """Returns how many operations went, and how many were handled one by one: with `limit` of those there may be more."""
    bounds = {"partition": each.name, "service": service, "horizon": horizon}
    most = max(MOVED, int(each.estimated / 10))
    counted = bounds | {"most": most + 1}
    pace.progressed(LOOK_WITHIN)
    if connection.exec_driver_sql(_COUNT, counted).scalar_one() > most:
        left_alone.leave(connection, each.name)
        return 0, 0
    moved = _move(connection, each.name, "survivors", service, horizon, min(limit, most), pace)
    if moved >= limit:
        return 0, moved
    deleted = _delete_laden(connection, each.name, service, horizon, limit, pace)
    crash_point("partition.cleared")
    newest = connection.exec_driver_sql(_NEWEST).one()
    # what could not be moved or deleted stays: it is locked, running, or too much
    for function in ("survivors", "laden"):
        pace.progressed(LOOK_WITHIN)
        if _keys(connection, each.name, function, service, horizon, 1):
            return deleted, deleted
    pace.progressed(LOOK_WITHIN)
    seen = {"row": max(newest.row - OLDER, 0), "letter": max(newest.letter - OLDER, 0)}
    try:
        gone = connection.exec_driver_sql(_REMOVE, bounds | seen).scalar_one()
    except DBAPIError as error:
        _note_refused_lock(connection, error)
        raise
    if gone is None:
        return deleted, deleted
    left_alone.note_lock(connection)
    log.info("partition_dropped", partition=each.name, operations=gone)
    return deleted + int(gone), deleted


def _move(
    connection: Connection, name: str, function: str, service: str, horizon: float, limit: int, pace: Pace
) -> int:
    """Move the operations that a function names, in transactions of their own, until no more can be moved."""
    statement, fields = _MOVE, {"partition": name}
    return _one_batch_after_another(connection, statement, fields, name, function, service, horizon, limit, pace)


def _delete_laden(connection: Connection, name: str, service: str, horizon: float, limit: int, pace: Pace) -> int:
    statement, fields = _DELETE, {"service": service, "keep": KEEP, "horizon": horizon}
    with sweep_settings(connection):  # as the purge does, for outbox rows that somebody has locked
        return _one_batch_after_another(connection, statement, fields, name, "laden", service, horizon, limit, pace)


def _one_batch_after_another(
    connection: Connection,
    statement: str,
    fields: Mapping[str, object],
    name: str,
    function: str,
    service: str,
    horizon: float,
    limit: int,
    pace: Pace,
) -> int:
    bounds = {"partition": name, "service": service, "horizon": horizon, "most": FETCHED}
    handled, done = 0, 1
    while done and handled < limit:
        # to find them may cost a look at the whole partition
        pace.progressed(LOOK_WITHIN)
        rows = connection.exec_driver_sql(_TO_HANDLE.format(function=function), bounds).all()[: limit - handled]
        batches = [rows[first : first + KEYS_AT_ONCE] for first in range(0, len(rows), KEYS_AT_ONCE)]
        done = 0
        for batch in batches:
            pace.progressed(LOOK_WITHIN)
            done += _batch(connection, statement, fields, batch, pace)
        handled += done
    return handled


def _batch(
    connection: Connection, statement: str, fields: Mapping[str, object], rows: Sequence[Row[Any]], pace: Pace
) -> int:
    """Handle these; if Postgres refuses to, one by one, and what it refuses is set aside. Returns how many."""

    def handle(rows: Sequence[Row[Any]]) -> int:
        return int(connection.exec_driver_sql(statement, {**fields, **_columns(rows)}).scalar_one())

    try:
        return handle(rows)
    except DBAPIError as error:
        if not is_row_error(error) or _is_over_soon(error) or sqlstate(error) == TIMED_OUT:
            raise  # one by one, each might take as long
    done, _ = one_by_one(connection, SWEEP, rows, lambda row: handle([row]), pace.progressed)
    return done


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
