"""Rows of the outbox without a service's name, which code of schema 0011 still writes: an application that knows their task adopts them."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from . import sweeps
from .outbox import EXTERNAL
from .sweeps import Sweep

# Rows per pass, for short transactions.
BATCH = 1000

# The condition is that of the index outbox_unnamed, which is empty but for rows that older code has written.
ADOPT = Sweep(
    "adopt",
    table="outbox",
    columns="r.id",
    due="""r.service IS NULL AND (r.status = 'pending' OR r.settled_at IS NULL) AND r.task = ANY(%(tasks)s)
      AND (r.queue = '' OR r.queue = ANY(%(queues)s))""",
    order="r.task",
    one="r.id = %(id)s",
    id="r.id::text",
    then="""
, adopted AS (
    UPDATE idempotency.outbox o SET service = %(service)s FROM due WHERE o.id = due.id
    RETURNING o.task, o.ordering_key
), unnamed_lanes AS MATERIALIZED (
    -- in the order in which all lanes are locked
    SELECT l.task, l.ordering_key FROM idempotency.lanes l
    WHERE l.service IS NULL AND (l.task, l.ordering_key) IN (SELECT task, ordering_key FROM adopted)
    ORDER BY l.task COLLATE "C", l.ordering_key COLLATE "C" FOR UPDATE
), named AS (
    UPDATE idempotency.lanes l SET service = %(service)s
    FROM unnamed_lanes u WHERE (l.task, l.ordering_key) = (u.task, u.ordering_key)
)
SELECT (SELECT count(*) FROM adopted)""",
)


def adopt(connection: Connection, service: str, tasks: Iterable[str], queues: Iterable[str]) -> int:
    """Give rows without a name to `service`, if it has their task and their queue. Returns how many.

    Every application has the task of events for external consumers, and a row may have no queue. A row that Postgres
    refuses to change is set aside, and stops no other.
    """
    fields = {"service": service, "tasks": [*tasks, EXTERNAL], "queues": list(queues), "batch": BATCH}
    try:
        adopted: int = connection.exec_driver_sql(ADOPT.batch, fields).one()[0]
        return adopted
    except DBAPIError as error:
        if not sweeps.is_row_error(error):
            raise
    found = connection.exec_driver_sql(ADOPT.find, fields).all()
    adopted, _ = sweeps.one_by_one(
        connection,
        ADOPT.name,
        found,
        lambda row: int(connection.exec_driver_sql(ADOPT.single, fields | sweeps.names(row)).scalar_one()),
    )
    return adopted
