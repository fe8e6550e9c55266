"""The table of processes: one row per worker, relay and beat that has signed and has not shut down cleanly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row

# `command` and `directory` are columns since 0020, which code may be older than: it is asked for them.
_KEEPS_COMMANDS = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_attribute
               WHERE attrelid = 'idempotency.processes'::regclass AND attname = 'command' AND NOT attisdropped)
"""

# Except for the process's own row: one statement must not delete and update the same row.
_SIGN = """
WITH forgotten AS (
    DELETE FROM idempotency.processes WHERE (kind, name, host, pid) IN (
        SELECT kind, name, host, pid FROM idempotency.processes
        WHERE seen_at < clock_timestamp() - make_interval(secs => %(retention)s) AND service = %(service)s
          AND (kind, name, host, pid) <> (%(kind)s, %(name)s, %(host)s, %(pid)s)
        FOR UPDATE SKIP LOCKED)
)
INSERT INTO idempotency.processes AS p (kind, name, host, pid, service, version, queues, started_at, seen_at{columns})
VALUES (%(kind)s, %(name)s, %(host)s, %(pid)s, %(service)s, %(version)s, %(queues)s,
        clock_timestamp() - make_interval(secs => %(age)s), clock_timestamp(){values})
ON CONFLICT (kind, name, host, pid) DO UPDATE
SET seen_at = clock_timestamp(), queues = excluded.queues, service = excluded.service
"""
_SIGN_WITH_COMMAND = _SIGN.format(columns=", command, directory", values=", %(command)s, %(directory)s")
_SIGN_WITHOUT = _SIGN.format(columns="", values="")

_SUCCEED = """
DELETE FROM idempotency.processes
WHERE kind = %(kind)s AND name = %(name)s AND host = %(host)s AND pid <> %(pid)s AND service = %(service)s
"""

_REMOVE = """
DELETE FROM idempotency.processes
WHERE kind = %(kind)s AND name = %(name)s AND host = %(host)s AND pid = %(pid)s
"""

# How a process was started, and where, on any schema: None before 0020.
STARTED = "pg_catalog.to_jsonb(p) -> 'command' AS command, pg_catalog.to_jsonb(p) ->> 'directory' AS directory"

# As many rows as processes; the limit is for a set-up that starts one process per task.
_ALL = f"""
SELECT kind, name, host, pid, service, version, queues, started_at, seen_at,
       extract(epoch FROM clock_timestamp() - seen_at)::float8 AS silent_seconds, {STARTED}
FROM idempotency.processes p ORDER BY kind, name, host, pid LIMIT 1000
"""

_FORGET = """
DELETE FROM idempotency.processes
WHERE name = %(name)s AND service = %(service)s AND seen_at < clock_timestamp() - make_interval(secs => %(silence)s)
RETURNING kind, host, pid
"""


def sign(connection: Connection, process: Mapping[str, Any]) -> None:
    """Record that a process is alive, and how it was started; delete those last seen more than its `retention` seconds ago."""
    keeps = connection.exec_driver_sql(_KEEPS_COMMANDS).scalar_one()
    connection.exec_driver_sql(_SIGN_WITH_COMMAND if keeps else _SIGN_WITHOUT, process)


def succeed(connection: Connection, process: Mapping[str, Any]) -> None:
    """Delete earlier processes with the same kind, name and host, which this one replaces."""
    connection.exec_driver_sql(_SUCCEED, process)


def remove(connection: Connection, process: Mapping[str, Any]) -> None:
    """Delete the row of a process that shuts down cleanly."""
    connection.exec_driver_sql(_REMOVE, process)


def processes(connection: Connection) -> Sequence[Row[Any]]:
    """The processes of all applications that have not shut down cleanly, with the seconds since their last sign of life."""
    return connection.exec_driver_sql(_ALL).all()


def forget(connection: Connection, service: str, name: str, silence: float) -> Sequence[Row[Any]]:
    """Delete and return the processes of `service` with this name that have been silent for more than `silence` seconds."""
    return connection.exec_driver_sql(_FORGET, {"service": service, "name": name, "silence": silence}).all()
