"""Inserting a record unless its key has one: by the unique index of a plain table, or into partitions, which have none together.

A unique index of a partitioned table has to contain the column that it is partitioned by, so there Postgres refuses ON
CONFLICT. A trigger, `insert_once` (`migrations/partitioning.py`), locks the key until the end of the transaction, looks into
all partitions, and leaves the row out if its key has a record. Who inserts or moves many locks their keys first, waits for
none, and leaves out what is locked. Each lock takes room in Postgres' table of locks, so these are at most `KEYS_AT_ONCE` in a
transaction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from .record import ROW
from .statements import execute

# Whether a row is new, in `InsertOrUpdate.returning`: xmax is 0 then. Of partitions it cannot be read.
IS_NEW = "xmax = 0"
CONFLICT = "ON CONFLICT (tenant, task, key)"

_LOCK = "pg_catalog.hashtextextended({tenant} || E'\\n' || {task} || E'\\n' || {key}, 1)"
# One of 256, which nothing but the mover waits for: who changes a record in an application's transaction shares it.
_MOVING_LOCK = (
    "pg_catalog.hashtextextended('idempotency.moving', 0) # "
    "(pg_catalog.hashtextextended({tenant} || E'\\n' || {task} || E'\\n' || {key}, 0) & 255)"
)
# How many keys a transaction locks at most that inserts or moves many: some dozens of them fit into the table of locks as it is
# by default (`checks/partitions.py` counts).
KEYS_AT_ONCE = 100
# What `idempotency.keys_locked` is set to by who has locked the keys. Code of an earlier checkout says 'on', for other locks.
LOCKED = "each"

IS_PARTITIONED = "SELECT relkind = 'p' FROM pg_catalog.pg_class WHERE oid = 'idempotency.records'::regclass"
# The key in a connection's `info`, for connections that are not ours.
_KNOWN = "idempotency.is_partitioned"


def lock_of(tenant: str, task: str, key: str) -> str:
    """SQL for the number of an operation's own advisory lock; the expressions name it."""
    return _LOCK.format(tenant=tenant, task=task, key=key)


def moving_lock_of(tenant: str, task: str, key: str) -> str:
    """SQL for the number of the advisory lock that keeps an operation in its partition."""
    return _MOVING_LOCK.format(tenant=tenant, task=task, key=key)


@dataclass(frozen=True, slots=True)
class InsertOrUpdate:
    """A record that is inserted, or changed if its key has one that meets `condition`.

    `values` by column; `source`: what else they are from, and `given`: a condition for both. `changes` and `condition` name the
    record `r` and the values `excluded`.
    """

    values: Mapping[str, str]
    changes: str
    condition: str
    returning: str
    source: str = ""
    given: str = ""

    def statements(self, name: str, answer: str, otherwise: str, *, before: str = "") -> tuple[str, str, str]:
        """For a plain table, one statement; for partitions, one that inserts, and one that changes or says why not.

        It is the CTE `name`, after those of `before`; `answer` reads it, and `otherwise` says why it is empty.
        """
        plain, insert, change = (
            f"\nWITH {before}{name} AS ({each}\n){answer}" for each in (self._plain(), self._new(), self._known())
        )
        return plain + otherwise, insert, change + otherwise

    def _plain(self) -> str:
        return f"""{self._insert()}
    {CONFLICT} DO UPDATE SET {self.changes}
    WHERE {self.condition}
    RETURNING {self.returning}"""

    def _new(self) -> str:
        return f"{self._insert()}\n    RETURNING {self.returning.replace(IS_NEW, 'true')}"

    def _known(self) -> str:
        given = f" AND {self.given}" if self.given else ""
        row = ROW.replace("tenant =", "r.tenant =").replace("task =", "r.task =").replace("key =", "r.key =")
        return f"""
    UPDATE idempotency.records r SET {self._with_values(self.changes)}{self._from()}
    WHERE {row}{given}
      AND {self._with_values(self.condition)}
    RETURNING {self.returning.replace(IS_NEW, "false")}"""

    def _insert(self) -> str:
        given = f" WHERE {self.given}" if self.given else ""
        return f"""
    INSERT INTO idempotency.records AS r
        ({", ".join(self.values)})
    SELECT {", ".join(self.values.values())}{self._from()}{given}"""

    def _from(self) -> str:
        return f"\n    FROM {self.source}" if self.source else ""

    def _with_values(self, text: str) -> str:
        return re.sub(r"\bexcluded\.(\w+)", lambda found: self.values[found[1]], text)


def is_partitioned(connection: Connection) -> bool:
    """Whether the records are in partitions, by what a connection was told when it was opened; others are asked once."""
    driver: Any = connection.connection.driver_connection
    known: bool | None = getattr(driver, "is_partitioned", None)
    if known is None:
        known = connection.info.get(_KNOWN)
    if known is None:
        known = connection.info[_KNOWN] = bool(connection.exec_driver_sql(IS_PARTITIONED).scalar_one())
    return known


def asked_again(connection: Connection) -> bool:
    """Whether they are by now, for a process that would not notice: it claims nothing. The connection knows it from then on."""
    is_so = bool(connection.exec_driver_sql(IS_PARTITIONED).scalar_one())
    driver: Any = connection.connection.driver_connection
    if getattr(driver, "is_partitioned", None) is None:
        connection.info[_KNOWN] = is_so
    else:
        driver.is_partitioned = is_so
    return is_so


def fitting(connection: Connection, plain: str, in_partitions: str) -> str:
    """The one of two statements that fits the table of records."""
    return in_partitions if is_partitioned(connection) else plain


def insert_or_update(
    connection: Connection, plain: str, in_partitions: tuple[str, str], parameters: Mapping[str, Any]
) -> Any:
    """The row that says what became of it: by one statement, or of partitions by one that inserts and, if it does not, another.

    Each statement looks into all partitions for each table that it names, so both in one would cost the frequent case, a new
    record, four looks instead of one. None: the record has changed or is gone since.
    """
    if not is_partitioned(connection):
        return execute(connection, plain, parameters).fetchone()
    insert, change = in_partitions
    return execute(connection, insert, parameters).fetchone() or execute(connection, change, parameters).fetchone()
