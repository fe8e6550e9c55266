"""Building indexes on tables in use, without blocking anything."""

from __future__ import annotations

import re

from alembic import op

_NAME = re.compile(r"CREATE (?:UNIQUE )?INDEX CONCURRENTLY (\w+) ON idempotency\.\w+ ")


def create_index(statement: str) -> None:
    """Run one `CREATE INDEX CONCURRENTLY name ON idempotency.table …`, outside the migration's transaction.

    This commits what the migration has done so far. If the build is interrupted, the migration runs again from its
    beginning, so write that part with IF NOT EXISTS. An interrupted build leaves an invalid index, which is dropped here.
    """
    found = _NAME.match(statement)
    if found is None:
        raise ValueError(f"need CREATE INDEX CONCURRENTLY name ON idempotency.table, got {statement[:60]!r}")
    with op.get_context().autocommit_block():
        # Blocks neither readers nor writers, but has to wait for all open transactions, so without a time-out: that of
        # a migration's transactions does not apply here.
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS idempotency.{found.group(1)}")
        op.execute(statement)
