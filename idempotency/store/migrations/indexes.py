"""Indexes on tables that are in use: built while everything else goes on."""

from __future__ import annotations

import re

from alembic import op

from idempotency.store.schema import LOCK_TIMEOUT

_NAME = re.compile(r"CREATE (?:UNIQUE )?INDEX CONCURRENTLY (\w+) ON idempotency\.\w+ ")


def create_index(statement: str) -> None:
    """Run one `CREATE INDEX CONCURRENTLY name ON idempotency.table …`, outside the migration's transaction.

    What the migration has done so far is committed before it, so that has to be written with IF NOT EXISTS: a migration
    whose build is interrupted runs again from its beginning. An interrupted build leaves an invalid index under its
    name, so the name is freed first.
    """
    found = _NAME.match(statement)
    if found is None:
        raise ValueError(f"need CREATE INDEX CONCURRENTLY name ON idempotency.table, got {statement[:60]!r}")
    with op.get_context().autocommit_block():
        # It blocks no reader and no writer, but waits for every open transaction: patience is right here.
        op.execute("SET lock_timeout = 0")
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS idempotency.{found.group(1)}")
        op.execute(statement)
        op.execute(f"SET lock_timeout = '{int(LOCK_TIMEOUT * 1000)}ms'")
