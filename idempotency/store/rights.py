"""Who may do what with our tables: the roles of `migrate --roles`, and what a role lacks for its work.

Without those roles, one role does everything: it needs every right that any of them has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from .schema import SCHEMA

OWNER = "idempotency_owner"
APPLICATION = "idempotency_application"
RELAY = "idempotency_relay"
OPERATOR = "idempotency_operator"
READ_ONLY = "idempotency_read_only"
ROLES = (OWNER, APPLICATION, RELAY, OPERATOR, READ_ONLY)
# These see the rows of all tenants, as READ_ONLY does. Every other role sees only those of the tenants that are set.
OF_ALL_TENANTS = (OWNER, RELAY, OPERATOR)

ALL = "SELECT, INSERT, UPDATE, DELETE"
WRITE = "SELECT, INSERT, UPDATE"
# What each role may do with each table; "*" is every other table.
RIGHTS: Mapping[str, Mapping[str, str]] = {
    # Web servers and workers: operations and their messages. A policy limits which records they delete.
    APPLICATION: {
        "records": ALL,
        "outbox": ALL,
        "dead_letters": WRITE,
        "former_fingerprints": "SELECT",
        "waiters": ALL,
        "sagas": WRITE,
        "saga_steps": WRITE,
        "saga_events": WRITE,
        "processes": ALL,
        "webhook_endpoints": "SELECT, UPDATE",
        "webhook_secrets": "SELECT",
        "webhook_deliveries": WRITE,
        "webhook_attempts": WRITE,
        "stream_positions": WRITE,
        "stream_members": ALL,
        "markers": "SELECT, UPDATE",
        "relay_sleep": "SELECT",
        "compatibility": "SELECT",
        "schema_version": "SELECT",
    },
    # Relays, beats, and the workers of their tasks: also what is searched across all tenants.
    RELAY: {
        "*": ALL,
        "audit": "",
        "audit_chain": "",
        "audit_head": "",
        "operators": "",
        "api_keys": "",
        "webhook_secrets": "",
        "compatibility": "SELECT",
        "schema_version": "SELECT",
        "saga_instances": "SELECT",
    },
    # People's commands.
    OPERATOR: {
        "*": ALL,
        "audit": "SELECT, INSERT",
        "audit_chain": "SELECT",
        "audit_head": "SELECT",
        # who approves makes no identity
        "operators": "SELECT, DELETE",
        "compatibility": "SELECT",
        "schema_version": "SELECT",
        "saga_instances": "SELECT",
    },
    # Dashboards: no hashes of tokens and keys, no secrets.
    READ_ONLY: {"*": "SELECT", "operators": "", "api_keys": "", "webhook_secrets": ""},
}
SEQUENCES = {APPLICATION: ("fence",), RELAY: ("fence", "place"), OPERATOR: ("fence", "place"), READ_ONLY: ()}
# These may run functions. PUBLIC may not: a role that has USAGE on the schema for another reason could run them.
RUNNERS = (APPLICATION, RELAY, OPERATOR)
# Of a role that does everything, as without the roles above. The audit table is append-only, and chained by a trigger.
ONE_FOR_ALL = {
    "*": ALL,
    "audit": "SELECT, INSERT",
    "audit_chain": "SELECT",
    "audit_head": "SELECT",
    "operators": "SELECT, DELETE",
    "schema_version": "SELECT",
    "saga_instances": "SELECT",
}
# Used only by operators' commands; a worker's role does not need rights to these.
FOR_PEOPLE = ("audit", "audit_chain", "audit_head", "operators", "discards", "api_keys")

# Which of the roles above this one is a member of, if they are used in this database: then there is row-level security.
_MINE = text("""
SELECT r.rolname FROM pg_roles r
WHERE r.rolname = ANY(:roles) AND pg_has_role(r.oid, 'USAGE')
  AND EXISTS (SELECT FROM pg_class c WHERE c.relnamespace = to_regnamespace(:schema) AND c.relforcerowsecurity)
""")

# What the policies of `roles.py` mean for this role; no row where there is no row-level security.
_WALL = text("""
SELECT r.rolname AS name, r.rolsuper OR r.rolbypassrls AS passes, EXISTS (
    SELECT FROM pg_policy p, pg_catalog.unnest(p.polroles) role
    WHERE p.polrelid = c.oid AND p.polname = 'all_tenants' AND pg_has_role(role, 'USAGE')) AS of_all
FROM pg_class c, pg_roles r
WHERE c.relnamespace = to_regnamespace(:schema) AND c.relname = 'records' AND c.relrowsecurity
  AND r.rolname = current_user
""")

# Whether this login could take away what protects the audit and what has ended.
_MIGHT = text("""
SELECT r.rolname AS name, r.rolsuper AS is_superuser, c.relowner = r.oid OR pg_has_role(c.relowner, 'USAGE') AS owns
FROM pg_roles r, pg_class c WHERE r.rolname = current_user AND c.oid = to_regclass(:table)
""")

# Where those who have the application's rights, and not those of a role of all tenants, may create what such a role would run by
# its name: in schemas of its path (of this role's, if it is one), and in the database: a schema named like a role is first in its
# path.
_PLANTS = text("""
WITH weak AS (
    SELECT r.oid, r.rolname AS name FROM pg_roles a, pg_roles r
    WHERE a.rolname = :application AND pg_has_role(r.oid, a.oid, 'USAGE') AND NOT r.rolsuper
      AND NOT EXISTS (SELECT FROM pg_roles m WHERE m.rolname = ANY(:of_all) AND pg_has_role(r.oid, m.oid, 'USAGE'))
), place AS (
    SELECT n.oid, 'SCHEMA' AS kind, n.nspname AS name FROM pg_namespace n
    WHERE n.nspname = ANY(CASE WHEN EXISTS (
        SELECT FROM pg_roles m WHERE m.rolname = ANY(:of_all) AND pg_has_role(m.oid, 'USAGE'))
        THEN current_schemas(false) ELSE '{public}' END)
    UNION ALL
    SELECT d.oid, 'DATABASE', d.datname FROM pg_database d WHERE d.datname = current_database()
)
SELECT p.kind, quote_ident(p.name) AS name, string_agg(quote_ident(w.name), ', ' ORDER BY w.name) AS roles
FROM place p, weak w
WHERE CASE p.kind WHEN 'SCHEMA' THEN has_schema_privilege(w.oid, p.oid, 'CREATE')
                  ELSE has_database_privilege(w.oid, p.oid, 'CREATE') END
  AND EXISTS (SELECT FROM pg_class c WHERE c.relnamespace = to_regnamespace(:schema) AND c.relforcerowsecurity)
GROUP BY p.kind, p.name ORDER BY p.kind, p.name
""")

# Identity sequences need no rights.
_RIGHTS = text("""
WITH needed(oid, name, privilege) AS (
    SELECT c.oid, 'table ' || c.relname, pg_catalog.unnest(string_to_array(coalesce(own.rights, others.rights), ', '))
    FROM pg_class c
    JOIN unnest(cast(:tables AS text[]), cast(:rights AS text[])) others(name, rights) ON others.name = '*'
    LEFT JOIN unnest(cast(:tables AS text[]), cast(:rights AS text[])) own(name, rights) ON own.name = c.relname
    WHERE c.relnamespace = to_regnamespace(:schema) AND c.relkind IN ('r', 'p', 'v')
    UNION ALL
    SELECT c.oid, 'sequence ' || c.relname, 'USAGE'
    FROM pg_class c WHERE c.relnamespace = to_regnamespace(:schema) AND c.relkind = 'S'
      AND (cast(:sequences AS text[]) IS NULL OR c.relname = ANY(:sequences))
      AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype = 'i')
    UNION ALL
    SELECT p.oid, 'function ' || p.proname, 'EXECUTE'
    FROM pg_proc p WHERE p.pronamespace = to_regnamespace(:schema) AND p.prorettype <> 'trigger'::regtype
      -- `IS_CONFIRMED`
      OR p.pronamespace = 'pg_catalog'::regnamespace AND p.proname = 'pg_logical_emit_message'
      AND p.proargtypes[2] = 'text'::regtype
    UNION ALL
    SELECT n.oid, 'schema ' || n.nspname, 'USAGE' FROM pg_namespace n WHERE n.nspname = :schema
)
SELECT name, string_agg(privilege, ', ') AS missing, split_part(name, ' ', 2) = ANY (:for_people) AS for_people
FROM needed
WHERE NOT CASE split_part(name, ' ', 1)
    WHEN 'table' THEN has_table_privilege(oid, privilege)
    WHEN 'sequence' THEN has_sequence_privilege(oid, privilege)
    WHEN 'function' THEN has_function_privilege(oid, privilege)
    ELSE has_schema_privilege(oid, privilege) END
GROUP BY name ORDER BY name
""")


def missing_rights(connection: Connection) -> Sequence[Row[Any]]:
    """The rights that this role lacks for its work on our schema, tables, sequences and functions.

    `for_people`: only operators' commands need them.
    """
    mine = set(connection.execute(_MINE, {"roles": list(RUNNERS), "schema": SCHEMA}).scalars())
    wanted = [RIGHTS[role] for role in RUNNERS if role in mine] or [ONE_FOR_ALL]
    by_table = _together(wanted)
    names = {
        "schema": SCHEMA,
        "tables": list(by_table),
        "rights": list(by_table.values()),
        "sequences": sorted({name for role in mine for name in SEQUENCES[role]}) if mine else None,
        "for_people": list(FOR_PEOPLE),
    }
    return connection.execute(_RIGHTS, names).all()


def row_security(connection: Connection) -> Row[Any] | None:
    """What row-level security means for this role: `name`, whether it `passes` the wall, and sees `of_all` tenants.

    None where it is not used.
    """
    return connection.execute(_WALL, {"schema": SCHEMA}).one_or_none()


def too_mighty(connection: Connection) -> str | None:
    """What lets this role remove the protection of the audit; None: nothing does, or there are no tables."""
    role = connection.execute(_MIGHT, {"table": f"{SCHEMA}.audit"}).one_or_none()
    if role is None or not (role.is_superuser or role.owns):
        return None
    return f"{role.name!r} {'is a superuser' if role.is_superuser else 'owns the tables'}"


def plants(connection: Connection) -> Sequence[Row[Any]]:
    """The places where the application's role could make what relays and people run: `kind`, `name`, and the `roles` that may.

    Nothing where the roles are not used.
    """
    names = {"application": APPLICATION, "of_all": list(OF_ALL_TENANTS), "schema": SCHEMA}
    return connection.execute(_PLANTS, names).all()


def _together(wanted: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The rights of several roles, by table."""
    tables = {"*", *(table for rights in wanted for table in rights)}
    each = {table: {rights.get(table, rights.get("*", "")) for rights in wanted} for table in tables}
    return {table: ", ".join(sorted({*", ".join(rights).split(", ")} - {""})) for table, rights in each.items()}
