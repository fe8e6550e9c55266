"""A table of the application, as Postgres' catalogue has it: found by its exact name, never by executing a text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from psycopg import Connection, sql

from ..errors import IdempotencyError

# The kinds of relations that have rows to read: tables, partitioned ones, views, materialised views, foreign tables.
_KINDS = ["r", "p", "v", "m", "f"]
_TABLES = """
SELECT c.oid, n.nspname, c.relname, GREATEST(c.reltuples, 0)::bigint,
       has_schema_privilege(n.oid, 'USAGE'), c.relkind::text
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind::text = ANY(%(kinds)s)
  AND (c.relname = %(name)s AND n.nspname = ANY(%(path)s) OR n.nspname || '.' || c.relname = %(name)s)
ORDER BY array_position(%(path)s::name[], n.nspname) NULLS LAST
LIMIT 1
"""
_OTHERS = """
SELECT c.relname, n.nspname || '.' || c.relname
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind::text = ANY(%(kinds)s) AND n.nspname <> 'information_schema' AND n.nspname NOT LIKE 'pg\\_%%'
"""
# `type`: as a cast has it, of a domain the type below it; `is_builtin`: whether its comparisons are Postgres' own.
_COLUMNS = """
SELECT a.attname, a.attnum, format_type(t.oid, NULL), t.typcategory::text,
       t.typnamespace = 'pg_catalog'::regnamespace OR t.typcategory = 'E',
       has_column_privilege(a.attrelid, a.attnum, 'SELECT')
FROM pg_attribute a
JOIN pg_type declared ON declared.oid = a.atttypid
JOIN pg_type t ON t.oid = COALESCE(NULLIF(declared.typbasetype, 0), declared.oid)
WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""
_PRIMARY_KEY = "SELECT i.indkey[0] FROM pg_index i WHERE i.indrelid = %(oid)s AND i.indisprimary AND i.indnatts = 1"
_TIMES = ("timestamp with time zone", "timestamp without time zone", "date")


@dataclass(frozen=True, slots=True)
class Column:
    """A column. `type`: Postgres' name of its type, of a domain the type below it; `category`: Postgres' category of types."""

    name: str
    type: str
    category: str
    is_builtin: bool

    @property
    def is_time(self) -> bool:
        return self.type in _TIMES

    @property
    def has_zone(self) -> bool:
        return self.type == _TIMES[0]

    @property
    def is_amount(self) -> bool:
        """Whether it may have numbers: of a numeric type, or of text that is read as one."""
        return self.category in ("N", "S")

    @property
    def quoted(self) -> str:
        return quoted(self.name)


@dataclass(frozen=True, slots=True)
class Table:
    """A table or view. `rows`: how many Postgres believes that it has, 0 if it does not know; `identity`: its primary key of one column."""

    schema: str
    name: str
    rows: int
    columns: dict[str, Column]
    identity: Column | None

    @property
    def shown(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def quoted(self) -> str:
        return f"{quoted(self.schema)}.{quoted(self.name)}"

    def column(self, name: str, option: str) -> Column:
        """The column of this exact name. Raises `IdempotencyError`, which names the option and columns of a similar name."""
        found = self.columns.get(name)
        if found is None:
            raise IdempotencyError(f"{option}: {self.shown} has no column {name!r}{_near(name, self.columns)}")
        return found


def quoted(name: str) -> str:
    """An identifier as a statement with parameters has it: in quotes, and with `%` doubled, which psycopg would read as a parameter."""
    return sql.Identifier(name).as_string().replace("%", "%%")


def find_table(connection: Connection[Any], name: str) -> Table:
    """Find a table by its exact name, with or without its schema, which is then one of the login's search path.

    From then on the transaction's path is Postgres' own: no function or operator that somebody has made in the application's
    schemas is run instead of one of Postgres'. Raises `IdempotencyError` with similar names, or the missing right.
    """
    row = connection.execute("SELECT pg_catalog.current_schemas(true)").fetchone()
    connection.execute("SET LOCAL search_path = pg_catalog, pg_temp")
    path = [] if row is None else row[0]
    if (found := connection.execute(_TABLES, {"kinds": _KINDS, "name": name, "path": path}).fetchone()) is None:
        others = connection.execute(_OTHERS, {"kinds": _KINDS}).fetchall()
        known = {shown: full for plain, full in others for shown in (plain, full)}
        raise IdempotencyError(f"--table: there is no table {name!r}{_near(name, known, known)}")
    oid, schema, plain, rows, may_look, _ = found
    if not may_look:
        raise IdempotencyError(
            f"--table: no right to look into schema {schema}; GRANT USAGE ON SCHEMA {quoted(schema)}"
        )
    every = connection.execute(_COLUMNS, {"oid": oid}).fetchall()
    columns = {row[0]: Column(row[0], row[2], row[3], row[4]) for row in every if row[5]}
    if not columns:
        raise IdempotencyError(
            f"--table: no right to read {schema}.{plain}; GRANT SELECT ON {quoted(schema)}.{quoted(plain)}"
        )
    key = connection.execute(_PRIMARY_KEY, {"oid": oid}).fetchone()
    identity = None if key is None else next((columns.get(row[0]) for row in every if row[1] == key[0]), None)
    return Table(schema, plain, rows, columns, identity)


def _near(name: str, known: Iterable[str], full: dict[str, str] | None = None) -> str:
    """The names that are most like one that is not there, as the end of a sentence."""
    by_lower = {each.lower(): each for each in known}
    close = [by_lower[each] for each in difflib.get_close_matches(name.lower(), by_lower, n=3)]
    shown = dict.fromkeys(each if full is None else full[each] for each in close)
    return f"; did you mean {' or '.join(shown)}?" if shown else ""
