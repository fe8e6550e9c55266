"""Outbox rows still unpublished when their operation ends.

Each is of an earlier retry, of a second call, or of one that was enqueued for later. Its delivery finds the record, and sends
its own callbacks or errbacks; so it is published like any other, as long as the broker may take it.
"""

from __future__ import annotations

from sqlalchemy import Connection

from ..wire.keys import OperationId
from . import sweeps
from .outbox import refresh_lanes
from .record import OWN, ROW, named
from .sweeps import Sweep

# How often the broker has refused a row before it is given up: within an hour, by the pauses of the relay. No deploy takes
# longer.
REFUSALS = 65
# Rows per pass.
LIMIT = 1000

_HASTEN = f"""
UPDATE idempotency.outbox SET available_at = clock_timestamp()
WHERE {ROW} AND {OWN} AND fingerprint = %(fingerprint)s AND status NOT IN ('published', 'failed')
  AND available_at > clock_timestamp()
RETURNING task, ordering_key
"""

# It counts as published: a relay may be sending it just now, and the record has to outlive that message. The index outbox_stuck
# has the first condition.
GIVE_UP = Sweep(
    "give_up_refused",
    table="outbox",
    columns="r.id",
    due=f"""r.status = 'pending' AND r.attempts >= {REFUSALS} AND (
        SELECT true FROM idempotency.records p
        WHERE (p.tenant, p.task, p.key, p.fingerprint) = (r.tenant, r.task, r.key, r.fingerprint)
          AND (p.service = r.service) IS NOT FALSE AND p.generation >= r.generation AND p.status IN ('completed', 'failed')
        LIMIT 1)""",
    order="r.id",
    one="r.id = %(id)s",
    id="r.id::text",
    then="""
, given_up AS (
    UPDATE idempotency.outbox o SET status = 'published', published_at = clock_timestamp(), relayed_until = NULL,
        settled_at = clock_timestamp()
    FROM due WHERE o.id = due.id RETURNING 1
)
SELECT (SELECT count(*) FROM given_up)""",
)


def hasten(connection: Connection, id: OperationId, fingerprint: str, *, service: str) -> None:
    """Let go at once what an operation that ends now was to be delivered by later."""
    rows = connection.exec_driver_sql(_HASTEN, named(id) | {"fingerprint": fingerprint, "service": service}).all()
    refresh_lanes(connection, [(row.task, row.ordering_key) for row in rows if row.ordering_key is not None])


def give_up_refused(connection: Connection) -> int:
    """Settle what the broker has refused for an hour, if its operation has ended; returns how many."""
    done, _ = sweeps.run(connection, GIVE_UP, {}, limit=LIMIT)
    return done
