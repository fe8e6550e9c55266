"""Sweeps: statements that handle whatever is due, in batches, and are not stopped by a bad row.

If Postgres refuses a batch because of one row (a trigger, a CHECK, a too large index entry, a lock), the rows are handled
one by one, each in its own transaction, so that a constraint checked at COMMIT also fails only its own row. A refused row
is set aside in a table, logged, counted, and tried again later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..observe import metrics
from ..observe.logs import log
from .statements import READ_ONLY, TIMED_OUT, describe, repeatable, sqlstate

# Rows per statement. Short transactions keep others from waiting.
BATCH = 500
# How long a sweep waits for a locked row of another table; the next pass tries again.
LOCK_TIMEOUT_MS = 200
# Seconds until the answer of a statement that Postgres ends after its time counts as lost.
ENDED_WITHIN = 30.0
# Seconds that a sweep rests after one batch, at the longest.
LONGEST_REST = 10.0
# A refused row is tried again after a minute, then twice as long each time, up to an hour.
FIRST_PAUSE = 60.0
LONGEST_PAUSE = 3600.0

# Scalar subqueries instead of EXISTS, here and in the conditions of sweeps: EXISTS may be planned as a hash of the whole
# table, or as a join followed by a sort of everything due. A scalar subquery is an index lookup per row.
NOT_ASIDE = """(SELECT true FROM idempotency.set_aside a
       WHERE a.sweep = '{name}' AND a.id = {id} AND a.until > clock_timestamp() LIMIT 1) IS NULL"""

# `Sweep.one` and `Sweep.id` for records. A digest, since keys may be too long for an index.
THIS_RECORD = "r.tenant = %(tenant)s AND r.task = %(task)s AND r.key = %(key)s"
RECORD_ID = "md5(ARRAY[r.tenant, r.task, r.key]::text)"

_SET_ASIDE = """
INSERT INTO idempotency.set_aside AS a (sweep, id, tenant, task, key, error, until)
VALUES (%(sweep)s, %(id)s, %(tenant)s, %(task)s, %(key)s, %(error)s,
        clock_timestamp() + make_interval(secs => %(first)s))
ON CONFLICT (sweep, id) DO UPDATE SET times = a.times + 1, error = excluded.error,
    until = clock_timestamp() + make_interval(secs => least(%(longest)s, %(first)s * pg_catalog.power(2, least(a.times, 20))))
RETURNING times
"""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is due, in which order, and what to do with it, in SQL with `r` as the table's alias.

    Write the time in `due` as (SELECT clock_timestamp()): a plain volatile function cannot be used for an index scan.
    """

    name: str
    table: str
    # The columns that `then` needs, in addition to tenant, task and key.
    columns: str
    due: str
    order: str
    # What follows "WITH due AS (...)". For `run` it returns one row with the number handled first. Empty if Python handles
    # the rows (`find`, `one_by_one`).
    then: str
    # The condition for one row, by index, and the id under which it is set aside.
    one: str
    id: str
    # How people are told of a row that is set aside: by its operation, if it has one.
    shown_as: str = "r.tenant, r.task, r.key"

    @property
    def unlocked(self) -> str:
        """SQL that reads a batch of what is due and not set aside."""
        return f"{self._select} ORDER BY {self.order} LIMIT %(batch)s"

    @property
    def find(self) -> str:
        """SQL that also locks it."""
        return f"{self.unlocked} FOR UPDATE OF r SKIP LOCKED"

    @property
    def find_one(self) -> str:
        """SQL that locks one such row, if it is still due and not locked."""
        return f"{self._select} AND {self.one} FOR UPDATE OF r SKIP LOCKED"

    @property
    def batch(self) -> str:
        """SQL that handles a batch; also returns how many rows were seen."""
        return f"WITH due AS MATERIALIZED ({self.find}) {self.then}, (SELECT count(*) FROM due) AS seen"

    @property
    def single(self) -> str:
        """SQL that handles one row."""
        return f"WITH due AS MATERIALIZED ({self.find_one}) {self.then}"

    @property
    def _select(self) -> str:
        aside = NOT_ASIDE.format(name=self.name, id=self.id)
        return (
            f"SELECT {self.shown_as}, {self.id} AS row_id, {self.columns} FROM idempotency.{self.table} r "
            f"WHERE {self.due} AND {aside}"
        )


def deletes(table: str, this: str = "gone.id = due.id") -> str:
    """`Sweep.then` for rows that are deleted, and nothing else."""
    return f"""
, deleted AS (DELETE FROM idempotency.{table} gone USING due WHERE {this} RETURNING 1)
SELECT (SELECT count(*) FROM deleted)"""


def _nothing(seconds: float = 0.0) -> None:
    """Ignore progress: the default."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How a sweep that may take long goes on after each batch."""

    # How long it rests, in times of what the batch took, so that others have the disk and the processors.
    rest: float = 0.0
    # Told of each batch and each rest, and of each row that is handled alone, by which others know that it hangs nowhere. Given
    # the seconds that a statement may take, if they are many.
    progressed: Callable[..., object] = _nothing
    # The most that one sweep takes, in seconds; what is left is for the next pass.
    within: float = math.inf

    def goes_on(self, took: float, until: float) -> bool:
        """Rest after a batch that took so many seconds. Whether there is time for another one, by the monotonic clock."""
        self.progressed()
        time.sleep(max(min(self.rest * took, LONGEST_REST, until - time.monotonic()), 0.0))
        self.progressed()
        return time.monotonic() < until


AT_ONCE = Pace()


def run(
    connection: Connection,
    sweep: Sweep,
    parameters: Mapping[str, Any],
    *,
    limit: int,
    batch: int = BATCH,
    pace: Pace = AT_ONCE,
    note: Callable[[Row[Any]], object] = lambda answer: None,
) -> tuple[int, bool]:
    """Handle what is due, up to about `limit` rows. Returns how many were handled, and whether more may be due.

    `batch`: rows for each statement. `note` is given the row that each statement returns.
    """
    handled = seen = 0
    fields, until = {**parameters, "batch": batch}, time.monotonic() + pace.within
    with sweep_settings(connection):
        while seen < limit:
            began = time.monotonic()
            try:
                answer = connection.exec_driver_sql(sweep.batch, fields).one()
                note(answer)
                done, found = answer[0], answer.seen
                moved = found
            except DBAPIError as error:
                if not is_row_error(error):
                    raise
                rows = connection.exec_driver_sql(sweep.find, fields).all()
                found = len(rows)
                done, aside = one_by_one(
                    connection,
                    sweep.name,
                    rows,
                    lambda row: _single(connection, sweep, fields, row, note),
                    pace.progressed,
                )
                moved = done + aside
            handled += done
            seen += found
            if found < batch or not moved:
                return handled, False
            if not pace.goes_on(time.monotonic() - began, until):
                break
    return handled, True


def find(connection: Connection, sweep: Sweep, parameters: Mapping[str, Any]) -> Sequence[Row[Any]]:
    """Find one batch of what is due, for a sweep whose rows are handled in Python (`one_by_one`)."""
    with sweep_settings(connection):
        return connection.exec_driver_sql(sweep.find, {**parameters, "batch": BATCH}).all()


def one_by_one(
    connection: Connection,
    sweep: str,
    rows: Sequence[Row[Any]],
    handle: Callable[[Row[Any]], int],
    progressed: Callable[[], object] = _nothing,
) -> tuple[int, int]:
    """Handle each row of a sweep in its own transaction. Returns how many were handled and how many were set aside."""
    done = aside = 0
    for row in rows:
        progressed()
        try:
            done += repeatable(handle)(row)
        except (PoolTimeout, SoftTimeLimitExceeded):
            raise  # not the row's fault
        except Exception as error:
            if isinstance(error, DBAPIError) and not is_row_error(error):
                raise
            _set_aside(connection, sweep, row, error)
            aside += 1
    return done, aside


@contextmanager
def statements_within(connection: Connection, seconds: float) -> Iterator[None]:
    """Let a statement take so many seconds, after which Postgres ends it. One that only this process gives up runs on there."""
    driver: Any = connection.connection.driver_connection
    patience = getattr(driver, "patience", None)
    with _settings(connection, {"statement_timeout": math.ceil(seconds * 1000)}):
        if patience is not None:
            driver.patience = max(patience, seconds + ENDED_WITHIN)
        try:
            yield
        finally:
            if patience is not None:
                driver.patience = patience


def is_row_error(error: DBAPIError) -> bool:
    """Whether Postgres refused a particular row, because of its values or a lock, and would accept others."""
    state = sqlstate(error)
    if state is None or error.connection_invalidated or state == READ_ONLY:
        return False
    if state == TIMED_OUT:  # fewer rows may be fast enough
        return True
    # a missing table or right affects all rows, unless the error comes from a trigger function
    if state.startswith("42"):
        return bool(error.orig.diag.context)  # type: ignore[union-attr]
    # connection errors, resources, operator intervention, system errors
    return not state.startswith(("08", "53", "57", "58"))


def names(row: Row[Any]) -> dict[str, Any]:
    """The parameters of `Sweep.one` for this row."""
    return {name: value for name, value in row._mapping.items() if name in ("tenant", "task", "key", "id")}


def _single(
    connection: Connection,
    sweep: Sweep,
    parameters: Mapping[str, Any],
    row: Row[Any],
    note: Callable[[Row[Any]], object],
) -> int:
    answer = connection.exec_driver_sql(sweep.single, {**parameters, **names(row)}).one()
    note(answer)
    return int(answer[0])


def _set_aside(connection: Connection, sweep: str, row: Row[Any], error: Exception) -> None:
    fields = {
        "sweep": sweep,
        "id": row.row_id,
        "tenant": row.tenant,
        "task": row.task,
        "key": row.key,
        "error": describe(error),
        "first": FIRST_PAUSE,
        "longest": LONGEST_PAUSE,
    }
    times = connection.exec_driver_sql(_SET_ASIDE, fields).scalar_one()
    metrics.set_aside.labels(sweep).inc()
    log.error("set_aside", sweep=sweep, task=row.task, key=row.key, error=fields["error"], times=times)


@contextmanager
def sweep_settings(connection: Connection) -> Iterator[None]:
    """Run a sweep's statements with a short lock time-out, and with plans that read what is due in index order.

    Otherwise, a plan made while little was due would sort everything due for each batch once there is a lot.
    """
    settings = {"lock_timeout": LOCK_TIMEOUT_MS, "enable_sort": "off", "enable_bitmapscan": "off"}
    with _settings(connection, settings):
        yield


@contextmanager
def _settings(connection: Connection, settings: Mapping[str, object]) -> Iterator[None]:
    """Give the statements of a connection in AUTOCOMMIT mode these settings. Behind a pooler, each takes them along."""
    driver: Any = connection.connection.driver_connection
    if getattr(driver, "is_pooled", False):
        before = driver.set_local
        driver.set_local += "".join(f", set_config('{name}', '{value}', true)" for name, value in settings.items())
        try:
            yield
        finally:
            driver.set_local = before
        return
    restore = "; ".join(f"RESET {name}" for name in settings)
    connection.exec_driver_sql("; ".join(f"SET {name} = {value}" for name, value in settings.items()))
    try:
        yield
    except BaseException:
        with suppress(SQLAlchemyError):  # the first error is the one to raise
            connection.exec_driver_sql(restore)
        raise
    connection.exec_driver_sql(restore)
