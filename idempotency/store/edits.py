"""What people have corrected in the message of a dead letter, with what it was before, and what callers who used the earlier arguments are told.

An edit gives an operation's record the fingerprint of the corrected arguments. The one before it is kept as a *former* one, as
long as the record: a request with it is a duplicate of this operation, and never runs. On a schema before 0021 nothing was
edited.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

from ..wire.keys import OperationId
from .record import ROW, is_open, named, unsettled
from .statements import execute
from .visible import parameters

# Also of a role that has no right on it yet: code may be newer than `migrate --roles`.
_IS_THERE = """
SELECT coalesce(has_table_privilege(to_regclass('idempotency.' || %(table)s), 'SELECT'), false)
"""

# The only rule for what an edit has opened and a person has yet to decide: its record `r` is released, nothing has run, and its
# message is an open letter, archived or not. Nothing is due. A person has edited that letter, or one before it that was replayed
# in vain. The history goes with its letter, former fingerprints with the record, and there is not always one.
_WAITS_FOR_PERSON = f"""(
    (r.status, r.generation, r.attempts) = ('released', 1, 0) AND r.effects = '{{}}'
    AND (EXISTS (SELECT FROM idempotency.letter_edits e
                 WHERE (e.tenant, e.task, e.key) = (r.tenant, r.task, r.key) AND e.applied_at IS NOT NULL)
         OR EXISTS (SELECT FROM idempotency.former_fingerprints f
                    WHERE (f.tenant, f.task, f.key, f.became) = (r.tenant, r.task, r.key, r.fingerprint)))
    AND EXISTS (SELECT FROM idempotency.dead_letters d
                WHERE (d.tenant, d.task, d.key, d.fingerprint) = (r.tenant, r.task, r.key, r.fingerprint)
                  AND {is_open("d")} AND d.generation IS NULL))"""
_IS_WAITING = f"SELECT EXISTS (SELECT FROM idempotency.records r WHERE {ROW} AND {_WAITS_FOR_PERSON})"

_HISTORY = """
SELECT id, edited_by, known_by, reason, edited_at, approved_by, applied_at, before, after, fingerprint_before, fingerprint_after
FROM idempotency.letter_edits WHERE letter = %(letter)s ORDER BY id
"""
_WAITING = """
SELECT id, edited_by, known_by, reason, edited_at, before, after, fingerprint_after FROM idempotency.letter_edits
WHERE letter = %(letter)s AND applied_at IS NULL FOR UPDATE
"""
_OPEN_REQUESTS = """
SELECT e.id, e.letter, e.edited_by, e.edited_at, e.reason AS why, d.reason, e.tenant, e.task, e.key,
       e.before = d.payload AS is_of_this_letter
FROM idempotency.letter_edits e JOIN idempotency.dead_letters d ON d.id = e.letter AND d.status = 'open'
WHERE e.applied_at IS NULL AND (d.consumer_service = %(service)s) IS NOT FALSE
  AND (%(tenants)s::text[] IS NULL OR e.tenant = ANY(%(tenants)s))
  AND (%(before)s::bigint IS NULL OR e.id < %(before)s) ORDER BY e.id DESC LIMIT %(limit)s
"""
_FIRST = """
SELECT before FROM idempotency.letter_edits WHERE letter = %(letter)s AND applied_at IS NOT NULL ORDER BY id LIMIT 1
"""

# A record that nothing has run for, as an edit opens it.
_OPENED = "(status, generation, attempts) = ('released', 1, 0) AND effects = '{}'"
# A row that nothing sends again (see `lost.py`): its message has died, and a replay has sent another one, or is a copy.
_OVER = "(status = 'published' AND taken)"

# Why no edit of this operation would be right, as far as other tables say.
_OBSTACLE = f"""
SELECT CASE
    WHEN EXISTS (SELECT FROM idempotency.sagas WHERE {ROW} AND NOT observed)
        THEN 'it is a saga, whose recorded steps were made with these arguments'
    WHEN EXISTS (SELECT FROM idempotency.saga_steps
                 WHERE (tenant, call_task, call_key) = (%(tenant)s, %(task)s, %(key)s))
        THEN 'a saga has called it with these arguments, and has recorded them'
    WHEN EXISTS (SELECT FROM idempotency.webhook_deliveries
                 WHERE (tenant, task) = (%(tenant)s, %(task)s) AND id = split_part(%(key)s, ':', 1))
        THEN 'it delivers a webhook, whose body was made when its event came'
    WHEN EXISTS (SELECT FROM idempotency.dead_letters
                 WHERE {ROW} AND {is_open()} AND id <> %(letter)s
                   AND reason NOT IN ('fingerprint_mismatch', 'service_mismatch'))
        THEN 'another dead letter of its operation is open'
    WHEN EXISTS (SELECT FROM idempotency.outbox
                 WHERE {ROW} AND {unsettled()} AND id IS DISTINCT FROM %(outbox_id)s
                   AND NOT ({_OVER} AND EXISTS (SELECT FROM idempotency.records WHERE {ROW} AND {_OPENED})))
        THEN 'another message of its operation is under way; look again when it has been delivered'
    WHEN EXISTS (SELECT FROM idempotency.outbox WHERE id = %(outbox_id)s AND status = 'pending')
        THEN 'its message waits to be sent; look again when it has been delivered'
END
"""
_LOCK_ROW = "SELECT FROM idempotency.outbox WHERE id = %(outbox_id)s FOR UPDATE"

_DROP_WAITING = "DELETE FROM idempotency.letter_edits WHERE letter = %(letter)s AND applied_at IS NULL"
_ADD = """
INSERT INTO idempotency.letter_edits
    (letter, tenant, task, key, edited_by, known_by, reason, applied_at, before, after, fingerprint_before, fingerprint_after)
VALUES (%(letter)s, %(tenant)s, %(task)s, %(key)s, %(by)s, %(known_by)s, %(reason)s,
        CASE WHEN %(applied)s THEN clock_timestamp() END, %(before)s, %(after)s, %(was)s, %(fingerprint)s)
"""
_APPROVE = """
UPDATE idempotency.letter_edits SET approved_by = %(by)s, applied_at = clock_timestamp()
WHERE id = %(edit)s AND applied_at IS NULL AND edited_by <> %(by)s
"""

# The letter, its own row (which a replay sends again if it could not be published) and the record change together.
_EDIT_LETTER = f"""
UPDATE idempotency.dead_letters
SET payload = %(after)s, fingerprint = %(fingerprint)s, tenant = %(tenant)s, task = %(task)s, key = %(key)s
WHERE id = %(letter)s AND {is_open()}
"""
# One of what has not begun is `taken` at once (see `lost.py`): a pass that has read it before the letter does not send it again.
_EDIT_ROW = f"""
UPDATE idempotency.outbox SET message = %(after)s, fingerprint = %(fingerprint)s,
    taken = taken OR status = 'published' AND %(generation)s::int IS NULL
WHERE id = %(outbox_id)s AND ({unsettled()} OR status = 'failed')
"""
_EDIT_RECORD = f"""
UPDATE idempotency.records SET message = %(after)s, fingerprint = %(fingerprint)s, updated_at = clock_timestamp()
WHERE {ROW} AND status = 'failed' AND generation = %(generation)s AND fingerprint = %(was)s AND effects = '{{}}'
"""
# One that an edit has opened. It is released and no row of it is due, so that only a replay runs it.
_EDIT_OPENED = f"""
UPDATE idempotency.records
SET message = %(after)s, queue = %(queue)s, fingerprint = %(fingerprint)s, updated_at = clock_timestamp()
WHERE {ROW} AND {_OPENED} AND fingerprint = %(was)s
"""
# What an earlier message of the operation has left: no end settles it, since it has not the record's fingerprint any more.
_SETTLE_OVER = f"""
UPDATE idempotency.outbox SET settled_at = clock_timestamp()
WHERE {ROW} AND fingerprint = %(was)s AND {unsettled()} AND id IS DISTINCT FROM %(outbox_id)s AND {_OVER}
"""
_MOVE_FORMER = f"UPDATE idempotency.former_fingerprints SET became = %(fingerprint)s WHERE {ROW} AND became = %(was)s"
_ADD_FORMER = """
INSERT INTO idempotency.former_fingerprints (tenant, task, key, fingerprint, became)
VALUES (%(tenant)s, %(task)s, %(key)s, %(was)s, %(fingerprint)s)
ON CONFLICT (tenant, task, key, fingerprint) DO UPDATE SET became = excluded.became
"""
# An edit may bring the first arguments back.
_DROP_FORMER = f"DELETE FROM idempotency.former_fingerprints WHERE {ROW} AND fingerprint = became"

_IS_FORMER = """
SELECT r.fingerprint FROM idempotency.former_fingerprints f JOIN idempotency.records r USING (tenant, task, key)
WHERE (f.tenant, f.task, f.key) = (%(tenant)s, %(task)s, %(key)s)
  AND f.fingerprint = ANY(%(fingerprints)s) AND f.became = r.fingerprint LIMIT 1
"""
# The row of a request with a former fingerprint: no end settles it, since it has not the record's.
_SETTLE = f"""
UPDATE idempotency.outbox SET settled_at = clock_timestamp()
WHERE message_id = %(message_id)s AND {ROW} AND fingerprint = ANY(%(fingerprints)s) AND {unsettled()} AND status = 'published'
"""

# So does a trigger of 0021, for older code; a database that an earlier checkout of 0021 has migrated has not got it.
_ERASE = f"""
UPDATE idempotency.letter_edits SET before = '', after = '' WHERE {ROW}
"""


def is_there(connection: Connection, table: str = "letter_edits") -> bool:
    """Whether this database has the history of edits, and this role may read it."""
    return bool(execute(connection, _IS_THERE, {"table": table}).fetchone()[0])


# ---------------------------------------------------------------- read


def history(connection: Connection, letter: int) -> Sequence[Row[Any]]:
    """The edits of a letter, the first one first; the last may wait for another person (`applied_at` is None)."""
    if not is_there(connection):
        return []
    return connection.exec_driver_sql(_HISTORY, {"letter": letter}).all()


def first_payload(connection: Connection, letter: int) -> str | None:
    """What the message of an edited letter was when it came; None: it was not edited."""
    if not is_there(connection):
        return None
    payload: str | None = connection.exec_driver_sql(_FIRST, {"letter": letter}).scalar_one_or_none()
    return payload


def open_requests(
    connection: Connection, service: str, tenants: Sequence[str] | None, *, before: int | None, limit: int
) -> Sequence[Row[Any]]:
    """Edits that one person has asked for and nobody has approved, the newest first; the next page has `before=` the last `id`."""
    fields = parameters(service, tenants, before=before, limit=limit)
    return connection.exec_driver_sql(_OPEN_REQUESTS, fields).all()


def obstacle(connection: Connection, id: OperationId, letter: Row[Any]) -> str | None:
    """Why the message of a letter is not edited, as far as sagas, other letters and messages say; None: nothing is in the way."""
    fields = named(id) | {"letter": letter.id, "outbox_id": letter.outbox_id}
    why: str | None = connection.exec_driver_sql(_OBSTACLE, fields).scalar_one()
    return why


def waits_for_person(connection: Connection) -> str:
    """A condition on a record `r`: an edit has opened it, nothing has run since, and its letter is open. It is not due then."""
    return _WAITS_FOR_PERSON if is_there(connection) else "false"


def is_waiting_for_person(connection: Connection, id: OperationId) -> bool:
    """Whether an edit has opened the operation, and it waits for a person to decide about its letter."""
    return is_there(connection) and bool(connection.exec_driver_sql(_IS_WAITING, named(id)).scalar_one())


# ---------------------------------------------------------------- change


def lock_row(connection: Connection, letter: Row[Any]) -> None:
    """Lock the outbox row of a locked letter, if it has one: nothing makes it due until the transaction ends."""
    connection.exec_driver_sql(_LOCK_ROW, {"outbox_id": letter.outbox_id})


def waiting(connection: Connection, letter: int) -> Row[Any] | None:
    """The edit of a letter that waits for another person, locked; None: none does."""
    return connection.exec_driver_sql(_WAITING, {"letter": letter}).one_or_none()


def add(
    connection: Connection,
    id: OperationId,
    letter: Row[Any],
    *,
    after: str,
    was: str | None,
    fingerprint: str,
    by: str,
    known_by: str | None,
    reason: str,
    applied: bool,
) -> None:
    """Keep what a locked letter was and becomes; `applied` at once, or once another person has approved. A waiting one is replaced."""
    connection.exec_driver_sql(_DROP_WAITING, {"letter": letter.id})
    fields = named(id) | {"letter": letter.id, "before": letter.payload, "after": after, "was": was, "by": by}
    fields |= {"fingerprint": fingerprint, "known_by": known_by, "reason": reason, "applied": applied}
    connection.exec_driver_sql(_ADD, fields)


def approve(connection: Connection, edit: int, *, by: str) -> bool:
    """Record another person's approval. False: it does not wait any more, or is this person's own."""
    return connection.exec_driver_sql(_APPROVE, {"edit": edit, "by": by}).rowcount == 1


def apply(
    connection: Connection, id: OperationId, letter: Row[Any], *, after: str, was: str | None, fingerprint: str
) -> bool:
    """Give the letter, its own row and its operation's record this message. False: the record is not as it has to be any more."""
    fields = named(id) | {"letter": letter.id, "outbox_id": letter.outbox_id, "generation": letter.generation}
    fields |= {"after": after, "was": was, "fingerprint": fingerprint}
    if letter.generation is not None and execute(connection, _EDIT_RECORD, fields).rowcount != 1:
        return False
    connection.exec_driver_sql(_EDIT_LETTER, fields)
    connection.exec_driver_sql(_EDIT_ROW, fields)
    connection.exec_driver_sql(_SETTLE_OVER, fields)
    if was not in (None, fingerprint):
        connection.exec_driver_sql(_MOVE_FORMER, fields)
        connection.exec_driver_sql(_ADD_FORMER, fields)
        connection.exec_driver_sql(_DROP_FORMER, fields)
    return True


def apply_to_opened(
    connection: Connection, id: OperationId, letter: Row[Any], *, after: str, was: str | None, fingerprint: str
) -> bool:
    """Give the record that an earlier edit has opened this message. False: it is not as it has to be any more."""
    fields = named(id) | {"after": after, "was": was, "fingerprint": fingerprint, "queue": letter.queue or ""}
    return bool(execute(connection, _EDIT_OPENED, fields).rowcount == 1)


def became(connection: Connection, id: OperationId, fingerprints: Sequence[str]) -> str | None:
    """The fingerprint of an operation's record that had one of these before a person has edited it; None: it had none of them."""
    if not is_there(connection, "former_fingerprints"):
        return None
    row = execute(connection, _IS_FORMER, named(id) | {"fingerprints": list(fingerprints)}).fetchone()
    return None if row is None else str(row.fingerprint)


def settle(connection: Connection, id: OperationId, fingerprints: Sequence[str], message_id: str) -> None:
    """Settle the row of a request with a former fingerprint, which has been delivered."""
    execute(connection, _SETTLE, named(id) | {"fingerprints": list(fingerprints), "message_id": message_id})


def erase(connection: Connection, id: OperationId) -> None:
    """Erase the messages in the history of an operation's letters."""
    if is_there(connection):
        connection.exec_driver_sql(_ERASE, named(id))
