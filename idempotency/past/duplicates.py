"""Rows that name the same operation, counted and timed in one read-only transaction.

The table is read twice: once to count its rows, and once to sort them by the key and the time, without a time to hash them.
What is returned is totals and a few examples, whatever the size of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from psycopg import Connection

from .conditions import Condition
from .naming import Part
from .table import Column, Table

# Distances between one copy and the next, in seconds: each class with its upper end, None for the last one.
CLASSES: dict[str, int | None] = {"minute": 60, "hour": 3600, "day": 86400, "longer": None}
# So many ids are shown of the rows of one group.
IDS = 3
# What is read as a number. Other texts, and numbers that are none (NaN, infinite), are counted as unreadable.
# ASCII alone: for Postgres, `\d` may also be another script's digit, which a cast refuses.
_NUMBER = r"^ *[-+]?([0-9]{1,60}(\.[0-9]{0,60})?|\.[0-9]{1,60})([eE][-+]?[0-9]{1,3})? *$"
# An ordered aggregate cannot be hashed, so it is left out where there is no order.
_IDS = "pg_catalog.array_agg(id ORDER BY place) FILTER (WHERE place <= %(ids)s AND id IS NOT NULL)"
_SHOWN = "pg_catalog.to_char({}, 'YYYY-MM-DD\"T\"HH24:MI:SS.US{}')"


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one key, within the window if there is one.

    `key`: its parts as text. `first`, `last`: ISO 8601, in UTC if the column has a zone; None without a time. `shortest`,
    `longest`: seconds between one row and the next. `amount`: the sum of all rows but the largest one; None without numbers.
    `ids`: of the first rows by time, as text.
    """

    key: tuple[str | None, ...]
    rows: int
    first: str | None
    last: str | None
    shortest: float | None
    longest: float | None
    amount: Decimal | None
    amounts_differ: bool
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Duplicates:
    """What was found. `rows`: looked at; `without_key`, `without_time`: left out of these. `copies`: all rows of groups but one of each.

    `distances`: how many copies came how long after the row before. `amount`: the sum of the groups' own; `differing`: groups
    whose rows have several amounts; `unreadable`: amounts in groups that are no number.
    """

    rows: int
    without_key: int
    without_time: int
    groups: int
    copies: int
    distances: dict[str, int]
    amount: Decimal | None
    differing: int
    unreadable: int
    examples: list[Group]


@dataclass(frozen=True, slots=True)
class Question:
    """What to look for. `within`: seconds between one row and the next of a group at most; `limit`: examples at most.

    `nulls`: whether NULL in a part of the key is a value like others; if not, such a row names no operation.
    """

    table: Table
    key: Sequence[Part]
    conditions: Sequence[Condition] = ()
    at: Column | None = None
    within: float | None = None
    amount: Column | None = None
    nulls: bool = False
    limit: int = 10

    @property
    def parameters(self) -> dict[str, Any]:
        """The values that the statements take."""
        paths = {f"path{number}": list(part.path) for number, part in enumerate(self.key) if part.path}
        values = {f"where{n}": each.value for n, each in enumerate(self.conditions) if each.value is not None}
        return paths | values | {"within": self.within, "limit": self.limit, "ids": IDS, "number": _NUMBER}


def find_duplicates(connection: Connection[Any], question: Question) -> Duplicates:
    """Count the rows, then find the groups. In a transaction that has begun, and sees one state of the table throughout."""
    connection.execute("SET LOCAL TimeZone = 'UTC'")  # days and texts of times do not depend on who asks
    rows, without_key, without_time = _one(connection, _counted(question), question)
    found = connection.execute(_grouped(question).encode(), question.parameters).fetchall()
    groups, copies, amount, differing, unreadable, *distances = found[0][: 5 + len(CLASSES)]
    return Duplicates(
        rows=rows,
        without_key=without_key,
        without_time=without_time,
        groups=groups,
        copies=copies,
        distances=dict(zip(CLASSES, distances, strict=True)) if question.at is not None else {},
        amount=amount,
        differing=differing,
        unreadable=unreadable,
        examples=[_group(row[5 + len(CLASSES) :], len(question.key)) for row in found if groups and question.limit],
    )


def _one(connection: Connection[Any], statement: str, question: Question) -> Any:
    return connection.execute(statement.encode(), question.parameters).fetchone()


def _group(row: Sequence[Any], parts: int) -> Group:
    rows, first, last, shortest, longest, amount, differ, ids = row[parts:]
    return Group(tuple(row[:parts]), rows, first, last, shortest, longest, amount, bool(differ), tuple(ids or ()))


def _counted(question: Question) -> str:
    null = " OR ".join(f"{part.expression} IS NULL" for part in question.key)
    without_key = "0" if question.nulls else f"pg_catalog.count(*) FILTER (WHERE {null})"
    at = question.at
    without_time = "0" if at is None else f"pg_catalog.count(*) FILTER (WHERE {_finite(at)} IS NULL)"
    return f"SELECT pg_catalog.count(*), {without_key}, {without_time} FROM {question.table.quoted}{_where(question.conditions)}"


def _where(conditions: Sequence[Condition], *more: str) -> str:
    every = [*(each.expression for each in conditions), *more]
    return f" WHERE {' AND '.join(every)}" if every else ""


def _finite(at: Column) -> str:
    """The time of a row; none for one that is infinite."""
    return f"CASE WHEN pg_catalog.isfinite({at.quoted}) THEN {at.quoted} END"


def _number(amount: Column | None) -> str:
    """A text of the amount: what is no number is told from it when the few rows of groups are added."""
    if amount is None:
        return "NULL::text"
    return f"{amount.quoted}::numeric::text" if amount.type == "money" else f"{amount.quoted}::text"


def _grouped(question: Question) -> str:
    keys = [f"k{number}" for number in range(len(question.key))]
    key, at = ", ".join(keys), question.at
    needed = [] if question.nulls else [f"{part.expression} IS NOT NULL" for part in question.key]
    if at is not None and question.within is not None:
        needed.append(f"{_finite(at)} IS NOT NULL")
    selected = [f"{part.expression} AS {name}" for part, name in zip(question.key, keys, strict=True)]
    time = "NULL::timestamp" if at is None else f"({_finite(at)}){'' if at.has_zone else '::timestamp'}"
    identity = question.table.identity
    selected += [f"{time} AS moment", f"{_number(question.amount)} AS amount"]
    selected.append(f"{'NULL' if identity is None else identity.quoted}::text AS id")
    read = f"SELECT {', '.join(selected)} FROM {question.table.quoted}{_where(question.conditions, *needed)}"
    shown = [_SHOWN.format(name, '"+00:00"' if at is not None and at.has_zone else "") for name in ("first", "last")]
    classes = ", ".join(f"COALESCE(pg_catalog.sum({name}), 0)::bigint" for name in CLASSES)
    return f"""
WITH read AS ({read}),
{_placed(key) if at is not None else _unplaced()},
numbered AS (
    SELECT *, CASE WHEN amount ~ %(number)s THEN amount::numeric END AS number FROM placed
),
groups AS (
    SELECT {key}, pg_catalog.count(*) AS copies, pg_catalog.min(moment) AS first, pg_catalog.max(moment) AS last,
           pg_catalog.min(gap) AS shortest, pg_catalog.max(gap) AS longest,
           pg_catalog.sum(number) - pg_catalog.max(number) AS amount,
           pg_catalog.min(number) <> pg_catalog.max(number) AS differ,
           pg_catalog.count(amount) - pg_catalog.count(number) AS unreadable,
           {_IDS if at is not None else "NULL::text[]"} AS ids,
           {_in_classes()}
    FROM numbered GROUP BY {key}, cluster HAVING pg_catalog.count(*) > 1
)
SELECT total.*, {", ".join(f"example.{name}::text" for name in keys)}, copies, {", ".join(shown)},
       shortest, longest, example.amount, differ, ids
FROM (
    SELECT pg_catalog.count(*), COALESCE(pg_catalog.sum(copies - 1), 0)::bigint, pg_catalog.sum(amount),
           pg_catalog.count(*) FILTER (WHERE differ), COALESCE(pg_catalog.sum(unreadable), 0)::bigint, {classes}
    FROM groups
) total
LEFT JOIN (SELECT * FROM groups ORDER BY copies DESC, shortest, {key} LIMIT %(limit)s) example ON true
ORDER BY copies DESC, shortest, {", ".join(f"example.{name}" for name in keys)}
"""


def _placed(key: str) -> str:
    """Each row of a key that has several, with the seconds since the one before, and the number of its group within the window."""
    return f"""
timed AS (
    SELECT *, pg_catalog.count(*) OVER (PARTITION BY {key}) AS of_key,
           EXTRACT(epoch FROM moment - pg_catalog.lag(moment) OVER (PARTITION BY {key} ORDER BY moment))::float8 AS since
    FROM read
),
clustered AS (
    SELECT *, pg_catalog.count(*) FILTER (WHERE since > %(within)s::float8)
                  OVER (PARTITION BY {key} ORDER BY moment ROWS UNBOUNDED PRECEDING) AS cluster
    FROM timed WHERE of_key > 1
),
placed AS (
    SELECT *, CASE WHEN since > %(within)s::float8 THEN NULL ELSE since END AS gap,
           pg_catalog.row_number() OVER (PARTITION BY {key}, cluster ORDER BY moment) AS place
    FROM clustered
)"""


def _unplaced() -> str:
    return "placed AS (SELECT *, NULL::float8 AS gap, NULL::bigint AS place, 0 AS cluster FROM read)"


def _in_classes() -> str:
    """How many rows came how long after the one before, a column for each class."""
    columns, above = [], "gap IS NOT NULL"
    for name, end in CLASSES.items():
        below = above if end is None else f"{above} AND gap < {end}"
        columns.append(f"pg_catalog.count(*) FILTER (WHERE {below}) AS {name}")
        above = above if end is None else f"gap >= {end}"
    return ", ".join(columns)
