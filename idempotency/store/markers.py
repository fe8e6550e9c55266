"""Markers: when a marker message reaches a worker, everything queued before it has left the queue.

Only for queues that are first in, first out.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Row

EPOCH = datetime.fromtimestamp(0, UTC)

# Times are queried first and then passed as parameters, because clock_timestamp() in a condition prevents an index scan.
_TIMES = """
SELECT clock_timestamp() - make_interval(secs => %(after)s) AS overdue,
       clock_timestamp() - make_interval(secs => %(grace)s) AS before_grace,
       (SELECT min(sent_at) FROM (
           SELECT max(sent_at) AS sent_at FROM idempotency.markers
           WHERE queue = %(queue)s AND taken_at < clock_timestamp() - make_interval(secs => %(grace)s)
           GROUP BY priority
       ) marked HAVING count(*) = %(classes)s) AS marked
"""

# One at a time while they arrive, and less often the longer none has arrived, so that a long backlog has few of them.
_MARK = """
INSERT INTO idempotency.markers (id, queue, priority) SELECT %(id)s, %(queue)s, %(priority)s
WHERE EXISTS (SELECT FROM idempotency.outbox
              WHERE queue = %(queue)s AND settled_at IS NULL AND NOT taken AND status = 'published'
                AND published_at >= %(marked)s AND published_at < %(overdue)s)
  AND NOT EXISTS (SELECT FROM idempotency.markers
                  WHERE queue = %(queue)s AND priority = %(priority)s
                    AND sent_at > clock_timestamp() - greatest(make_interval(secs => %(pause)s), (
                        SELECT clock_timestamp() - min(sent_at) FROM idempotency.markers
                        WHERE queue = %(queue)s AND taken_at IS NULL) / 10::float8))
"""

_FORGET_MARKERS = """
DELETE FROM idempotency.markers
WHERE queue = %(queue)s AND (sent_at < %(marked)s OR sent_at < clock_timestamp() - interval '2 days')
"""

_TAKEN = "UPDATE idempotency.markers SET taken_at = clock_timestamp() WHERE id = %(id)s AND taken_at IS NULL"


def cutoffs(connection: Connection, queue: str, *, after: float, grace: float, classes: int) -> Row[Any]:
    """Times before which a row must have been published to be examined.

    `overdue`: `after` seconds ago; `before_grace`: `grace` seconds ago; `marked`: when the last marker was sent that has
    arrived, of each of `classes` priority classes; None if one is missing.
    """
    fields = {"queue": queue, "after": after, "grace": grace, "classes": classes}
    return connection.exec_driver_sql(_TIMES, fields).one()


def mark(connection: Connection, id: str, queue: str, *, priority: int, pause: float, times: Row[Any]) -> bool:
    """Record a marker that is about to be sent. False: none is needed, or one was sent within `pause` seconds."""
    fields = {"id": id, "queue": queue, "priority": priority, "pause": pause}
    marked = times.marked or EPOCH
    return bool(connection.exec_driver_sql(_MARK, fields | {"marked": marked, "overdue": times.overdue}).rowcount)


def forget(connection: Connection, queue: str, marked: datetime) -> None:
    """Delete a queue's markers sent before that time."""
    connection.exec_driver_sql(_FORGET_MARKERS, {"queue": queue, "marked": marked})


def take(connection: Connection, marker: str) -> None:
    """Record that a worker has received this marker."""
    connection.exec_driver_sql(_TAKEN, {"id": marker})
