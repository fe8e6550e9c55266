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

_WAITING = """idempotency.saga_steps s JOIN idempotency.sagas g ON g.id = s.saga_id
    WHERE (s.tenant, g.service, s.event_type, s.match) = (e.tenant, e.service, e.event_type, e.match)
      AND s.kind = 'wait' AND s.state = 'begun' AND (e.saga_id IS NULL OR e.saga_id = s.saga_id)"""
_IS_DUE = NOT_ASIDE.format(name=SWEEP, id="g.id::text")

# The events by the saga that waits for them; those that none waits for come with the saga NULL. Without those for which only
# sagas wait that are set aside: there may be more of them than a pass takes.
_ASLEEP = f"""
SELECT w.id::text AS row_id, w.tenant, w.task, w.key, pg_catalog.array_agg(e.id) AS events, w.is_due
FROM (
    SELECT e.* FROM idempotency.saga_events e
    LEFT JOIN LATERAL (SELECT bool_or({_IS_DUE}) AS any_is FROM {_WAITING}) due ON true
    WHERE NOT e.signalled AND due.any_is IS NOT FALSE ORDER BY e.id LIMIT {BATCH}
) e
LEFT JOIN LATERAL (SELECT g.id, g.tenant, g.task, g.key, {_IS_DUE} AS is_due FROM {_WAITING}) w ON true
GROUP BY w.id, w.tenant, w.task, w.key, w.is_due ORDER BY w.id
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
