"""Partitioning the table of records by creation: `idempotency migrate --partitioned`.

A table that is there becomes the first partition as it is. What takes long (an index, the look whether all rows are of before) is
done while it is in use; then it is exchanged for a partitioned table of its name, in one short transaction.
"""

from __future__ import annotations

import re

from sqlalchemy import Connection, Engine

from ..errors import SettingsError
from .inserting import IS_PARTITIONED
from .migrations.partitioning import DEFAULT, FUNCTIONS, NO_OLDER_CODE, OTHERWISE, PARTITIONS
from .partitions import make_ahead
from .periods import WIDTHS, border, name_of
from .rights import APPLICATION
from .roles import of_partitions, protect
from .schema import exclusively

# Rows of before are all of this time, by a column's constant default, which rewrites nothing.
BEFORE, AFTER = "2000-01-01 00:00:00+00", "2000-01-02 00:00:00+00"
# The table of before, among the partitions.
FIRST = "records_before"

_COLUMN = f"""
ALTER TABLE idempotency.records ADD COLUMN IF NOT EXISTS placed_at timestamptz NOT NULL DEFAULT '{BEFORE}'
"""
_NO_INDEX = "DROP INDEX CONCURRENTLY IF EXISTS idempotency.records_placed"
_INDEX = "CREATE UNIQUE INDEX CONCURRENTLY records_placed ON idempotency.records (tenant, task, key, placed_at)"
_HAS_CHECK = "SELECT EXISTS (SELECT FROM pg_constraint WHERE conname = '{}')"
_CHECK = f"ALTER TABLE idempotency.records ADD CONSTRAINT placed_before CHECK (placed_at = '{BEFORE}') NOT VALID"
_VALIDATE = "ALTER TABLE idempotency.records VALIDATE CONSTRAINT placed_before"

_INDEXES = """
SELECT c.relname AS name, pg_get_indexdef(c.oid) AS definition FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = 'idempotency.records'::regclass AND NOT i.indisprimary AND c.relname <> 'records_placed' ORDER BY 1
"""
_TRIGGERS = """
SELECT tgname AS name, pg_get_triggerdef(oid) AS definition, tgtype AS events FROM pg_trigger
WHERE tgrelid = 'idempotency.records'::regclass AND NOT tgisinternal ORDER BY 1
"""
# Of pg_trigger.tgtype: before, and by which events.
_IS_BEFORE, _BY_INSERT, _BY_DELETE = 2, 4, 8
_VIEWS = """
SELECT DISTINCT v.oid::regclass::text AS name, pg_get_viewdef(v.oid) AS definition
FROM pg_depend d JOIN pg_rewrite w ON w.oid = d.objid JOIN pg_class v ON v.oid = w.ev_class
WHERE d.classid = 'pg_rewrite'::regclass AND d.refobjid = 'idempotency.records'::regclass AND v.relkind = 'v'
"""
# PUBLIC is role 0.
_GRANTS = """
SELECT a.privilege_type AS privilege, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role
FROM pg_class c, aclexplode(c.relacl) a WHERE c.oid = '{table}'::regclass AND a.grantee <> c.relowner
"""
_TABLE = """
SELECT quote_ident(pg_get_userbyid(relowner)) AS owner, relforcerowsecurity AS is_walled
FROM pg_class WHERE oid = 'idempotency.records'::regclass
"""
_PKEY = "SELECT conname FROM pg_constraint WHERE conrelid = 'idempotency.records'::regclass AND contype = 'p'"
_TRIGGER = f"""
CREATE TRIGGER insert_once BEFORE INSERT ON idempotency.records FOR EACH ROW EXECUTE FUNCTION {PARTITIONS}.insert_once()
"""
_WIDTH = "COMMENT ON SCHEMA idempotency_partitions IS '{}'"


def require_width(width: str) -> None:
    """Raise `SettingsError` unless partitions can be so long."""
    if width not in WIDTHS:
        raise SettingsError(f"--partitioned: must be one of {', '.join(WIDTHS)}, got {width!r:.40}")


def partition(engine: Engine, width: str) -> None:
    """Partition the table of records by hour, day or week of creation; of one that is partitioned, change what is made from now on.

    Safe to call again, also after an interruption, and beside running processes: all wait for at most `schema.LOCK_TIMEOUT` seconds
    at a time, and go on with partitions on new connections. There is no way back. Raises `SettingsError` for another width, and
    what `schema.migrate` raises.
    """
    require_width(width)
    exclusively(engine, _prepare)
    exclusively(engine, lambda connection: _partition(connection, width))
    with engine.begin() as connection:
        make_ahead(connection)


def _prepare(connection: Connection) -> None:
    """What takes long, and leaves the table plain."""
    if connection.exec_driver_sql(IS_PARTITIONED).scalar_one():
        return
    _committed(connection, _COLUMN)
    outside = connection.execution_options(isolation_level="AUTOCOMMIT")
    try:
        # waits for all open transactions, so without a time-out
        outside.exec_driver_sql(_NO_INDEX)
        outside.exec_driver_sql(_INDEX)
    finally:
        outside.rollback()  # nothing: each has committed by itself
        connection.execution_options(isolation_level="READ COMMITTED")
    if not connection.exec_driver_sql(_HAS_CHECK.format("placed_before")).scalar_one():
        connection.exec_driver_sql(_CHECK)
    connection.commit()
    _committed(connection, _VALIDATE)


def _committed(connection: Connection, statement: str) -> None:
    connection.exec_driver_sql(statement)
    connection.commit()


def _partition(connection: Connection, width: str) -> None:
    connection.execution_options(
        isolation_level="READ COMMITTED"
    )  # all of it is one transaction, whatever the engine does
    owner = connection.exec_driver_sql(_TABLE).one().owner
    is_new = not connection.exec_driver_sql(IS_PARTITIONED).scalar_one()
    if is_new:
        _exchange(connection, width)
    connection.exec_driver_sql(FUNCTIONS.replace("%", "%%"))
    if is_new:
        connection.exec_driver_sql(_TRIGGER)
    _place_otherwise(connection)
    _give(connection, owner)
    connection.exec_driver_sql(_WIDTH.format(width))
    connection.commit()


def _exchange(connection: Connection, width: str) -> None:
    """Put a partitioned table in the place of the plain one, which becomes its first partition."""
    run = connection.exec_driver_sql
    run("LOCK TABLE idempotency.records IN ACCESS EXCLUSIVE MODE")
    indexes, triggers, views = run(_INDEXES).all(), run(_TRIGGERS).all(), run(_VIEWS).all()
    grants = run(_GRANTS.format(table="idempotency.records")).all()
    table, primary_key = run(_TABLE).one(), run(_PKEY).scalar_one()
    run(f"CREATE SCHEMA IF NOT EXISTS {PARTITIONS}")
    run(f"ALTER TABLE idempotency.records SET SCHEMA {PARTITIONS}")
    first = f"{PARTITIONS}.{FIRST}"
    run(f"ALTER TABLE {PARTITIONS}.records RENAME TO {FIRST}")
    run(f"ALTER TABLE {first} DROP CONSTRAINT {primary_key}")
    run(f"ALTER TABLE {first} ADD CONSTRAINT {FIRST}_pkey PRIMARY KEY USING INDEX records_placed")
    for trigger in triggers:
        run(f"DROP TRIGGER {trigger.name} ON {first}")
    run(
        f"CREATE TABLE idempotency.records (LIKE {first} INCLUDING DEFAULTS INCLUDING STORAGE) "
        "PARTITION BY RANGE (placed_at)"
    )
    run("ALTER TABLE idempotency.records ALTER COLUMN placed_at SET DEFAULT clock_timestamp()")
    run("ALTER TABLE idempotency.records ADD CONSTRAINT records_pkey PRIMARY KEY (tenant, task, key, placed_at)")
    for index in indexes:
        run(re.sub(r" ON (ONLY )?\S+ ", " ON idempotency.records ", index.definition, count=1).replace("%", "%%"))
    for trigger in triggers:
        run(_when_nothing_moves(trigger.definition, trigger.events).replace("%", "%%"))
    run(f"ALTER TABLE idempotency.records ATTACH PARTITION {first} FOR VALUES FROM (MINVALUE) TO ('{AFTER}')")
    run(f"CREATE TABLE {PARTITIONS}.{DEFAULT} PARTITION OF idempotency.records DEFAULT")
    now = run("SELECT clock_timestamp()").scalar_one()
    run(
        f"CREATE TABLE {PARTITIONS}.{name_of(now)} PARTITION OF idempotency.records "
        f"FOR VALUES FROM ('{AFTER}') TO ('{border(now, width).isoformat()}')"
    )
    for grant in grants:
        run(f"GRANT {grant.privilege} ON idempotency.records TO {grant.role}")
        run(f"REVOKE {grant.privilege} ON {first} FROM {grant.role}")
    run(f"ALTER TABLE idempotency.records OWNER TO {table.owner}")
    if table.is_walled:
        protect(connection, "idempotency.records")
        run(f"ALTER TABLE {first} NO FORCE ROW LEVEL SECURITY, DISABLE ROW LEVEL SECURITY")
    for view in views:
        run(f"CREATE OR REPLACE VIEW {view.name} AS {view.definition}".replace("%", "%%"))
    run(NO_OLDER_CODE)


def _place_otherwise(connection: Connection) -> None:
    """Let all rows of the default partition be of one time, also where earlier code has made it."""
    run = connection.exec_driver_sql
    if run(_HAS_CHECK.format("placed_otherwise")).scalar_one():
        return
    default = f"{PARTITIONS}.{DEFAULT}"
    run(f"LOCK TABLE {default} IN ACCESS EXCLUSIVE MODE")
    run(f"UPDATE {default} SET placed_at = '{OTHERWISE}'")
    run(f"ALTER TABLE {default} ADD CONSTRAINT placed_otherwise CHECK (placed_at = '{OTHERWISE}')")


def _when_nothing_moves(definition: str, events: int) -> str:
    """A trigger's definition without what moves between partitions: that is neither new nor gone."""
    definition = re.sub(r" ON \S+ FOR ", " ON idempotency.records FOR ", definition, count=1)
    if events & _IS_BEFORE or not events & (_BY_INSERT | _BY_DELETE):
        return definition
    still = "current_setting('idempotency.moving', true) IS DISTINCT FROM 'on'"
    if " WHEN (" in definition:
        return definition.replace(" WHEN (", f" WHEN ({still} AND ", 1)
    return definition.replace(" EXECUTE FUNCTION ", f" WHEN ({still}) EXECUTE FUNCTION ", 1)


def _give(connection: Connection, owner: str) -> None:
    """All that is about partitions belongs to the owner of the records, and is for those who also delete dead letters."""
    run = connection.exec_driver_sql
    run(f"ALTER SCHEMA {PARTITIONS} OWNER TO {owner}")
    for kind, name in run(_OBJECTS).all():
        run(f"ALTER {kind} {name} OWNER TO {owner}")
    run(f"REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {PARTITIONS} FROM PUBLIC")
    for grant in run(_GRANTS.format(table="idempotency.dead_letters")).all():
        if grant.privilege == "DELETE" and grant.role != APPLICATION:
            for statement in of_partitions(grant.role):
                run(statement)


_OBJECTS = f"""
SELECT 'TABLE', c.oid::regclass::text FROM pg_class c
WHERE c.relnamespace = '{PARTITIONS}'::regnamespace AND c.relkind IN ('r', 'p')
UNION ALL
SELECT 'FUNCTION', p.oid::regprocedure::text FROM pg_proc p WHERE p.pronamespace = '{PARTITIONS}'::regnamespace
"""
