"""Partitioning the table of records by creation: `idempotency migrate --partitioned`.

A table that exists becomes the first partition as it is. What takes long (an index, the proof that all its rows belong there) is
done while it is in use; then a partitioned table takes its name, in one short transaction.
"""

from __future__ import annotations

import re
import time

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from ..errors import SettingsError
from ..observe.logs import log
from .in_the_way import objects_in_the_way
from .inserting import IS_PARTITIONED
from .migrations.partitioning import DEFAULT, FUNCTIONS, NO_OLDER_CODE, OTHERWISE, PARTITIONS, VERSION
from .partitions import make_ahead
from .periods import WIDTHS, border, name_of
from .rights import APPLICATION
from .roles import OWN_POLICIES, of_partitions, protect
from .schema import LOCK_PAUSE, TRY_AGAIN, exclusively
from .statements import describe, sqlstate

# All rows that exist are given this time, by a column's constant default, which rewrites nothing.
BEFORE, AFTER = "2000-01-01 00:00:00+00", "2000-01-02 00:00:00+00"
# The former table, as a partition.
FIRST = "records_before"
# Tries to make partitions ahead at the end, if another has a lock: after that, upkeep does it.
TRIES = 5

_COLUMN = f"""
ALTER TABLE idempotency.records ADD COLUMN IF NOT EXISTS placed_at timestamptz NOT NULL DEFAULT '{BEFORE}'
"""
_NO_INDEX = "DROP INDEX CONCURRENTLY IF EXISTS idempotency.records_placed"
_INDEX = "CREATE UNIQUE INDEX CONCURRENTLY records_placed ON idempotency.records (tenant, task, key, placed_at)"
_HAS_CHECK = "SELECT EXISTS (SELECT FROM pg_constraint WHERE conname = '{}' AND conrelid = '{}'::regclass)"
_CHECK = f"ALTER TABLE idempotency.records ADD CONSTRAINT placed_before CHECK (placed_at = '{BEFORE}') NOT VALID"
_VALIDATE = "ALTER TABLE idempotency.records VALIDATE CONSTRAINT placed_before"

_INDEXES = """
SELECT c.relname AS name, pg_get_indexdef(c.oid) AS definition FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = 'idempotency.records'::regclass AND NOT i.indisprimary AND c.relname <> 'records_placed' ORDER BY 1
"""
_TRIGGERS = """
SELECT quote_ident(tgname) AS name, pg_get_triggerdef(oid) AS definition, tgtype AS events, tgenabled::text AS fires FROM pg_trigger
WHERE tgrelid = 'idempotency.records'::regclass AND NOT tgisinternal ORDER BY 1
"""
# Of pg_trigger.tgtype: before, and by which events.
_IS_BEFORE, _BY_INSERT, _BY_DELETE = 2, 4, 8
_VIEWS = """
SELECT DISTINCT v.oid::regclass::text AS name, pg_get_viewdef(v.oid) AS definition,
       coalesce('WITH (' || array_to_string(v.reloptions, ', ') || ')', '') AS options
FROM pg_depend d JOIN pg_rewrite w ON w.oid = d.objid JOIN pg_class v ON v.oid = w.ev_class
WHERE d.classid = 'pg_rewrite'::regclass AND d.refobjid = 'idempotency.records'::regclass AND v.relkind = 'v'
"""
# As of a tenant that has moved to another cell; the first partition keeps its own.
_CHECKS = """
SELECT quote_ident(conname) AS name, pg_get_constraintdef(oid) AS definition FROM pg_constraint
WHERE conrelid = 'idempotency.records'::regclass AND contype = 'c' AND conname <> 'placed_before' ORDER BY 1
"""
# Of the table and of its columns. PUBLIC is role 0.
_GRANTS = """
SELECT a.privilege_type || g.of_column AS privilege,
       CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
       CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS further
FROM (
    SELECT '' AS of_column, c.relacl AS rights, c.relowner AS owner FROM pg_class c WHERE c.oid = '{table}'::regclass
    UNION ALL
    SELECT ' (' || quote_ident(t.attname) || ')', t.attacl, c.relowner FROM pg_attribute t JOIN pg_class c ON c.oid = t.attrelid
    WHERE c.oid = '{table}'::regclass AND t.attacl IS NOT NULL AND NOT t.attisdropped
) g, aclexplode(g.rights) a WHERE a.grantee <> g.owner
"""
_TABLE = """
SELECT quote_ident(pg_get_userbyid(relowner)) AS owner, relrowsecurity AS is_secured, relforcerowsecurity AS is_forced,
       EXISTS (SELECT FROM pg_policy WHERE polrelid = c.oid) AS has_policies,
       coalesce(array_to_string(reloptions, ', '), '') AS options
FROM pg_class c WHERE oid = 'idempotency.records'::regclass
"""
# By pg_trigger.tgenabled, what says so; those that fire as ever need nothing.
_FIRES = {"D": "DISABLE", "R": "ENABLE REPLICA", "A": "ENABLE ALWAYS"}
_PKEY = "SELECT conname FROM pg_constraint WHERE conrelid = 'idempotency.records'::regclass AND contype = 'p'"
# Row triggers BEFORE an event are asked where the row is, before it goes elsewhere.
_OWN_TRIGGERS = {
    "insert_once": f"""
CREATE TRIGGER insert_once BEFORE INSERT ON idempotency.records FOR EACH ROW EXECUTE FUNCTION {PARTITIONS}.insert_once()
""",
    "keep_place": f"""
CREATE TRIGGER keep_place BEFORE UPDATE OF placed_at ON idempotency.records FOR EACH ROW
    WHEN (OLD.placed_at IS DISTINCT FROM NEW.placed_at) EXECUTE FUNCTION {PARTITIONS}.keep_place()
""",
}
_HAS_TRIGGER = (
    "SELECT EXISTS (SELECT FROM pg_trigger WHERE tgname = '{}' AND tgrelid = 'idempotency.records'::regclass)"
)
_WIDTH = "COMMENT ON SCHEMA idempotency_partitions IS '{}'"


def require_width(width: str) -> None:
    """Raise `SettingsError` unless partitions can be so long."""
    if width not in WIDTHS:
        raise SettingsError(f"--partitioned: must be one of {', '.join(WIDTHS)}, got {width!r:.40}")


def partition(engine: Engine, width: str) -> None:
    """Partition the table of records by hour, day or week of creation; of one that is partitioned, change what is made from now on.

    Safe to call again, also after an interruption, and beside running processes: all wait for at most `schema.LOCK_TIMEOUT`
    seconds at a time, and go on with partitions on new connections. There is no way back. Raises `SettingsError` for another
    width, and for what the table has that would be lost, which it names; and what `schema.migrate` raises.
    """
    require_width(width)
    exclusively(engine, _prepare)
    exclusively(engine, lambda connection: _partition(connection, width))
    _make_ahead(engine)


def renew(engine: Engine) -> None:
    """Bring the functions of partitions to this version, as `migrate` does with the tables. Nothing for a plain table, or newer ones."""
    exclusively(engine, _renew)


def functions_version(connection: Connection) -> int:
    """Of which version the functions of partitions are; 1: of a checkout before they had one. Needs USAGE on their schema."""
    has_one = connection.exec_driver_sql(_HAS_VERSION).scalar_one()
    return int(connection.exec_driver_sql(f"SELECT {PARTITIONS}.version()").scalar_one()) if has_one else 1


_HAS_VERSION = f"SELECT to_regprocedure('{PARTITIONS}.version()') IS NOT NULL"


def _renew(connection: Connection) -> None:
    connection.execution_options(isolation_level="READ COMMITTED")
    if connection.exec_driver_sql(IS_PARTITIONED).scalar_one() and functions_version(connection) < VERSION:
        _functions(connection, connection.exec_driver_sql(_TABLE).one().owner)
    connection.commit()


def _make_ahead(engine: Engine) -> None:
    """Not `exclusively`, which upkeep waits for. The present has a partition already, so a lock that others hold for long stops nothing."""
    for _ in range(TRIES):
        try:
            with engine.begin() as connection:
                make_ahead(connection)
            return
        except OperationalError as error:
            if sqlstate(error) not in TRY_AGAIN:
                raise
            refused = error
        time.sleep(LOCK_PAUSE)
    log.warning("partition_not_made", error=describe(refused))


def _require_nothing_in_the_way(connection: Connection) -> None:
    if found := objects_in_the_way(connection, OWN_POLICIES):
        raise SettingsError("--partitioned: in partitions the records would lose: " + "; ".join(found))


def _prepare(connection: Connection) -> None:
    """What takes long, and leaves the table plain."""
    if connection.exec_driver_sql(IS_PARTITIONED).scalar_one():
        return
    _require_nothing_in_the_way(connection)
    _committed(connection, _COLUMN)
    outside = connection.execution_options(isolation_level="AUTOCOMMIT")
    try:
        # it waits for all open transactions, so without a time-out
        outside.exec_driver_sql(_NO_INDEX)
        outside.exec_driver_sql(_INDEX)
    finally:
        outside.rollback()  # nothing: each has committed by itself
        connection.execution_options(isolation_level="READ COMMITTED")
    if not connection.exec_driver_sql(_HAS_CHECK.format("placed_before", "idempotency.records")).scalar_one():
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
    _functions(connection, owner)
    connection.exec_driver_sql(_WIDTH.format(width))
    connection.commit()


def _functions(connection: Connection, owner: str) -> None:
    """Make all that partitions need beside themselves, or replace what earlier code has made."""
    connection.exec_driver_sql(FUNCTIONS.replace("%", "%%"))
    for name, trigger in _OWN_TRIGGERS.items():
        if not connection.exec_driver_sql(_HAS_TRIGGER.format(name)).scalar_one():
            connection.exec_driver_sql(trigger)
    _place_otherwise(connection)
    _give(connection, owner)


def _exchange(connection: Connection, width: str) -> None:
    """Put a partitioned table in the place of the plain one, which becomes its first partition."""
    run = connection.exec_driver_sql
    run("LOCK TABLE idempotency.records IN ACCESS EXCLUSIVE MODE")
    _require_nothing_in_the_way(connection)  # what was made meanwhile
    indexes, triggers, views = run(_INDEXES).all(), run(_TRIGGERS).all(), run(_VIEWS).all()
    checks = run(_CHECKS).all()
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
    for check in checks:
        run(f"ALTER TABLE idempotency.records ADD CONSTRAINT {check.name} {check.definition}".replace("%", "%%"))
    for index in indexes:
        run(re.sub(r" ON (ONLY )?\S+ ", " ON idempotency.records ", index.definition, count=1).replace("%", "%%"))
    for trigger in triggers:
        run(_when_nothing_moves(trigger.definition, trigger.events).replace("%", "%%"))
        if trigger.fires in _FIRES:
            run(f"ALTER TABLE idempotency.records {_FIRES[trigger.fires]} TRIGGER {trigger.name}")
    run(f"ALTER TABLE idempotency.records ATTACH PARTITION {first} FOR VALUES FROM (MINVALUE) TO ('{AFTER}')")
    options = f"WITH ({table.options})" if table.options else ""
    run(f"CREATE TABLE {PARTITIONS}.{DEFAULT} PARTITION OF idempotency.records DEFAULT {options}")
    now = run("SELECT clock_timestamp()").scalar_one()
    run(
        f"CREATE TABLE {PARTITIONS}.{name_of(now)} PARTITION OF idempotency.records "
        f"FOR VALUES FROM ('{AFTER}') TO ('{border(now, width).isoformat()}') {options}"
    )
    for grant in grants:
        run(f"GRANT {grant.privilege} ON idempotency.records TO {grant.role}{grant.further}")
        run(f"REVOKE {grant.privilege} ON {first} FROM {grant.role}")
    run(f"ALTER TABLE idempotency.records OWNER TO {table.owner}")
    if table.has_policies:
        protect(connection, "idempotency.records")
    run(
        f"ALTER TABLE idempotency.records {'ENABLE' if table.is_secured else 'DISABLE'} ROW LEVEL SECURITY, "
        f"{'FORCE' if table.is_forced else 'NO FORCE'} ROW LEVEL SECURITY"
    )
    run(f"ALTER TABLE {first} NO FORCE ROW LEVEL SECURITY, DISABLE ROW LEVEL SECURITY")
    for view in views:
        run(f"CREATE OR REPLACE VIEW {view.name} {view.options} AS {view.definition}".replace("%", "%%"))
    run(NO_OLDER_CODE)


def _place_otherwise(connection: Connection) -> None:
    """Let all rows of the default partition be of one time, also where earlier code has made it."""
    run = connection.exec_driver_sql
    if run(_HAS_CHECK.format("placed_otherwise", f"{PARTITIONS}.{DEFAULT}")).scalar_one():
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
