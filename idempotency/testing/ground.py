"""The test database of a check: emptied before each scenario and read after it; leases and pauses end on demand.

Emptying tables is dangerous, so a database is refused unless its name says that it is for tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from celery import Celery
from sqlalchemy import Table, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from .. import objects
from ..application import settings_of
from ..store import testing as stored
from ..store.connections import make_engine
from ..store.schema import SCHEMA
from ..store.statements import describe
from ..wire import results
from ..wire.keys import OperationId
from ..wire.message import Message
from .database import forget_hints, require_test_database
from .differences import HEADINGS, Masked, Row

# Nothing else should use this database: a lock held for this long will not be released.
LOCK_TIMEOUT = "10s"

_TABLES = """
SELECT c.oid::regclass::text AS name
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND n.nspname NOT LIKE 'pg\\_%'
  AND n.nspname NOT IN ('information_schema', :schema) AND has_table_privilege(c.oid, 'SELECT')
  AND c.oid <> ALL (cast(:named AS regclass[])::oid[])
ORDER BY 1
"""


class Ground:
    """One check's view of the database. Raises `ValueError` for databases and tables that it refuses to touch."""

    def __init__(self, app: Celery, tables: Iterable[object], *, allow_database: str | None) -> None:
        self._settings = settings_of(app)
        self._engine = make_engine(self._settings, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        self._ids: set[OperationId] = set()
        # one for the whole check; the forked deliveries inherit it and leave it alone
        self._connection = self._engine.connect()
        try:
            self._connection.exec_driver_sql(f"SET lock_timeout = '{LOCK_TIMEOUT}'")
            require_test_database(self._connection, allowed=allow_database)
            self.tables = {name: self._quoted(name) for name in map(_name_of, tables)}
            # outbox rows up to here are not from this check
            self._newest = stored.newest_row(self._connection)
        except BaseException:
            self.close()
            raise

    def _quoted(self, name: str) -> str:
        quote = self._engine.dialect.identifier_preparer.quote
        quoted = ".".join(quote(part) for part in name.split("."))
        if name.split(".")[0] == SCHEMA or name in HEADINGS:
            raise ValueError(f"tables: {name!r} cannot be compared under this name")
        if not self._exists(quoted):
            raise ValueError(f"tables: there is no table {name!r} in the database")
        return quoted

    def _exists(self, quoted: str) -> bool:
        return bool(
            self._connection.execute(text("SELECT to_regclass(:name) IS NOT NULL"), {"name": quoted}).scalar_one()
        )

    def ignored(self, entries: Iterable[str]) -> Masked:
        """What `ignore=` names: a column of a heading, or a whole heading, or a table that is not compared anyway."""
        known = {*HEADINGS, *self.tables}
        masked = set()
        for entry in entries:
            heading, _, column = entry.rpartition(".")
            if entry in known or (heading not in known and self._exists(entry)):
                masked.add((entry, "*"))
            elif heading in known:
                masked.add((heading, column))
            else:
                raise ValueError(f"ignore: {entry!r} names no table, and no column of one in tables= or of {HEADINGS}")
        return frozenset(masked)

    # ------------------------------------------------------------ before

    def clear(self) -> None:
        """Empty the named tables, and forget the operations of this check."""
        if self.tables:
            try:
                # no RESTART IDENTITY: serial ids go on, so that two plain runs show which columns hold them
                self._connection.exec_driver_sql(f"TRUNCATE {', '.join(self.tables.values())}")
            except DBAPIError as error:
                raise ValueError(
                    f"the tables cannot be emptied ({describe(error)}): name those that refer to them too, and "
                    "leave no transaction open in the test or its fixtures"
                ) from None
        # what the last scenario enqueued must never be sent
        stored.forget_rows_after(self._connection, self._newest)
        for id in self._ids:
            stored.forget(self._connection, id)
        forget_hints(self._settings, self._ids)

    def meet(self, id: OperationId) -> None:
        """Count this operation among those of the check."""
        if id not in self._ids:
            self._ids.add(id)
            stored.forget(self._connection, id)

    def close(self) -> None:
        self._connection.close()

    # ------------------------------------------------------------ during

    def ripen(self, id: OperationId) -> None:
        """End its lease, or make its next delivery due."""
        stored.ripen(self._connection, id)

    def status(self, id: OperationId) -> str | None:
        record = stored.outcome(self._connection, id)
        return None if record is None else str(record.status)

    # ------------------------------------------------------------ after

    def rows(self) -> dict[str, list[Row]]:
        """All rows of the named tables."""
        return {
            name: [json.loads(row) for row in self._connection.exec_driver_sql(_all(table)).scalars()]
            for name, table in self.tables.items()
        }

    def record(self, id: OperationId) -> Any:
        """Status, result, error and effects of the operation; None without a record."""
        return stored.outcome(self._connection, id)

    def result(self, record: Any) -> Any:
        """The result that a record keeps, wherever it is; None without one."""
        if record.result is None:
            return None
        return results.from_text(objects.fetch(self._settings.large_results_at, record.result))

    def enqueued(self) -> list[Row]:
        """The messages left in the outbox since `clear`, but for the check's own operations."""
        found: list[Row] = []
        for row in stored.rows_after(self._connection, self._newest):
            if OperationId(row.tenant, row.task, row.key) not in self._ids:
                found.append({"task": row.task, "key": row.key, **_content(row.message)})
        return found

    def others(self) -> dict[str, tuple[int, int]]:
        """The state of every table that was not named, to find out whether a run writes to it."""
        parameters = {"schema": SCHEMA, "named": list(self.tables.values())}
        names: Sequence[str] = self._connection.execute(text(_TABLES), parameters).scalars().all()
        return {name: tuple(self._connection.exec_driver_sql(_state(name)).one()) for name in names}


def _name_of(table: object) -> str:
    if isinstance(table, str):
        return table
    if isinstance(mapped := getattr(table, "__table__", table), Table):
        return mapped.fullname
    raise ValueError(f"tables: names, mapped classes or SQLAlchemy tables, got {type(table).__name__}")


def _content(message: str) -> Row:
    body = json.loads(Message.from_text(message).body)
    match body:
        case [args, kwargs, dict()]:
            return {"args": args, "kwargs": kwargs}
        case _:  # an event for consumers outside
            return {"body": body}


def _all(table: str) -> str:
    return f"SELECT row_to_json(t)::text FROM {table} t"


def _state(table: str) -> str:
    return f"SELECT count(*), coalesce(max(xmin::text::bigint), 0) FROM {table}"
