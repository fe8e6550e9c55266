"""Markers: a message sent behind what waits in a queue. When it reaches a worker, what the queue held before has left.

Only in queues that are first in, first out.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Row

EPOCH = datetime.fromtimestamp(0, UTC)

# A time is asked for first and given as a parameter: by a condition with clock_timestamp() no index is searched.
_TIMES = """
SELECT clock_timestamp() - make_interval(secs => %(after)s) AS overdue,
       clock_timestamp() - make_interval(secs => %(grace)s) AS before_grace,
       (SELECT min(sent_at) FROM (
           SELECT max(sent_at) AS sent_at FROM idempotency.markers
           WHERE queue = %(queue)s AND taken_at < clock_timestamp() - make_interval(secs => %(grace)s)
           GROUP BY priority
       ) marked HAVING count(*) = %(classes)s) AS marked
"""

# One at a time as long as they come through; rarer, the longer none has. So a backlog of hours holds few of them.
_MARK = """
INSERT INTO idempotency.markers (id, queue, priority) SELECT %(id)s, %(queue)s, %(priority)s
WHERE EXISTS (SELECT FROM idempotency.outbox
              WHERE queue = %(queue)s AND settled_at IS NULL AND NOT taken AND status = 'published'
                AND published_at >= %(marked)s AND published_at < %(overdue)s)
  AND NOT EXISTS (SELECT FROM idempotency.markers
                  WHERE queue = %(queue)s AND priority = %(priority)s
                    AND sent_at > clock_timestamp() - greatest(make_interval(secs => %(pause)s), (
                        SELECT clock_timestamp() - min(sent_at) FROM idempotency.markers
                        WHERE queue = %(queue)s AND taken_at IS NULL) / 10))
"""

_FORGET_MARKERS = """
DELETE FROM idempotency.markers
WHERE queue = %(queue)s AND (sent_at < %(marked)s OR sent_at < clock_timestamp() - interval '2 days')
"""

_TAKEN = "UPDATE idempotency.markers SET taken_at = clock_timestamp() WHERE id = %(id)s AND taken_at IS NULL"


def times(connection: Connection, queue: str, *, after: float, grace: float, classes: int) -> Row[Any]:
    """Until when a row must have been published to be looked at: overdue, before the grace, marked (of all classes)."""
    fields = {"queue": queue, "after": after, "grace": grace, "classes": classes}
    return connection.exec_driver_sql(_TIMES, fields).one()


def mark(connection: Connection, id: str, queue: str, *, priority: int, pause: float, times: Row[Any]) -> bool:
    """Note a marker, which is to be sent to a queue. False: none is needed now, or one was sent less than `pause` seconds ago."""
    fields = {"id": id, "queue": queue, "priority": priority, "pause": pause}
    marked = times.marked or EPOCH
    return bool(connection.exec_driver_sql(_MARK, fields | {"marked": marked, "overdue": times.overdue}).rowcount)


def forget(connection: Connection, queue: str, marked: datetime) -> None:
    """Forget the markers of a queue from before that time; those of the last one stay."""
    connection.exec_driver_sql(_FORGET_MARKERS, {"queue": queue, "marked": marked})


def take(connection: Connection, marker: str) -> None:
    """Note that a worker was handed this marker: what its queue held before it has left."""
    connection.exec_driver_sql(_TAKEN, {"id": marker})
