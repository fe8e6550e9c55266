"""The archive: open dead letters that nobody means to decide now. They are open in all that an open letter decides.

The database takes a letter out of it by itself once the letter is closed or becomes another one (migration 0021). On a schema
before that, there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from sqlalchemy import Connection

from .record import is_open

# The columns are there since 0021, which code may be older than: it is asked for them.
_IS_THERE = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_attribute
               WHERE attrelid = 'idempotency.dead_letters'::regclass AND attname = 'archived_at' AND NOT attisdropped)
"""
# Open letters are wanted outside of the archive, or only those in it.
Where = Literal["outside", "inside"]
_CONDITIONS: Mapping[Where, str] = {"outside": "AND archived_at IS NULL", "inside": "AND archived_at IS NOT NULL"}

# Also one that is not: it is not archived before the caller has decided about it.
_ARCHIVED = "SELECT archived_at, archived_by FROM idempotency.dead_letters WHERE id = %(letter)s FOR UPDATE"

_ARCHIVE = f"""
UPDATE idempotency.dead_letters
SET archived_at = clock_timestamp(), archived_by = %(by)s, archived_because = %(because)s
WHERE id = %(letter)s AND {is_open()} AND archived_at IS NULL
"""
_RESTORE = f"""
UPDATE idempotency.dead_letters SET archived_at = NULL, archived_by = NULL, archived_because = NULL
WHERE id = %(letter)s AND {is_open()} AND archived_at IS NOT NULL
"""

_COUNT = """
SELECT count(*) AS letters, extract(epoch FROM clock_timestamp() - min(archived_at))::float8 AS oldest
FROM idempotency.dead_letters
WHERE archived_at IS NOT NULL AND status = 'open' AND (consumer_service = %(service)s) IS NOT FALSE
"""


@dataclass(frozen=True, slots=True)
class Archived:
    """How many letters are archived, and for how many seconds the first of them has been."""

    letters: int
    oldest: float | None


NONE = Archived(0, None)


def is_there(connection: Connection) -> bool:
    """Whether this database has an archive."""
    return bool(connection.exec_driver_sql(_IS_THERE).scalar_one())


def condition(connection: Connection, where: Where) -> str:
    """What a statement about open letters adds to have those outside of the archive, or those in it."""
    if is_there(connection):
        return _CONDITIONS[where]
    return "" if where == "outside" else "AND false"


def in_the_way(connection: Connection, letter: int) -> str | None:
    """Why an archived letter is not decided, and what to do; None: it is not archived. Locks it, after its record."""
    if not is_there(connection):
        return None
    row = connection.exec_driver_sql(_ARCHIVED, {"letter": letter}).one_or_none()
    return None if row is None or row.archived_at is None else said(row.archived_at, row.archived_by)


def said(at: datetime, by: str) -> str:
    """What a person is told who would decide about an archived letter."""
    return f"archived at {at:%F %T%z} by {by!r}; restore it first"


def archive(connection: Connection, letter: int, *, by: str, because: str) -> bool:
    """Archive an open letter. False: it is not open, or it is archived already."""
    fields = {"letter": letter, "by": by, "because": because}
    return connection.exec_driver_sql(_ARCHIVE, fields).rowcount == 1


def restore(connection: Connection, letter: int) -> bool:
    """Take an open letter out of the archive. False: it is not open, or not archived."""
    return connection.exec_driver_sql(_RESTORE, {"letter": letter}).rowcount == 1


def count(connection: Connection, service: str) -> Archived:
    """What of `service` is archived."""
    if not is_there(connection):
        return NONE
    return Archived(*connection.exec_driver_sql(_COUNT, {"service": service}).one())
