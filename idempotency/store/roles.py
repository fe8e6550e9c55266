"""Roles with the least rights, and row-level security: each transaction of the application is about its tenants only.

Who may do what is in `rights.py`. The statements are the same the second time, and then change nothing,
so `idempotency migrate --roles` can run in every deploy, after the migrations: it also covers what those have added.

Roles belong to the whole server, rights and policies to one database. Not promised: a superuser, and a role with BYPASSRLS,
sees every tenant; and code that sets `idempotency.tenant` itself sees the tenants that it sets.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from random import uniform
from typing import Any

from psycopg import sql
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from .migrations.partitioning import PARTITIONS
from .rights import APPLICATION, OF_ALL_TENANTS, OPERATOR, OWNER, READ_ONLY, RELAY, RIGHTS, ROLES, RUNNERS, SEQUENCES
from .schema import LOCK_PAUSE, LOCK_TIMEOUT, SCHEMA, TRY_AGAIN
from .statements import sqlstate

# Functions that run with their owner's rights, because they write rows that have no tenant or another one.
DEFINERS = ("take_places()",)

# Seconds for which other deploys that make the roles are waited for.
PATIENCE = 60.0
# internal_error, "tuple concurrently updated": two transactions grant the same, and no lock covers all databases of a server.
AT_ONCE = "XX000"

_ROLES = "SELECT rolname FROM pg_roles WHERE rolname = ANY(%(roles)s)"

_CREATE_ROLE = """
DO $$ BEGIN CREATE ROLE {role} NOLOGIN; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$
"""

_ME = """
SELECT current_user AS name, r.rolsuper AS is_superuser, current_database() AS database
FROM pg_roles r WHERE r.rolname = current_user
"""

_MEMBER = "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = %(role)s AND pg_has_role(oid, 'USAGE'))"

# What does not belong to the owner yet. Sequences of identity columns follow their tables, and indexes too.
_OBJECTS = """
SELECT 'SCHEMA' AS kind, quote_ident(nspname) AS name FROM pg_namespace
WHERE nspname = %(schema)s AND pg_get_userbyid(nspowner) <> %(owner)s
UNION ALL
SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE' WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END, c.oid::regclass::text FROM pg_class c
WHERE c.relnamespace = to_regnamespace(%(schema)s) AND c.relkind IN ('r', 'p', 'S', 'v')
  AND pg_get_userbyid(c.relowner) <> %(owner)s
  -- a partitioned table depends on the column that it is partitioned by
  AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype = 'i' AND d.refobjid <> c.oid)
UNION ALL
SELECT 'FUNCTION', p.oid::regprocedure::text FROM pg_proc p
WHERE p.pronamespace = to_regnamespace(%(schema)s) AND pg_get_userbyid(p.proowner) <> %(owner)s
"""

_TABLES = """
SELECT relname FROM pg_class
WHERE relnamespace = to_regnamespace(%(schema)s) AND relkind IN ('r', 'p', 'v') ORDER BY relname
"""

# A trigger's function is run by its trigger. With EXECUTE, its caller could make another trigger of it, on a table of any form.
_CALLED = """
SELECT p.oid::regprocedure::text FROM pg_proc p
WHERE p.pronamespace = to_regnamespace(%(schema)s) AND p.prorettype <> 'trigger'::regtype ORDER BY 1
"""

# Whether the view shows its reader the rows that the reader may see; before Postgres 15 it shows those of all tenants.
_BY_READER = """
SELECT coalesce(array_to_string(reloptions, ','), '') LIKE '%%security_invoker%%' FROM pg_class
WHERE oid = 'idempotency.saga_instances'::regclass
"""

_HAS_PARTITIONS = "SELECT to_regnamespace(%(schema)s) IS NOT NULL"

# Those with a tenant. Of a partitioned table, the policies are on the table itself.
_WITH_TENANT = """
SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname) AS name,
       c.relrowsecurity AND c.relforcerowsecurity AS forced,
       ARRAY(SELECT polname::text FROM pg_policy WHERE polrelid = c.oid) AS policies
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'tenant' AND NOT a.attisdropped
WHERE c.relkind IN ('r', 'p') AND (n.nspname = %(schema)s AND %(table)s::text IS NULL OR c.oid = to_regclass(%(table)s))
ORDER BY 1
"""

# Where the application may create, what relays and people run by a name could be its code. Postgres 13 and 14 let everybody
# create in `public`, and so does a database that was restored from them. Only the schema's owner can take that away.
_PUBLIC = """
SELECT quote_ident(pg_get_userbyid(d.datdba)) AS database_owner FROM pg_namespace n, pg_database d
WHERE n.nspname = 'public' AND has_schema_privilege(%(role)s, n.oid, 'CREATE') AND pg_has_role(n.nspowner, 'USAGE')
  AND d.datname = current_database()
"""

# In a subquery, the function runs once for a statement and not for each row.
_POLICIES = {
    "of_tenant": "FOR ALL TO PUBLIC USING (tenant = ANY ((SELECT idempotency.tenants())::text[]))",
    "all_tenants": f"FOR ALL TO {', '.join(OF_ALL_TENANTS)} USING (true) WITH CHECK (true)",
    "all_tenants_read": f"FOR SELECT TO {READ_ONLY} USING (true)",
}
# The application takes back a claim in which nothing was recorded (`ends.forget`). What has ended only relays delete.
_OF_RECORDS = {
    "taken_back": f"""AS RESTRICTIVE FOR DELETE TO {APPLICATION}
    USING (status = 'started' AND effects = '{{}}' AND message = '')""",
}
# All of these.
OWN_POLICIES = (*_POLICIES, *_OF_RECORDS)


def create(engine: Engine, passwords: Mapping[str, str]) -> list[str]:
    """Make the roles, their rights and the policies, in one transaction. Returns the statements that were run.

    Several deploys may do so at once, also for several databases of a server: what fails by that is tried again.

    `passwords`: by role; those roles may log in with it. It leaves this process as a SCRAM verifier only, and the statements
    returned hold neither. Needs CREATEROLE, and the database's owner or a superuser. Raises SQLAlchemy's errors.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return _create(engine, passwords)
        except DBAPIError as error:
            if sqlstate(error) not in (*TRY_AGAIN, AT_ONCE) or time.monotonic() > deadline:
                raise
        time.sleep(uniform(0.0, LOCK_PAUSE))


def _create(engine: Engine, passwords: Mapping[str, str]) -> list[str]:
    with engine.begin() as connection:
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{int(LOCK_TIMEOUT * 1000)}'")
        connection.exec_driver_sql("SET LOCAL search_path = pg_catalog, pg_temp")
        done = []
        for part in (_roles, _ownership, _rights, _public, _policies):
            for statement in part(connection):
                connection.exec_driver_sql(statement)
                done.append(statement)
        for role, password in passwords.items():
            connection.exec_driver_sql(_with_password(connection, role, password))
            done.append(f"ALTER ROLE {role} LOGIN PASSWORD …")
    return done


def protect(connection: Connection, table: str) -> None:
    """Put a table of the application behind the same policies. It needs a column `tenant`; the caller has to own it.

    Changes nothing the second time. Raises `ValueError` if there is no such table, or it has no tenant.
    """
    statements = list(_walls(connection, table))
    if not statements and not connection.exec_driver_sql(_WITH_TENANT, {"schema": SCHEMA, "table": table}).all():
        raise ValueError(f"table {table!r}: there is none with this name and a column tenant")
    for statement in statements:
        connection.exec_driver_sql(statement)


def _roles(connection: Connection) -> list[str]:
    found = set(connection.exec_driver_sql(_ROLES, {"roles": list(ROLES)}).scalars())
    return [_CREATE_ROLE.format(role=role).strip() for role in ROLES if role not in found]


def _ownership(connection: Connection) -> list[str]:
    me = connection.exec_driver_sql(_ME).one()
    statements = []
    if not me.is_superuser and not connection.exec_driver_sql(_MEMBER, {"role": OWNER}).scalar_one():
        statements.append(f"GRANT {OWNER} TO CURRENT_USER")  # only a member of the owner may give objects to it
    objects = [
        each
        for schema in (SCHEMA, PARTITIONS)
        for each in connection.exec_driver_sql(_OBJECTS, {"schema": schema, "owner": OWNER}).all()
    ]
    if objects:
        statements.append(f"GRANT CREATE ON DATABASE {_quoted(connection, me.database)} TO {OWNER}")
    # the schema first: an owner of its tables has to be able to create in it
    statements += [f"ALTER {each.kind} {each.name} OWNER TO {OWNER}" for each in objects]
    return statements


def _rights(connection: Connection) -> list[str]:
    tables = connection.exec_driver_sql(_TABLES, {"schema": SCHEMA}).scalars().all()
    everybody = f"PUBLIC, {', '.join(RIGHTS)}"
    called = connection.exec_driver_sql(_CALLED, {"schema": SCHEMA}).scalars().all()
    statements = [
        f"REVOKE ALL ON SCHEMA {SCHEMA} FROM {everybody}",
        *(
            f"REVOKE ALL ON ALL {kind} IN SCHEMA {SCHEMA} FROM {everybody}"
            for kind in ("TABLES", "SEQUENCES", "FUNCTIONS")
        ),
        *(f"ALTER FUNCTION {SCHEMA}.{each} SECURITY DEFINER" for each in DEFINERS),
        f"GRANT EXECUTE ON FUNCTION {', '.join(called)} TO {', '.join(RUNNERS)}",
    ]
    for role, rights in RIGHTS.items():
        statements.append(f"GRANT USAGE ON SCHEMA {SCHEMA} TO {role}")
        granted = {table: rights.get(table, rights.get("*", "")) for table in tables}
        statements += [f"GRANT {what} ON {SCHEMA}.{table} TO {role}" for table, what in granted.items() if what]
        statements += [f"GRANT USAGE ON SEQUENCE {SCHEMA}.{name} TO {role}" for name in SEQUENCES[role]]
    if connection.exec_driver_sql(_HAS_PARTITIONS, {"schema": PARTITIONS}).scalar_one():
        statements += [f"REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {PARTITIONS} FROM {everybody}"]
        statements += [each for role in (RELAY, OPERATOR) for each in of_partitions(role)]
    if connection.exec_driver_sql(_BY_READER).scalar_one():
        statements.append(f"GRANT SELECT ON {SCHEMA}.saga_instances TO {APPLICATION}")
    return statements


def of_partitions(role: str) -> tuple[str, ...]:
    """The statements that let a role make and drop partitions, by the functions for that, and touch them by nothing else."""
    return (
        f"GRANT USAGE ON SCHEMA {PARTITIONS} TO {role}",
        f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {PARTITIONS} TO {role}",
    )


def _public(connection: Connection) -> list[str]:
    found = connection.exec_driver_sql(_PUBLIC, {"role": APPLICATION}).one_or_none()
    if found is None:
        return []
    # as Postgres 15 has it: who may create is the database's owner, for its own migrations
    return [
        f"GRANT CREATE ON SCHEMA public TO {found.database_owner}",
        f"REVOKE CREATE ON SCHEMA public FROM PUBLIC, {APPLICATION}",
    ]


def _policies(connection: Connection) -> list[str]:
    return _walls(connection, None)


def _walls(connection: Connection, table: str | None) -> list[str]:
    """The statements that put the library's tables with a tenant, or this one, behind the policies."""
    statements = []
    for found in connection.exec_driver_sql(_WITH_TENANT, {"schema": SCHEMA, "table": table}):
        wanted = _POLICIES | (_OF_RECORDS if found.name == f"{SCHEMA}.records" else {})
        missing = {name: policy for name, policy in wanted.items() if name not in found.policies}
        statements += [f"CREATE POLICY {name} ON {found.name} {policy}" for name, policy in missing.items()]
        if not found.forced:
            statements.append(f"ALTER TABLE {found.name} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
    return statements


def _with_password(connection: Connection, role: str, password: str) -> str:
    driver: Any = connection.connection.driver_connection
    verifier = driver.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
    return sql.SQL("ALTER ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(role), verifier).as_string(driver)


def _quoted(connection: Connection, name: str) -> str:
    driver: Any = connection.connection.driver_connection
    return sql.Identifier(name).as_string(driver)
