"""The span of an operation's last attempt, on its record: what the next attempt, whatever led to it, is linked to."""

from __future__ import annotations

from sqlalchemy import Connection

from ..wire.keys import OperationId
from .answers import Claimed
from .record import MINE, ROW, mine, named
from .statements import execute

# It waits for nobody's lock, nor for the disk: an attempt does not get slower by what a trace would like to know.
_NOTE = f"""
WITH before AS MATERIALIZED (
    SELECT trace FROM idempotency.records WHERE {MINE} FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE idempotency.records SET trace = %(trace)s FROM before WHERE {MINE}
RETURNING before.trace AS earlier, set_config('synchronous_commit', 'off', true)
"""
_LAST = f"SELECT trace FROM idempotency.records WHERE {ROW}"


def note(connection: Connection, claim: Claimed, trace: str) -> str | None:
    """Note the span of an attempt, as `traceparent`. Returns that of the attempt before it; None: there is none, or not now."""
    row = execute(connection, _NOTE, mine(claim) | {"trace": trace}).fetchone()
    return None if row is None else row.earlier


def last(connection: Connection, id: OperationId) -> str | None:
    """The span of an operation's last attempt that was traced, as `traceparent`."""
    row = execute(connection, _LAST, named(id)).fetchone()
    return None if row is None else row.trace
