"""Waking the sagas whose events could not signal when they were published.

One by one, each in its own transaction, so that one that cannot be woken keeps no other asleep.
"""

from __future__ import annotations

from sqlalchemy import Connection, Row

from . import sweeps
from .sweeps import NOT_ASIDE

SWEEP = "signal"
# Events per pass, about as many as one statement should mark.
BATCH = 10_000

# The events by who waits for them; those that nobody waits for come with the saga NULL.
_ASLEEP = f"""
SELECT g.id::text AS row_id, g.tenant, g.task, g.key, array_agg(e.id) AS events,
       {NOT_ASIDE.format(name=SWEEP, id="g.id::text")} AS is_due
FROM (SELECT * FROM idempotency.saga_events WHERE NOT signalled ORDER BY id LIMIT {BATCH}) e
LEFT JOIN (
    idempotency.saga_steps s JOIN idempotency.sagas g ON g.id = s.saga_id
) ON (s.tenant, g.service, s.event_type, s.match) = (e.tenant, e.service, e.event_type, e.match)
    AND s.kind = 'wait' AND s.state = 'begun' AND (e.saga_id IS NULL OR e.saga_id = s.saga_id)
GROUP BY g.id, g.tenant, g.task, g.key ORDER BY g.id
"""

# One that is locked is left to the next pass.
_WAKE = """
SELECT idempotency.signal_saga(g.id)
FROM (SELECT id FROM idempotency.sagas WHERE id = %(saga)s::uuid FOR NO KEY UPDATE SKIP LOCKED) g
"""

_SIGNALLED = "UPDATE idempotency.saga_events SET signalled = true WHERE id = ANY(%(events)s)"


def wake(connection: Connection) -> None:
    """Let sagas go on that wait for events which have not signalled yet. One that Postgres refuses is set aside."""
    found = connection.exec_driver_sql(_ASLEEP).all()
    left = {row.row_id: row.events for row in found if row.row_id is not None}

    def handle(row: Row[object]) -> int:
        woken = len(connection.exec_driver_sql(_WAKE, {"saga": row.row_id}).all())
        if woken:
            del left[row.row_id]
        return woken

    with sweeps.sweep_settings(connection):
        sweeps.one_by_one(connection, SWEEP, [row for row in found if row.row_id in left and row.is_due], handle)
    again = {event for events in left.values() for event in events}
    if events := {event for row in found for event in row.events} - again:
        connection.exec_driver_sql(_SIGNALLED, {"events": list(events)})
