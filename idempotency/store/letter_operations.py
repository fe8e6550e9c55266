"""The operations that dead letters are about, and how they have ended: what a person is told before a change of letters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Row

from ..wire.keys import OperationId
from . import edits, record
from .record import is_open

_NAMED = """
SELECT DISTINCT tenant, task, key, header_task FROM idempotency.dead_letters WHERE id = ANY(%(ids)s)
"""

# How the operation of an open letter has failed, if that is what the letter is about. An effect that was refused in this
# generation was refused by the provider.
_FAILURES = f"""
SELECT d.id, d.tenant, d.task, d.key, d.failed_at, r.error_code AS code, r.error, refused.effect, refused.code AS refused_as
FROM idempotency.dead_letters d
JOIN idempotency.records r ON (r.tenant, r.task, r.key, r.fingerprint, r.generation)
    = (d.tenant, d.task, d.key, d.fingerprint, d.generation) AND r.status = 'failed'
LEFT JOIN LATERAL (
    SELECT e.key AS effect, e.value -> 'refused' ->> 'code' AS code FROM jsonb_each(r.effects) e
    WHERE e.value ->> 'state' = 'not_happened' AND (e.value ->> 'generation')::int = r.generation AND e.value ? 'refused'
    ORDER BY e.key LIMIT 1) refused ON true
WHERE d.id = ANY(%(ids)s) AND {is_open("d")} AND d.reason NOT IN ('fingerprint_mismatch', 'service_mismatch')
ORDER BY d.id
"""

# An operation, and those under its key and a number after it: the number begins anew once the first ones are purged.
_WITH_OPEN_LETTERS = """
SELECT DISTINCT tenant, task, key FROM idempotency.dead_letters
WHERE tenant = %(tenant)s AND task = %(task)s AND status = 'open'
  AND reason NOT IN ('fingerprint_mismatch', 'service_mismatch')  -- of another call under the key
  AND starts_with(key, %(key)s) AND substr(key, length(%(key)s) + 1) ~ '^(:[0-9]+)?$'
ORDER BY key
"""

_WITH_LETTER = """
SELECT EXISTS (SELECT FROM idempotency.dead_letters WHERE (tenant, task, key) = (%(tenant)s, %(task)s, %(key)s)
               AND (consumer_service = %(service)s) IS NOT FALSE)
"""

# Of the undos that a replay of these letters, of sagas that have stopped, replays first.
_LETTERS_OF_UNDOS = f"""
SELECT d.id FROM idempotency.dead_letters l
JOIN idempotency.sagas g ON (g.tenant, g.task, g.key) = (l.tenant, l.task, l.key) AND g.stopped = l.reason
JOIN idempotency.saga_steps s ON s.saga_id = g.id AND s.generation = g.generation AND s.kind = 'undo' AND s.state = 'failed'
JOIN idempotency.dead_letters d ON (d.tenant, d.task, d.key) = (s.tenant, s.call_task, s.call_key) AND {is_open("d")}
WHERE l.id = ANY(%(letters)s) AND {is_open("l")}
"""

# Also of another letter of the same operation: both send the message that was found to be wrong.
_TO_EDIT = f"""
SELECT DISTINCT ON (d.id) d.id, e.tenant, e.task, e.key, e.id AS edit, e.letter, e.edited_by, e.edited_at
FROM idempotency.dead_letters d
JOIN idempotency.letter_edits e ON (e.tenant, e.task, e.key) = (d.tenant, coalesce(d.task, d.header_task), d.key)
    AND e.applied_at IS NULL
JOIN idempotency.dead_letters l ON l.id = e.letter AND {is_open("l")}
WHERE d.id = ANY(%(ids)s) AND {is_open("d")} AND d.reason NOT IN ('fingerprint_mismatch', 'service_mismatch')
ORDER BY d.id, e.id
"""

# What can never be sent. The reason of an operation that has ended may be the code of its own error.
_NEVER = f"""
SELECT d.id FROM idempotency.dead_letters d
WHERE d.id = ANY(%(ids)s) AND {is_open("d")} AND d.reason = ANY(%(never)s)
  AND NOT EXISTS (SELECT FROM idempotency.records r
                  WHERE (r.tenant, r.task, r.key, r.fingerprint) = (d.tenant, d.task, d.key, d.fingerprint) AND r.error_code = d.reason)
"""

# The saga that cannot be undone to its end without the undo that this letter is of.
_UNDO_OF = f"""
SELECT g.tenant, g.task, g.key FROM idempotency.dead_letters d
JOIN idempotency.saga_steps s ON (s.tenant, s.call_task, s.call_key) = (d.tenant, d.task, d.key)
JOIN idempotency.sagas g ON g.id = s.saga_id AND g.generation = s.generation AND g.status = 'COMPENSATING'
WHERE d.id = %(letter)s AND {is_open("d")} AND d.reason NOT IN ('fingerprint_mismatch', 'service_mismatch')
  AND s.kind = 'undo' AND s.state <> 'done' LIMIT 1
"""


def with_open_letters(connection: Connection, id: OperationId) -> list[OperationId]:
    """Of an operation, and those of its key with `:number` after it, the ones that have an open letter."""
    return [OperationId(*row) for row in connection.exec_driver_sql(_WITH_OPEN_LETTERS, record.named(id))]


def with_letter(connection: Connection, id: OperationId, service: str) -> bool:
    """Whether an operation has a letter of this application, or of none."""
    names = record.named(id) | {"service": service}
    return bool(connection.exec_driver_sql(_WITH_LETTER, names).scalar_one())


def named(connection: Connection, letters: Sequence[int]) -> Sequence[Row[Any]]:
    """The operations of these letters, or the task of a message whose operation is not known."""
    return connection.exec_driver_sql(_NAMED, {"ids": list(letters)}).all()


def failures(connection: Connection, letters: Sequence[int]) -> Sequence[Row[Any]]:
    """How the operations of these letters have failed: `code`, `error`, and the `effect` that its provider has `refused_as`, if any."""
    return connection.exec_driver_sql(_FAILURES, {"ids": list(letters)}).all()


def letters_of_undos(connection: Connection, letters: Collection[int]) -> list[int]:
    """The open letters of failed undos that are replayed with these, because they are of sagas that have stopped."""
    return list(connection.exec_driver_sql(_LETTERS_OF_UNDOS, {"letters": list(letters)}).scalars())


def to_edit(connection: Connection, letters: Sequence[int]) -> Sequence[Row[Any]]:
    """Those of these open letters of whose operation an edit waits for its approval: by whom it is asked for, and of which `letter`."""
    if not edits.is_there(connection):
        return []
    return connection.exec_driver_sql(_TO_EDIT, {"ids": list(letters)}).all()


def never_sent(connection: Connection, letters: Sequence[int], reasons: Collection[str]) -> list[int]:
    """Those of these open letters that can never be replayed, because their reason is one of these."""
    return list(connection.exec_driver_sql(_NEVER, {"ids": list(letters), "never": list(reasons)}).scalars())


def undo_of(connection: Connection, letter: int) -> OperationId | None:
    """The saga that is being undone, and has to replay this letter for it: of an undo that has failed or cannot run."""
    row = connection.exec_driver_sql(_UNDO_OF, {"letter": letter}).one_or_none()
    return None if row is None else OperationId(*row)
