"""Money in doubt: calls outside that were begun, and whose outcome nobody knows.

Of operations that have ended so, of sagas that cannot be undone for it, and of operations that still try. In pages, the newest
dead letter first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

from .visible import parameters

# The most released operations that are looked at for one that still tries, as many whose holder is gone, and as many sagas that
# have stopped.
BOUND = 20_000

_MINE = """(d.consumer_service = %(service)s OR d.consumer_service IS NULL)
    AND (%(tenants)s::text[] IS NULL OR d.tenant = ANY(%(tenants)s))"""

# The most letters that one page looks through: not each is about a call in doubt.
WINDOW = 1_000

# Reasons under which a letter may be about a call in doubt; what is in doubt is read in the record.
_REASONS = "('effect_unknown', 'on_failed_error', 'unfinished', 'compensation_failed')"

# Of one letter, if it is named; otherwise of those outside of the archive. None of those in it is in doubt any more: what a
# person has said is corrected once its letter is restored.
_ONLY = "(%(letter)s::bigint IS NULL AND d.archived_at IS NULL OR d.id = %(letter)s)"
_LETTERS = f"""d.status = 'open' AND d.reason IN {_REASONS} AND {_MINE} AND (%(before)s::bigint IS NULL OR d.id < %(before)s)
    AND {_ONLY}"""

# Of a saga, the calls are among its steps. What a person has said stays here until the letter is closed: it may be corrected.
_OPEN = f"""
SELECT d.id AS letter, d.tenant, d.task, d.key, d.reason, d.failed_at, d.code_version, d.payload, r.error_code, r.status, false AS is_saga,
       e.key AS effect, e.value ->> 'state' AS state, e.value ->> 'key' AS provider_key, e.value ->> 'number' AS number,
       (e.value ->> 'begun_at')::float8 AS begun_at, coalesce((e.value ->> 'resolved')::boolean, false) AS is_resolved,
       extract(epoch FROM clock_timestamp())::float8 - (e.value ->> 'begun_at')::float8 AS age
FROM (SELECT * FROM idempotency.dead_letters d WHERE {_LETTERS} ORDER BY d.id DESC LIMIT %(window)s) d
JOIN idempotency.records r ON (r.tenant, r.task, r.key, r.generation) = (d.tenant, d.task, d.key, d.generation)
    AND r.status = 'failed'
CROSS JOIN LATERAL jsonb_each(r.effects) e
WHERE e.value ->> 'kind' = 'effect' AND (e.value ->> 'state' = 'begun' OR (e.value ->> 'resolved')::boolean)
ORDER BY d.id DESC, (e.value ->> 'position')::int LIMIT %(limit)s
"""

_LAST = f"SELECT d.id FROM idempotency.dead_letters d WHERE {_LETTERS} ORDER BY d.id DESC OFFSET %(window)s - 1 LIMIT 1"

_OF_SAGAS = f"""
SELECT d.id AS letter, d.tenant, d.task, d.key, d.reason, d.failed_at, d.code_version, d.payload, 'effect_unknown' AS error_code, g.status,
       true AS is_saga, s.name AS effect, s.state, s.entry ->> 'key' AS provider_key, s.entry ->> 'number' AS number,
       extract(epoch FROM s.begun_at)::float8 AS begun_at, false AS is_resolved,
       extract(epoch FROM clock_timestamp() - s.begun_at)::float8 AS age
FROM (SELECT id, tenant, task, key, generation, status FROM idempotency.sagas
      WHERE stopped IS NOT NULL AND stopped = 'effect_unknown' ORDER BY created_at DESC LIMIT %(bound)s) g
JOIN idempotency.saga_steps s ON s.saga_id = g.id AND s.generation = g.generation AND s.kind = 'effect' AND s.state = 'begun'
JOIN idempotency.dead_letters d ON (d.tenant, d.task, d.key) = (g.tenant, g.task, g.key) AND d.status = 'open'
    AND d.reason = 'effect_unknown'
WHERE {_MINE} AND {_ONLY}
ORDER BY d.id DESC, s.position LIMIT %(limit)s
"""

_STILL_TRIES = """
SELECT r.tenant, r.task, r.key, r.attempts, r.spent_at, e.key AS effect, e.value ->> 'key' AS provider_key,
       extract(epoch FROM clock_timestamp())::float8 - (e.value ->> 'begun_at')::float8 AS age,
       extract(epoch FROM r.available_at - clock_timestamp())::float8 AS next_attempt, r.is_orphaned
FROM ((SELECT tenant, task, key, attempts, spent_at, effects, available_at, service, false AS is_orphaned
       FROM idempotency.records WHERE available_at IS NOT NULL ORDER BY queue, available_at LIMIT %(bound)s) UNION ALL
      -- nobody has recovered it yet: its holder has died in the middle of the call, say
      (SELECT tenant, task, key, attempts, spent_at, effects, NULL, service, true
       FROM idempotency.records WHERE locked_until < clock_timestamp() ORDER BY locked_until LIMIT %(bound)s)) r
CROSS JOIN LATERAL jsonb_each(r.effects) e
WHERE (r.service = %(service)s) IS NOT FALSE AND (%(tenants)s::text[] IS NULL OR r.tenant = ANY(%(tenants)s))
  AND e.value ->> 'kind' = 'effect' AND e.value ->> 'state' = 'begun'
ORDER BY 7 DESC LIMIT %(limit)s
"""

_NOT_ALL = """
SELECT EXISTS (SELECT FROM idempotency.records WHERE available_at IS NOT NULL ORDER BY queue, available_at OFFSET %(bound)s)
    OR EXISTS (SELECT FROM idempotency.records WHERE locked_until < clock_timestamp() ORDER BY locked_until OFFSET %(bound)s)
    OR EXISTS (SELECT FROM idempotency.sagas WHERE stopped IS NOT NULL AND stopped = 'effect_unknown' OFFSET %(bound)s)
"""


def open_effects(
    connection: Connection, service: str, tenants: Sequence[str] | None, *, before: int | None, limit: int
) -> tuple[Sequence[Row[Any]], int | None]:
    """Calls in doubt of operations that have ended, and the letter before which the next page begins; None: there is none."""
    fields = parameters(service, tenants, before=before, window=WINDOW, limit=limit, letter=None)
    rows = connection.exec_driver_sql(_OPEN, fields).all()
    if len(rows) == limit:  # the last operation may have more calls: the next page begins with it
        last = rows[-1].letter
        return rows, last + 1 if last != rows[0].letter else last
    return rows, connection.exec_driver_sql(_LAST, fields).scalar_one_or_none()


def open_effects_of_sagas(
    connection: Connection, service: str, tenants: Sequence[str] | None, *, limit: int
) -> Sequence[Row[Any]]:
    """Calls in doubt for which sagas have stopped: few, because each has stopped with its letter."""
    fields = parameters(service, tenants, bound=BOUND, limit=limit, letter=None)
    return connection.exec_driver_sql(_OF_SAGAS, fields).all()


def of_letter(connection: Connection, service: str, tenants: Sequence[str] | None, letter: int) -> Sequence[Row[Any]]:
    """The calls in doubt that one open letter is about, of its operation or its saga, and those of which a person has said what became."""
    fields = parameters(service, tenants, letter=letter, before=None, window=1, bound=BOUND, limit=100)
    return [
        *connection.exec_driver_sql(_OPEN, fields).all(),
        *connection.exec_driver_sql(_OF_SAGAS, fields).all(),
    ]


def still_tried(
    connection: Connection, service: str, tenants: Sequence[str] | None, *, limit: int
) -> Sequence[Row[Any]]:
    """Calls in doubt of operations that have not ended: their next attempt asks the provider, or calls under the same key."""
    return connection.exec_driver_sql(_STILL_TRIES, parameters(service, tenants, bound=BOUND, limit=limit)).all()


def are_more(connection: Connection) -> bool:
    """Whether more operations or sagas wait than `BOUND`, so that calls of theirs may be on neither list."""
    return bool(connection.exec_driver_sql(_NOT_ALL, {"bound": BOUND}).scalar_one())
