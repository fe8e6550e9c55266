"""Renaming an application: what is stored under its old name gets the new one, in short transactions.

Records come before rows: a row that is published under the new name must not find the record of another application.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

from ..wire.keys import HTTP_TASK
from .outbox import external_task, refresh_lanes

# Rows that one statement reads, in the order of the primary key; of those it changes the ones with the old name.
PAGE = 5000
# How long to wait for a locked row; the command can be repeated.
_PATIENCE = "SET LOCAL lock_timeout = '5s'"

# For each table: its primary key with the types, and its column. In this order; the events of sagas before those that look for
# them under the new name, and lanes after their rows, by which a relay of the new name would call them by the old one again.
TABLES = {
    "saga_events": ({"id": "bigint"}, "service"),
    "records": ({"tenant": "text", "task": "text", "key": "text"}, "service"),
    "dead_letters": ({"id": "bigint"}, "consumer_service"),
    "webhook_endpoints": ({"id": "text"}, "service"),
    "webhook_deliveries": ({"id": "text"}, "service"),
    "outbox": ({"id": "bigint"}, "service"),
    "lanes": ({"task": "text", "ordering_key": "text"}, "service"),
    "sagas": ({"id": "uuid"}, "service"),
    # where streams are: they go on from there under the new name, under which the keys of what they have handled are known
    "stream_positions": ({"id": "bigint"}, "service"),
    # those that are silent: under the new name, `forget` finds them
    "processes": ({"kind": "text", "name": "text", "host": "text", "pid": "int"}, "service"),
}

# The first page has no `after`.
_RENAME = """
WITH page AS MATERIALIZED (
    SELECT {keys}, {column} AS service FROM idempotency.{table} WHERE {after} ORDER BY {keys} LIMIT %(page)s
), renamed AS (
    UPDATE idempotency.{table} r SET {column} = %(new)s
    FROM page WHERE page.service = %(old)s AND ({its_keys}) = ({page_keys}) AND r.{column} = %(old)s
    RETURNING 1
)
SELECT {keys}, (SELECT count(*) FROM renamed) AS renamed FROM page ORDER BY {descending} LIMIT 1
"""

# Events for consumers outside are ordered under their application's name. Earlier ones keep their places, which are earlier
# than those of what is published under the new one.
_REORDER = """
UPDATE idempotency.outbox SET task = %(new)s
WHERE id > %(after)s AND id <= %(last)s AND task = %(old)s AND service = %(service)s
  AND status <> 'published' AND ordering_key IS NOT NULL AND place IS NOT NULL
RETURNING ordering_key
"""

# By its digest, a stream finds the letter of a message that it has refused. Where the same message has one under the new name,
# both stay as they are.
_RENAME_DIGESTS = """
UPDATE idempotency.dead_letters d SET digest = %(new)s || substr(d.digest, length(%(old)s) + 1)
WHERE d.id > %(after)s AND d.id <= %(last)s AND starts_with(d.digest, %(old)s || '/') AND starts_with(d.queue, 'stream.')
  AND NOT EXISTS (SELECT FROM idempotency.dead_letters o
                  WHERE o.digest = %(new)s || substr(d.digest, length(%(old)s) + 1) AND starts_with(o.queue, 'stream.'))
"""

# Where a process has handled a partition under the new name already: the earlier of the two positions. Between them, messages
# that were handled under one of the names are known by their keys. Of another source, the old one means nothing any more. The
# fence moves, so a process that has it reads again from there.
_MERGE_POSITIONS = """
UPDATE idempotency.stream_positions n
SET position = CASE WHEN n.source <> o.source THEN n.position ELSE least(n.position, o.position) END, fence = pg_catalog.nextval('idempotency.fence'), owner = NULL, locked_until = NULL,
    stopped = NULL
FROM idempotency.stream_positions o
WHERE o.service = %(old)s AND n.service = %(new)s AND (n.consumer, n.topic, n.partition) = (o.consumer, o.topic, o.partition)
RETURNING o.id
"""
_FORGET_MERGED = "DELETE FROM idempotency.stream_positions WHERE id = ANY(%(ids)s)"

# An alarm that is on under both names goes on under the new one.
_RENAME_ALARMS = """
WITH ended AS (DELETE FROM idempotency.alarms WHERE service = %(old)s RETURNING name, since, logged_at, sent_at)
INSERT INTO idempotency.alarms (service, name, since, logged_at, sent_at)
SELECT %(new)s, name, since, logged_at, sent_at FROM ended ON CONFLICT DO NOTHING
"""

_TASKS = """
SELECT task FROM idempotency.records WHERE service = %(service)s
UNION SELECT task FROM idempotency.outbox WHERE service = %(service)s
UNION SELECT task FROM idempotency.sagas WHERE service = %(service)s
UNION SELECT coalesce(task, header_task, '') FROM idempotency.dead_letters WHERE consumer_service = %(service)s
"""

# Events that have signalled while the saga which waits for them had the other name; a sweep signals again.
_SIGNAL_AGAIN = """
UPDATE idempotency.saga_events e SET signalled = false
FROM idempotency.saga_steps s JOIN idempotency.sagas g ON g.id = s.saga_id
WHERE g.service = %(service)s AND e.service = %(service)s AND g.status = 'RUNNING' AND s.kind = 'wait' AND s.state = 'begun'
  AND (e.tenant, e.event_type, e.match) = (s.tenant, s.event_type, s.match)
  AND (e.saga_id IS NULL OR e.saga_id = s.saga_id) AND e.signalled
"""

_ALIVE = """
SELECT kind, name FROM idempotency.processes
WHERE service = %(service)s AND seen_at > clock_timestamp() - make_interval(secs => %(silence)s) ORDER BY kind, name
"""

_ANSWERED = f"""
SELECT EXISTS (SELECT FROM idempotency.records WHERE service = %(service)s AND task = '{HTTP_TASK}'
               AND updated_at > clock_timestamp() - make_interval(secs => %(silence)s))
"""


def tasks_of(connection: Connection, service: str) -> Sequence[str]:
    """The tasks of all that is stored for `service`; of a letter without one, what is empty."""
    return connection.exec_driver_sql(_TASKS, {"service": service}).scalars().all()


def alive(connection: Connection, service: str, *, silence: float) -> Sequence[Row[Any]]:
    """The processes of `service` that were seen within the last `silence` seconds."""
    return connection.exec_driver_sql(_ALIVE, {"service": service, "silence": silence}).all()


def has_answered(connection: Connection, service: str, *, silence: float) -> bool:
    """Whether `service` has carried out a keyed request over HTTP within the last `silence` seconds."""
    answered: bool = connection.exec_driver_sql(_ANSWERED, {"service": service, "silence": silence}).scalar_one()
    return answered


def signal_again(connection: Connection, service: str) -> None:
    """Let the sagas of `service` be woken that wait for an event which is there, after a rename."""
    connection.exec_driver_sql(_SIGNAL_AGAIN, {"service": service})


def rename_alarms(connection: Connection, old: str, new: str) -> None:
    """Let the alarms of `old` go on under the new name, or end."""
    connection.exec_driver_sql(_RENAME_ALARMS, {"old": old, "new": new})


def rename(
    connection: Connection, table: str, old: str, new: str, *, after: Sequence[Any] | None
) -> tuple[int, Sequence[Any] | None]:
    """Rename the rows of `old` in one page of one of `TABLES`. `after`: the last key before that page.

    Runs in the caller's transaction. Returns how many rows, and the last key of the page; None behind the last one.
    """
    keys, column = TABLES[table]
    names = list(keys)
    places = ", ".join(f"%(after_{name})s::{kind}" for name, kind in keys.items())
    statement = _RENAME.format(
        table=table,
        column=column,
        keys=", ".join(names),
        its_keys=", ".join(f"r.{name}" for name in names),
        page_keys=", ".join(f"page.{name}" for name in names),
        descending=", ".join(f"{name} DESC" for name in names),
        after="true" if after is None else f"({', '.join(names)}) > ({places})",
    )
    fields = {f"after_{name}": value for name, value in zip(names, after or (), strict=False)}
    connection.exec_driver_sql(_PATIENCE)
    merged: Sequence[int] = ()
    if table == "stream_positions":
        merged = connection.exec_driver_sql(_MERGE_POSITIONS, {"old": old, "new": new}).scalars().all()
        connection.exec_driver_sql(_FORGET_MERGED, {"ids": list(merged)})
    last = connection.exec_driver_sql(statement, fields | {"old": old, "new": new, "page": PAGE}).one_or_none()
    if last is None:
        return 0, None
    if table == "outbox":
        _reorder(connection, old, new, after=0 if after is None else after[0], last=last.id)
    if table == "dead_letters":
        page = {"old": old, "new": new, "after": 0 if after is None else after[0], "last": last.id}
        connection.exec_driver_sql(_RENAME_DIGESTS, page)
    return last.renamed + len(merged), [getattr(last, name) for name in names]


def _reorder(connection: Connection, old: str, new: str, *, after: int, last: int) -> None:
    """Bring the events for consumers outside of one page into the lanes of the new name."""
    tasks = (external_task(old), external_task(new))
    fields = {"old": tasks[0], "new": tasks[1], "service": new, "after": after, "last": last}
    keys = connection.exec_driver_sql(_REORDER, fields).scalars().all()
    refresh_lanes(connection, [(task, key) for key in keys for task in tasks])
