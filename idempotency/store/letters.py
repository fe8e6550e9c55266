"""Storing dead letters, for a failed operation or for a message that no worker can run.

The letter is stored in the transaction that fails the operation, so neither exists without the other. What people do
with letters is in `dead_letters.py` and `discards.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection

from ..wire.delivery import Delivery
from ..wire.keys import OperationId
from ..wire.message import Message
from .answers import Claimed
from .record import is_open


def insert_sql(source: str, columns: Mapping[str, str], *, rows: str = "") -> str:
    """The only SQL that inserts dead letters: one, or one for each of `rows`. Existing letters stay as they are.

    `columns` maps column names to SQL expressions.
    """
    names, values = ", ".join(columns), ", ".join(columns.values())
    return (
        f"INSERT INTO idempotency.dead_letters (source, {names})\nSELECT '{source}', {values}\n{rows}\n"
        "ON CONFLICT DO NOTHING"
    )


def insert_for_rows_sql(rows: str, *, reason: str, error: str, attempts: str, generation: str = "NULL") -> str:
    """The SQL that inserts a dead letter for each of these outbox rows. All arguments but `rows`, a name, are SQL expressions."""
    columns = {
        "outbox_id": "id",
        "message_id": "message_id",
        "tenant": "tenant",
        "task": "task",
        "key": "key",
        "generation": generation,
        "fingerprint": "fingerprint",
        "queue": "queue",
        "header_task": "task",
        "reason": reason,
        "first_error": error,
        "last_error": error,
        "attempts": attempts,
        "payload": "message",
        "consumer_service": "%(service)s",
        **of_earlier(f"{rows}.tenant", f"{rows}.task", f"{rows}.key"),
    }
    return insert_sql("relay", columns, rows=f"FROM {rows}")


def of_earlier(tenant: str, task: str, key: str) -> dict[str, str]:
    """What the earlier letters of an operation say of the saga that has used it: they are purged before an open one."""
    earlier = f"FROM idempotency.dead_letters e WHERE (e.tenant, e.task, e.key) = ({tenant}, {task}, {key})"
    return {
        "used_by": f"(SELECT max(e.used_by) {earlier})",
        "is_undone": f"coalesce((SELECT bool_or(e.is_undone) {earlier}), false)",
    }


# first_error comes from the record, which has seen all attempts.
_STORE = insert_sql(
    "operation",
    {
        "tenant": "%(tenant)s",
        "task": "%(task)s",
        "key": "%(key)s",
        "generation": "%(generation)s",
        "fingerprint": "%(fingerprint)s",
        "queue": "%(queue)s",
        "header_task": "%(task)s",
        "consumer_service": "%(service)s",
        "reason": "%(reason)s",
        "first_error": """coalesce((SELECT first_error FROM idempotency.records WHERE tenant = %(tenant)s
                             AND task = %(task)s AND key = %(key)s
                             AND fingerprint = %(fingerprint)s), %(last_error)s)""",
        "last_error": "%(last_error)s",
        "attempts": "%(attempts)s",
        "headers": "%(headers)s",
        "payload": "%(message)s",
        **of_earlier("%(tenant)s", "%(task)s", "%(key)s"),
    },
)

# The outbox row gives the operation even if this process does not know the task. At most one letter per outbox row and
# per message, however often the broker delivers it.
_STORE_MESSAGE = (
    insert_sql(
        "broker",
        {
            "outbox_id": "o.id",
            "message_id": "%(message_id)s",
            "tenant": "coalesce(%(tenant)s, o.tenant)",
            "task": "coalesce(%(task)s, o.task)",
            "key": "coalesce(%(key)s, o.key)",
            "generation": "%(generation)s::int",
            "fingerprint": "coalesce(%(fingerprint)s, o.fingerprint)",
            "queue": "%(queue)s",
            "header_task": "%(header_task)s",
            "consumer_service": "%(service)s",
            "reason": "%(reason)s",
            "first_error": "coalesce(%(first_error)s, %(last_error)s)",
            "last_error": "%(last_error)s",
            "attempts": "%(attempts)s",
            "headers": "%(headers)s",
            "payload": "%(payload)s",
            "digest": "%(digest)s",
            **of_earlier("coalesce(%(tenant)s, o.tenant)", "coalesce(%(task)s, o.task)", "coalesce(%(key)s, o.key)"),
        },
        rows="FROM (SELECT) one LEFT JOIN idempotency.outbox o ON o.message_id = %(message_id)s",
    )
    + " RETURNING id"
)

# A letter that was stored before its operation was known (an old worker lacked the task, say) now becomes the
# operation's letter: it is the same message, and a second letter would leave the first open forever.
_ADOPTED = ", ".join(f"{name} = {said}" for name, said in of_earlier("%(tenant)s", "%(task)s", "%(key)s").items())
_ADOPT = f"""
UPDATE idempotency.dead_letters d
SET tenant = %(tenant)s, task = %(task)s, key = %(key)s, generation = %(generation)s,
    fingerprint = %(fingerprint)s, queue = %(queue)s, header_task = %(header_task)s, consumer_service = %(service)s,
    reason = %(reason)s, first_error = coalesce(d.first_error, %(first_error)s), last_error = %(last_error)s,
    attempts = %(attempts)s, headers = %(headers)s, payload = %(payload)s,
    alerted_at = NULL, alert_logged_at = NULL, {_ADOPTED}
WHERE d.id = (
    SELECT unnamed.id FROM idempotency.dead_letters unnamed
    WHERE unnamed.status = 'open' AND unnamed.generation IS NULL
      AND (unnamed.digest = %(digest)s
        OR unnamed.outbox_id = (SELECT o.id FROM idempotency.outbox o WHERE o.message_id = %(message_id)s))
    ORDER BY unnamed.id LIMIT 1 FOR UPDATE)
RETURNING d.id
"""


def store_failure(
    connection: Connection,
    delivery: Delivery,
    claim: Claimed,
    *,
    reason: str,
    last_error: str,
    service: str,
) -> None:
    """Store the dead letter of a failing operation, in the transaction that fails it."""
    _store(connection, delivery, claim.generation, reason, last_error, claim.attempts, service)


def store_refusal(
    connection: Connection,
    delivery: Delivery,
    *,
    generation: int,
    reason: str,
    error: str,
    service: str,
) -> None:
    """Store a delivery that was refused because of its fingerprint; the record under its key does not change."""
    _store(connection, delivery, generation, reason, error, 0, service)


@dataclass(frozen=True, slots=True)
class BrokerLetter:
    """The dead letter of a message that no worker will run; `payload` is `Message.to_text`."""

    message_id: str | None
    tenant: str | None
    task: str | None
    key: str | None
    generation: int | None
    fingerprint: str | None
    queue: str | None
    header_task: str | None
    service: str
    reason: str
    first_error: str | None
    last_error: str
    attempts: int
    headers: str
    payload: str
    digest: str


def store_message(connection: Connection, letter: BrokerLetter) -> int | None:
    """Store a message from a dead-letter queue. Returns the letter's id; None if it is stored already."""
    id: int | None = connection.exec_driver_sql(_STORE_MESSAGE, asdict(letter)).scalar_one_or_none()
    return id


def store_end(connection: Connection, letter: BrokerLetter) -> int | None:
    """Store the message of the operation that this transaction ends, or update its open letter if it has one."""
    id: int | None = connection.exec_driver_sql(_ADOPT, asdict(letter)).scalar_one_or_none()
    return id if id is not None else store_message(connection, letter)


def _store(
    connection: Connection,
    delivery: Delivery,
    generation: int,
    reason: str,
    last_error: str,
    attempts: int,
    service: str,
) -> None:
    connection.exec_driver_sql(
        _STORE,
        {
            "tenant": delivery.id.tenant,
            "task": delivery.id.task,
            "key": delivery.id.key,
            "generation": generation,
            "fingerprint": delivery.fingerprint,
            "queue": delivery.queue,
            "service": service,
            "reason": reason,
            "last_error": last_error,
            "attempts": attempts,
            "headers": headers_text({**headers_of(delivery.message), **delivery.headers}),
            "message": delivery.message,
        },
    )


def headers_of(message: str) -> dict[str, Any]:
    """The headers of a stored message; empty if it cannot be read, since it needs its letter all the same."""
    try:
        return Message.from_text(message).headers
    except ValueError:
        return {}


def kept_delivery(id: OperationId, record: Any, arguments: Mapping[str, Any]) -> Delivery:
    """The delivery that a record has kept, for an operation that ends without one."""
    headers = headers_of(record.message)
    task_id = str(headers.get("id", ""))
    return Delivery(id, record.fingerprint, arguments, task_id, record.message, headers, record.queue)


_CLOSE = f"""
UPDATE idempotency.dead_letters SET status = 'replayed', closed_at = clock_timestamp()
WHERE tenant = %(tenant)s AND task = %(task)s AND key = %(key)s AND {is_open()}
  AND CASE WHEN %(reason)s::text IS NULL THEN reason NOT IN ('fingerprint_mismatch', 'service_mismatch')
           ELSE reason = %(reason)s END
"""


def close(connection: Connection, id: OperationId, reason: str | None) -> None:
    """Close an operation's letter of this reason, or all but those of other requests under its key: what it says is over."""
    connection.exec_driver_sql(_CLOSE, {"tenant": id.tenant, "task": id.task, "key": id.key, "reason": reason})


_CLOSE_UNDONE = """
UPDATE idempotency.dead_letters
SET is_undone = true, used_by = %(saga)s, status = CASE status WHEN 'open' THEN 'replayed' ELSE status END,
    closed_at = coalesce(closed_at, clock_timestamp())
WHERE tenant = %(tenant)s AND task = %(task)s AND key = %(key)s
"""


def close_undone(connection: Connection, id: OperationId, saga: OperationId) -> None:
    """Close the letters of an operation that a person has undone by hand: a replay would do it again, also once `saga` is purged."""
    fields = {"tenant": id.tenant, "task": id.task, "key": id.key, "saga": f"{saga.task} {saga.key}"}
    connection.exec_driver_sql(_CLOSE_UNDONE, fields)


_UPDATE_ERROR = f"""
UPDATE idempotency.dead_letters SET last_error = %(error)s
WHERE tenant = %(tenant)s AND task = %(task)s AND key = %(key)s AND {is_open()} AND reason = %(reason)s
  AND last_error IS DISTINCT FROM %(error)s
"""


def update_error(connection: Connection, id: OperationId, reason: str, error: str) -> None:
    """Make an operation's open letter of this reason show the present error."""
    fields = {"tenant": id.tenant, "task": id.task, "key": id.key, "reason": reason, "error": error}
    connection.exec_driver_sql(_UPDATE_ERROR, fields)


def headers_text(headers: Mapping[str, Any]) -> str:
    """A message's headers as JSON; values that JSON does not support become their type's name."""
    return json.dumps(headers, default=lambda value: f"<{type(value).__name__}>")


# Counted before the try, in its own transaction, so that a try that kills the process or is rolled back counts too.
_COUNT_TRY = """
INSERT INTO idempotency.dead_letter_tries AS t (digest, tries) VALUES (%(digest)s, 1)
ON CONFLICT (digest) DO UPDATE SET tries = t.tries + %(counts)s
RETURNING tries
"""
_FORGET_TRIES = "DELETE FROM idempotency.dead_letter_tries WHERE digest = %(digest)s"


def count_try(connection: Connection, digest: str, *, counts: bool) -> int:
    """Count a try to run `on_failed` and the undos for a letter. Returns the number of tries.

    `counts` is false if an outage interrupted the previous try, which this one repeats.
    """
    fields = {"digest": digest, "counts": int(counts)}
    tries: int = connection.exec_driver_sql(_COUNT_TRY, fields).scalar_one()
    return tries


def forget_tries(connection: Connection, digest: str) -> None:
    """Delete the count of tries, once the letter is stored."""
    connection.exec_driver_sql(_FORGET_TRIES, {"digest": digest})
