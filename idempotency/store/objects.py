"""Which results that are kept elsewhere have a record, or a saga's step, that refers to them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from sqlalchemy import Connection

from ..errors import ResultUnreadable
from ..wire.keys import OperationId
from ..wire.references import BEGIN, NAME_LENGTH, reference
from .record import ROW, named
from .statements import IS_CONFIRMED, execute

# As the indexes `records_objects` and `saga_steps_objects` (migration 0016) have it: a reference without what follows its name.
_BEGINNING = (
    f"left({{of}}.result, {len(BEGIN) + NAME_LENGTH}) = '{BEGIN}' || n.name AND starts_with({{of}}.result, '{BEGIN}')"
)

# Scalar, so that each name is looked up: joined, a plan that is made while the tables are small reads all references. A former
# primary knows nothing of what the new one refers to, and a purge that no standby has confirmed may not have been.
_UNUSED = f"""
SELECT n.name FROM pg_catalog.unnest(%(names)s::text[]) n(name)
WHERE (SELECT true FROM idempotency.records r WHERE {_BEGINNING.format(of="r")} LIMIT 1) IS NULL
  AND (SELECT true FROM idempotency.saga_steps s WHERE {_BEGINNING.format(of="s")} LIMIT 1) IS NULL
  AND {IS_CONFIRMED}
"""

_LAST_BEGUN = "SELECT pg_catalog.pg_current_xact_id()::text"
_HAVE_ENDED = "SELECT pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot()) > %(last)s::xid8"

_OF_OPERATION = f"""
SELECT result FROM idempotency.records WHERE {ROW} AND starts_with(result, '{BEGIN}')
UNION SELECT result FROM idempotency.saga_steps
WHERE (tenant, call_task, call_key) = (%(tenant)s, %(task)s, %(key)s) AND starts_with(result, '{BEGIN}')
"""


def unused(connection: Connection, names: Sequence[str]) -> list[str]:
    """Those of these names that nothing refers to. A transaction that has not ended may do so yet.

    Waits for a standby, as a commit does.
    """
    return [row.name for row in execute(connection, _UNUSED, {"names": list(names)})]


def last_begun(connection: Connection) -> str:
    """The number of a transaction after all that have written anything so far."""
    return str(connection.exec_driver_sql(_LAST_BEGUN).scalar_one())


def have_ended(connection: Connection, last: str) -> bool:
    """Whether all transactions up to this one have, so that whoever looks sees what they have committed."""
    return bool(connection.exec_driver_sql(_HAVE_ENDED, {"last": last}).scalar_one())


def of_operations(connection: Connection, ids: Sequence[OperationId]) -> list[str]:
    """The names that these operations refer to. A reference that was altered is left out: it leads nowhere."""
    names = []
    for id in ids:
        for row in connection.exec_driver_sql(_OF_OPERATION, named(id)).all():
            with suppress(ResultUnreadable):
                names.append(reference(row.result).name)
    return names
