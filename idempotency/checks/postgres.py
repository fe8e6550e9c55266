"""Checks of the database: Postgres' own settings, our tables and rights, our connections, its clock."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from ..errors import SettingsError
from ..framework import framework
from ..hosts import is_loopback
from ..settings import Settings
from ..store import rights, schema
from ..store.connections import make_attempts_engine
from ..store.driver import ISO, use_checked_connections
from ..store.home import IDENTITY
from ..store.migrations.partitioning import PARTITIONS
from .clock import check_clock
from .findings import Finding, Level, ok, refusal, warning
from .partitions import check_partitions
from .standbys import check_counts, check_standbys
from .unreachable import TIMEOUT

# gen_random_uuid() without an extension
OLDEST_POSTGRES = 13
RIGHTS_ON = "database rights on"
# PgBouncer's answer to BEGIN in its mode for single statements.
STATEMENT_MODE = "statement pooling mode"

_DATABASE = text("""
SELECT current_setting('server_version_num')::int / 10000 AS version,
       current_setting('fsync') AS fsync,
       current_setting('full_page_writes') AS full_page_writes,
       current_setting('default_transaction_isolation') AS isolation,
       current_setting('transaction_read_only') = 'on' OR pg_is_in_recovery() AS read_only,
       extract(epoch FROM clock_timestamp())::float8 AS now
""")

_UNLOGGED = text("""
SELECT relname AS name, relkind = 'S' AS is_sequence FROM pg_class
WHERE relnamespace IN (to_regnamespace(:schema), to_regnamespace(:partitions)) AND relkind IN ('r', 'S') AND relpersistence <> 'p'
  AND relname <> ALL(:are_so)
ORDER BY relname
""")
# By design: after a crash, whoever still waits asks again.
_ARE_UNLOGGED = ["waiters"]

_OURS = text("""
SELECT current_setting('lock_timeout') AS lock_timeout, current_setting('statement_timeout') AS statement_timeout
""")


def check_database(given: Settings) -> list[Finding]:
    """Check the database's settings, tables and rights, and any pooler. Raises SQLAlchemy's errors if it does not answer."""
    try:
        return _check_database(given)
    except DBAPIError as error:
        if STATEMENT_MODE not in str(error.orig):
            raise
        advice = "for PgBouncer: pool_mode = transaction, or session"
        return [refusal("database pooler", "allows no transactions (statement mode)", advice)]


def identity(given: Settings) -> str:
    """What the database says that it is, by whatever address it is reached. Raises SQLAlchemy's errors."""
    with make_attempts_engine(given, poolclass=NullPool).connect() as connection:
        return str(connection.exec_driver_sql(IDENTITY).scalar_one())


def _check_database(given: Settings) -> list[Finding]:
    # None of our options on this connection: an application's sessions get the server's defaults.
    engine = (given.engine or create_engine)(
        given.database_url.get_secret_value(),
        poolclass=NullPool,
        hide_parameters=True,
        connect_args={"connect_timeout": TIMEOUT},
    )
    use_checked_connections(engine, patience=None, set_local="")  # with what a pooler refuses left out
    with engine.connect() as connection:
        connection.exec_driver_sql(ISO)
        findings = [*_database(connection), *_tables(connection)]
        if any(each.subject == f"{RIGHTS_ON} schema {schema.SCHEMA}" for each in findings):
            return findings  # what follows would be refused
        findings += [*_wall(connection), *_frameworks(connection), *_role(connection), *_path(connection)]
        findings += check_counts(connection)
        if all(each.level is Level.OK for each in findings if each.subject.startswith("database schema")):
            findings += check_partitions(connection, given)
    if any(finding.subject == "database default_transaction_isolation" for finding in findings):
        return findings  # our own connections would be refused
    return [*findings, *_our_connections(given)]


def _database(connection: Connection) -> list[Finding]:
    asked = time.time()
    row = connection.execute(_DATABASE).one()
    findings = [ok("database", f"Postgres {row.version}")]
    if row.version < OLDEST_POSTGRES:
        findings = [refusal("database", f"Postgres {row.version}, need at least {OLDEST_POSTGRES}", "upgrade it")]
    for name in ("fsync", "full_page_writes"):
        if (value := getattr(row, name)) != "on":
            findings.append(refusal(f"database {name}", f"{value}, need on", "a power cut can lose committed data"))
    findings += check_standbys(connection)
    if row.isolation != "read committed":
        advice = "under a higher level, an attempt cannot finish after a duplicate was counted"
        found = f"{row.isolation}, need read committed"
        findings.append(refusal("database default_transaction_isolation", found, advice))
    if row.read_only:
        findings.append(
            refusal("database", "read-only, need the writable primary", "check the address or the failover")
        )
    findings.append(check_clock("database clock", row.now - (asked + time.time()) / 2))
    return findings


def _frameworks(connection: Connection) -> list[Finding]:
    """Whether a web framework has its database elsewhere: what its requests enqueue would not be sent."""
    elsewhere = framework().is_elsewhere(connection.exec_driver_sql(IDENTITY).scalar_one())
    if elsewhere is None:
        return []
    return [refusal("database", f"another one than {elsewhere}", "remove idempotency_database_url, or name that one")]


def _tables(connection: Connection) -> list[Finding]:
    """Whether the tables are of this version, and whether this role may use them."""
    lacking = [
        warning(f"{RIGHTS_ON} {row.name}", f"no {row.missing}", "only operators' commands need it")
        if row.for_people
        else refusal(f"{RIGHTS_ON} {row.name}", f"no {row.missing}", "every delivery would wait for it; grant it")
        for row in rights.missing_rights(connection)
    ]
    if any(schema.VERSION_TABLE in finding.subject or "schema " in finding.subject for finding in lacking):
        return lacking  # the version cannot be read
    try:
        schema.require_compatible(connection)
    except SettingsError as error:
        subject, _, found = str(error).partition(": ")
        found, _, advice = found.partition("; ")
        return [refusal(subject, found, advice), *lacking]
    return [ok("database schema", "compatible with this code"), *lacking, *_unlogged(connection)]


def _unlogged(connection: Connection) -> list[Finding]:
    """Those of our tables and sequences that a crash empties, and that no standby has."""
    names = {"schema": schema.SCHEMA, "partitions": PARTITIONS, "are_so": _ARE_UNLOGGED}
    found = connection.execute(_UNLOGGED, names)
    return [
        refusal(
            f"database {'sequence' if row.is_sequence else 'table'} {row.name}",
            "UNLOGGED",
            f"a crash empties it, and no standby has it: ALTER {'SEQUENCE' if row.is_sequence else 'TABLE'} … SET LOGGED",
        )
        for row in found
    ]


def require_all_tenants(connection: Connection) -> None:
    """Raise `SettingsError` if row-level security shows this role one tenant at a time: a relay works for all."""
    role = rights.row_security(connection)
    if role is not None and not role.passes and not role.of_all:
        raise SettingsError(
            f"idempotency_database_url: {role.name!r} sees one tenant at a time, and a relay works for all; "
            f"log in as {rights.RELAY} or as a member of it"
        )


def _wall(connection: Connection) -> list[Finding]:
    """Whether row-level security keeps tenants apart, and whether it does for this role; nothing if it is not used."""
    subject, role = "database row-level security", rights.row_security(connection)
    if role is None:
        return []
    if role.passes:
        found = f"on, but {role.name!r} is a superuser or has BYPASSRLS"
        return [warning(subject, found, "for it there is no wall between tenants; use a role of `migrate --roles`")]
    return [ok(subject, f"on; {role.name!r} sees {'all tenants' if role.of_all else 'the tenants of a transaction'}")]


def _role(connection: Connection) -> list[Finding]:
    """Whether this role could empty the audit."""
    if (mighty := rights.too_mighty(connection)) is None:
        return []
    driver: Any = connection.connection.driver_connection
    host = driver.pgconn.host.decode()
    if host.startswith("/") or is_loopback(host):
        return [ok("database role", f"{mighty}; the database listens on this machine")]
    advice = f"it can remove what protects the audit; use a role of `{framework().command} migrate --roles`"
    return [warning("database role", mighty, advice)]


def _path(connection: Connection) -> list[Finding]:
    """Whether the application's role could make functions that relays and people run with their own rights."""
    return [
        refusal(
            f"database {each.kind.lower()} {each.name}",
            f"{each.roles} may create in it",
            "its functions would run with the rights of relays and people; "
            f"as the owner: REVOKE CREATE ON {each.kind} {each.name} FROM PUBLIC, {each.roles}",
        )
        for each in rights.plants(connection)
    ]


def _our_connections(given: Settings) -> list[Finding]:
    """Whether our settings take effect on our connections, and whether a pooler is in between."""
    with make_attempts_engine(given, poolclass=NullPool).connect() as connection:
        driver: Any = connection.connection.driver_connection
        shown = connection.execute(_OURS).one()
        findings = [
            warning(f"database {name}", "0 on our connections, although we set it", "a statement may wait forever")
            for name in ("lock_timeout", "statement_timeout")
            if getattr(shown, name) == "0"
        ]
        if not _tcp_user_timeout(driver.pgconn.socket):
            findings.append(
                warning("database TCP_USER_TIMEOUT", "0 on our connections", "a vanished server is noticed late")
            )
        if driver.is_pooled:
            pooler = "in between: our settings go with each transaction, nothing is prepared, and the relay polls"
        else:
            pooler = "none in between"
    return [*findings, ok("database pooler", pooler)]


def _tcp_user_timeout(descriptor: int) -> bool:
    """Whether the kernel gives up a connection whose peer does not acknowledge; true for a Unix socket."""
    with socket.socket(fileno=os.dup(descriptor)) as asked:
        if asked.family == socket.AF_UNIX:
            return True
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        return option is not None and asked.getsockopt(socket.IPPROTO_TCP, option) > 0
