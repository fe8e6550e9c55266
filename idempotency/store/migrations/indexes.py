"""Building indexes on tables in use, without blocking anything."""

from __future__ import annotations

import re

from alembic import op

_NAME = re.compile(r"CREATE (UNIQUE )?INDEX CONCURRENTLY (\w+) ON idempotency\.(\w+) ")

_PARTITIONS = """
SELECT n.nspname AS schema, c.relname AS name FROM pg_inherits i
JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE i.inhparent = to_regclass('idempotency.{table}') ORDER BY 2
"""
_IS_ATTACHED = "SELECT EXISTS (SELECT FROM pg_inherits WHERE inhrelid = to_regclass('{index}'))"


def create_index(statement: str) -> None:
    """Run one `CREATE INDEX CONCURRENTLY name ON idempotency.table …`, outside the migration's transaction.

    This commits what the migration has done so far. If the build is interrupted, the migration runs again from its
    beginning, so write that part with IF NOT EXISTS. An interrupted build leaves an invalid index, which is dropped here.
    Of a table in partitions, each gets its own, and then they become one.
    """
    found = _NAME.match(statement)
    if found is None:
        raise ValueError(f"need CREATE INDEX CONCURRENTLY name ON idempotency.table, got {statement[:60]!r}")
    unique, name, table = found.groups()
    with op.get_context().autocommit_block():
        partitions = op.get_bind().exec_driver_sql(_PARTITIONS.format(table=table)).all()
        # Blocks neither readers nor writers, but has to wait for all open transactions, so without a time-out: that of
        # a migration's transactions does not apply here.
        if not partitions:
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS idempotency.{name}")
            op.execute(statement)
            return
        rest = statement[found.end() :]
        # invalid until all are attached; one that is made from now on has it from its beginning
        op.execute(f"CREATE {unique or ''}INDEX IF NOT EXISTS {name} ON ONLY idempotency.{table} {rest}")
        for each in partitions:
            index = f"{each.schema}.{each.name}_{name.removeprefix(f'{table}_')}"
            if op.get_bind().exec_driver_sql(_IS_ATTACHED.format(index=index)).scalar_one():
                continue
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {index}")
            op.execute(
                f"CREATE {unique or ''}INDEX CONCURRENTLY {index.partition('.')[2]} ON {each.schema}.{each.name} {rest}"
            )
            op.execute(f"ALTER INDEX idempotency.{name} ATTACH PARTITION {index}")
