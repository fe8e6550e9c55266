"""Erasing the data of operations that have ended: arguments, results, errors, messages, answers, events.

What names an operation stays, with its fingerprint, its status and its times, so its key stays spent. The database keeps an
erased record as it is (`keep_erased`, migration 0015): nothing opens it again, older code included.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from ..wire.keys import OperationId
from ..wire.results import ERASED
from . import edits
from .record import ROW, named

# What takes the place of a text that has to be there.
GONE = "erased"
# Calls of calls of sagas that are found.
DEEPEST = 100
# What an effect's entry keeps: nothing that its caller or its provider has said.
KEPT = ["kind", "state", "position", "number", "key", "begun_at", "generation", "resolved"]

# The operation, and what its sagas have called, by how deep.
_FAMILY = f"""
WITH RECURSIVE family(tenant, task, key, depth) AS (
    VALUES (%(tenant)s::text, %(task)s::text, %(key)s::text, 0)
    UNION
    SELECT s.tenant, s.call_task, s.call_key, f.depth + 1 FROM family f
    JOIN idempotency.sagas g ON (g.tenant, g.task, g.key) = (f.tenant, f.task, f.key) AND NOT g.observed
    JOIN idempotency.saga_steps s ON s.saga_id = g.id AND s.call_key IS NOT NULL
    WHERE f.depth < {DEEPEST}  -- one may have called what has called it
)
SELECT tenant, task, key FROM family GROUP BY tenant, task, key ORDER BY {ROW} DESC, max(depth), tenant, task, key
"""

_OF_SAGA = f"SELECT id FROM idempotency.sagas WHERE {ROW} AND NOT observed"
# A message that could not be examined to its end has the task's name in its header alone.
_LETTERS = f"""({ROW} OR tenant = %(tenant)s AND task IS NULL AND header_task = %(task)s AND key = %(key)s
    OR outbox_id IN (SELECT id FROM idempotency.outbox WHERE {ROW}))"""
# Deliveries of webhooks that the operation is, or has made as the fan-out of an event: then its key is the event's id, as it is
# of every other consumer's operation.
_DELIVERIES = """tenant = %(tenant)s AND (
    task = %(task)s AND id = split_part(%(key)s, ':', 1)
    OR regexp_replace(task, 'deliver$', 'fan_out') = %(task)s
        AND id = 'msg_' || left(encode(sha256(pg_catalog.convert_to(%(key)s || ':' || endpoint_id, 'UTF8')), 'hex'), 32))"""
# The events that its saga has waited for, or was given by a person.
_EVENTS = f"""
SELECT e.id FROM idempotency.sagas g JOIN idempotency.saga_events e ON (e.tenant, e.service) = (g.tenant, g.service)
WHERE g.id = ({_OF_SAGA}) AND (e.saga_id = g.id OR e.saga_id IS NULL AND EXISTS (
    SELECT FROM idempotency.saga_steps s
    WHERE s.saga_id = g.id AND s.kind = 'wait' AND (s.event_type, s.match) = (e.event_type, e.match)))
"""
# Sagas that may come to a wait: they run, have not begun, or go on if a person replays their letter.
_COMING = """
SELECT tenant, task, key, service FROM idempotency.sagas
WHERE NOT observed AND status = 'RUNNING' AND tenant = %(tenant)s
UNION SELECT tenant, task, key, service FROM idempotency.records
WHERE task = ANY(%(sagas)s::text[]) AND status IN ('started', 'released') AND tenant = %(tenant)s
UNION SELECT tenant, task, key, service FROM idempotency.outbox o
WHERE task = ANY(%(sagas)s::text[]) AND settled_at IS NULL AND tenant = %(tenant)s AND NOT EXISTS (
    SELECT FROM idempotency.records r
    WHERE (r.tenant, r.task, r.key) = (o.tenant, o.task, o.key) AND r.status IN ('completed', 'failed'))
UNION SELECT tenant, coalesce(task, header_task), key, consumer_service FROM idempotency.dead_letters
WHERE coalesce(task, header_task) = ANY(%(sagas)s::text[]) AND status = 'open' AND tenant = %(tenant)s
"""


def _has_part(key: str, value: str) -> str:
    """Whether a key is this value, or has it between anything but letters and digits."""
    escaped = f"regexp_replace({value}, '([^[:alnum:]])', '\\\\\\1', 'g')"
    return f"{key} ~ ('(^|[^[:alnum:]])' || {escaped} || '([^[:alnum:]]|$)')"


# In the order in which others lock: of what was called, before the saga that has called it, and letters last. A webhook that a
# person redelivers is redelivered before, or refused after.
_LOCKS = (
    f"SELECT FROM idempotency.webhook_deliveries WHERE {_DELIVERIES} ORDER BY id FOR UPDATE",
    f"SELECT FROM idempotency.sagas WHERE {ROW} FOR UPDATE",
    f"SELECT FROM idempotency.records WHERE {ROW} FOR UPDATE",
)
_LOCK_LETTERS = f"SELECT FROM idempotency.dead_letters WHERE {_LETTERS} ORDER BY id FOR UPDATE"

# What is in the way, the first of these. A saga says what it waits for only when it comes to its wait: before that, what its
# key and its entity are tells whether it may be about the same thing.
_OBSTACLE = f"""
SELECT coalesce(
    (SELECT 'is ' || status || '; only what has ended is erased' FROM idempotency.records
     WHERE {ROW} AND status NOT IN ('completed', 'failed')),
    (SELECT 'dead letter ' || id || ' is open; replay it, or discard it first' FROM idempotency.dead_letters
     WHERE {_LETTERS} AND status = 'open' LIMIT 1),
    (SELECT 'effect ' || e.name || ' is open; say what became of it first, by `effects resolve`'
     FROM idempotency.records, jsonb_each(effects) e(name, value) WHERE {ROW} AND e.value ->> 'state' = 'begun' LIMIT 1),
    (SELECT 'its saga has not ended' FROM idempotency.sagas WHERE {ROW} AND NOT observed AND status NOT IN ('COMPLETED', 'FAILED')),
    (SELECT 'the saga ' || g.task || ' ' || g.key || ', which has called it, has not ended'
     FROM idempotency.saga_steps s JOIN idempotency.sagas g ON g.id = s.saga_id
     WHERE (s.tenant, s.call_task, s.call_key) = (%(tenant)s, %(task)s, %(key)s) AND g.status IN ('RUNNING', 'COMPENSATING') LIMIT 1),
    (SELECT 'a message under its key has not been delivered; try again later' FROM idempotency.outbox o
     WHERE {ROW} AND (o.status = 'pending' OR o.settled_at IS NULL AND NOT EXISTS (
         SELECT FROM idempotency.records r WHERE (r.tenant, r.task, r.key, r.fingerprint) = (o.tenant, o.task, o.key, o.fingerprint))) LIMIT 1),
    (SELECT 'the saga ' || g.task || ' ' || g.key || ', which waits for the same events, has not ended'
     FROM idempotency.saga_events e JOIN idempotency.saga_steps s USING (tenant, event_type, match)
     JOIN idempotency.sagas g ON g.id = s.saga_id
     WHERE e.id IN ({_EVENTS}) AND NOT g.observed AND g.status = 'RUNNING' LIMIT 1),
    (SELECT 'the saga ' || c.task || ' ' || c.key || ', which may come to wait for the same events, has not ended'
     FROM idempotency.saga_events e
     CROSS JOIN LATERAL (SELECT regexp_replace(e.match, '^[^=]*=', '') AS value) matched
     JOIN ({_COMING}) c ON (c.task, c.key) <> (%(task)s, %(key)s) AND (c.service = e.service) IS NOT FALSE
     LEFT JOIN idempotency.sagas g ON (g.tenant, g.task, g.key, g.observed) = (c.tenant, c.task, c.key, false)
     WHERE e.id IN ({_EVENTS}) AND (g.status <> 'COMPENSATING' AND g.accepted_at <= e.received_at) IS NOT FALSE
       AND (g.entity_id = matched.value OR {_has_part("c.key", "matched.value")} OR EXISTS (
           SELECT FROM idempotency.saga_steps s
           WHERE s.saga_id = g.id AND (s.event_type, s.match) = (e.event_type, e.match))) LIMIT 1),
    (SELECT 'the webhook ' || id || ' has not been delivered' FROM idempotency.webhook_deliveries
     WHERE {_DELIVERIES} AND status = 'waiting' LIMIT 1)
)
"""

_ERASED_AT = f"SELECT erased_at FROM idempotency.records WHERE {ROW}"


def _entry(entry: str) -> str:
    return f"(SELECT pg_catalog.jsonb_object_agg(f.key, f.value) FROM jsonb_each({entry}) f WHERE f.key = ANY(%(kept)s::text[]))"


def _error(error: str, code: str) -> str:
    """A stored error, whose code alone is kept."""
    return f"""CASE WHEN {error} IS NOT NULL THEN
        pg_catalog.jsonb_build_object('code', coalesce({code}, %(gone)s::text), 'message', %(gone)s::text)::text END"""


_STEP = f"""args = NULL, undo_arguments = NULL, match = CASE WHEN match IS NOT NULL THEN %(gone)s::text END,
    result = CASE WHEN result IS NOT NULL THEN %(erased)s::text END, entry = {_entry("s.entry")},
    error = {_error("error", "idempotency.as_jsonb(error) ->> 'code'")}"""

# While its steps still say which.
_FORGET_EVENTS = f"DELETE FROM idempotency.saga_events WHERE id IN ({_EVENTS})"
_ERASE_STEPS = f"UPDATE idempotency.saga_steps s SET {_STEP} WHERE s.saga_id = ({_OF_SAGA})"
# What a saga keeps of an operation that it has called.
_ERASE_CALLS = f"""
UPDATE idempotency.saga_steps s SET {_STEP}
WHERE (s.tenant, s.call_task, s.call_key) = (%(tenant)s, %(task)s, %(key)s)
"""
_ERASE_SAGA = f"""
UPDATE idempotency.sagas SET error = {_error("error", "idempotency.as_jsonb(error) ->> 'code'")}
WHERE {ROW} AND NOT observed
"""
_ERASE_LETTERS = f"""
UPDATE idempotency.dead_letters SET payload = '', headers = NULL,
    first_error = CASE WHEN first_error IS NOT NULL THEN %(gone)s::text END,
    last_error = CASE WHEN last_error IS NOT NULL THEN %(gone)s::text END
WHERE {_LETTERS}
"""
_ERASE_ROWS = f"""
UPDATE idempotency.outbox SET message = '', settled_at = coalesce(settled_at, clock_timestamp()),
    last_error = CASE WHEN last_error IS NOT NULL THEN %(gone)s::text END
WHERE {ROW}
"""
_ERASE_SET_ASIDE = f"""
UPDATE idempotency.set_aside SET error = %(gone)s WHERE {ROW}
"""
_ERASE_WEBHOOKS = f"UPDATE idempotency.webhook_deliveries SET body = '' WHERE {_DELIVERIES}"
_ERASE_RECORD = f"""
UPDATE idempotency.records SET message = '', first_error = NULL,
    result = CASE WHEN result IS NOT NULL THEN %(erased)s::text END, error = {_error("error", "error_code")},
    effects = (SELECT coalesce(pg_catalog.jsonb_object_agg(e.key, {_entry("e.value")}), '{{}}') FROM jsonb_each(effects) e),
    erased_at = clock_timestamp(), updated_at = clock_timestamp()
WHERE {ROW} AND erased_at IS NULL
"""


def family(connection: Connection, id: OperationId) -> list[OperationId]:
    """The operation, and then all that it has called as a saga, and what those have called: each after all that have called it."""
    return [OperationId(*row) for row in connection.exec_driver_sql(_FAMILY, named(id))]


def lock(connection: Connection, ids: Sequence[OperationId]) -> None:
    """Lock what says whether the operations of a family may be erased."""
    for id in reversed(ids):
        for statement in _LOCKS:
            connection.exec_driver_sql(statement, named(id))
    for id in ids:
        connection.exec_driver_sql(_LOCK_LETTERS, named(id))


def obstacle(connection: Connection, id: OperationId, sagas: Sequence[str]) -> str | None:
    """Why an operation cannot be erased now; None: it can. `sagas`: the names of the application's sagas."""
    why: str | None = connection.exec_driver_sql(_OBSTACLE, named(id) | {"sagas": list(sagas)}).scalar_one()
    return why


def erased_at(connection: Connection, id: OperationId) -> datetime | None:
    """When an operation was erased; None: it was not, or there is none."""
    at: datetime | None = connection.exec_driver_sql(_ERASED_AT, named(id)).scalar_one_or_none()
    return at


def erase(connection: Connection, ids: Sequence[OperationId]) -> None:
    """Erase what our tables hold of these operations, which are locked and have ended."""
    fields: dict[str, Any] = {"erased": ERASED, "gone": GONE, "kept": KEPT}
    of_saga = (_FORGET_EVENTS, _ERASE_STEPS, _ERASE_CALLS, _ERASE_SAGA)
    of_messages = (_ERASE_LETTERS, _ERASE_ROWS, _ERASE_SET_ASIDE, _ERASE_WEBHOOKS)
    for id in ids:
        for statement in (*of_saga, *of_messages, _ERASE_RECORD):
            connection.exec_driver_sql(statement, named(id) | fields)
        edits.erase(connection, id)
