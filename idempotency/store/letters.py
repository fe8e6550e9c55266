"""A dead letter, as it is stored: in the transaction that ends its operation, or for a message that no worker can run.

Neither the end nor the letter exists without the other. What people do with letters is in `dead_letters.py`.
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
from .ends import FailedEnd


def storing(source: str, columns: Mapping[str, str], *, rows: str = "") -> str:
    """The SQL that stores a dead letter for each of `rows`, or one: nothing else inserts into the table.

    `columns` are the letter's, each with its value in SQL. What is stored already stays as it is.
    """
    names, values = ", ".join(columns), ", ".join(columns.values())
    return (
        f"INSERT INTO idempotency.dead_letters (source, {names})\nSELECT '{source}', {values}\n{rows}\n"
        "ON CONFLICT DO NOTHING"
    )


def storing_rows(rows: str, *, reason: str, error: str, attempts: str, generation: str = "NULL") -> str:
    """The SQL that stores a dead letter for each of some rows of the outbox; all but `rows` are values in SQL."""
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
    }
    return storing("relay", columns, rows=f"FROM {rows}")


# first_error comes from the record, which knows all attempts.
_STORE = storing(
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
    },
)

# An outbox row knows the operation of its message, even where the message's task is not known here. One letter for
# each outbox row and for each message, however often the broker hands it out.
_STORE_MESSAGE = (
    storing(
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
        },
        rows="FROM (SELECT) one LEFT JOIN idempotency.outbox o ON o.message_id = %(message_id)s",
    )
    + " RETURNING id"
)

# A letter from before its operation was known (an old worker had no such task, say) becomes the operation's: it is
# one message, and a second letter would leave the first one open for ever.
_ADOPT = """
UPDATE idempotency.dead_letters d
SET tenant = %(tenant)s, task = %(task)s, key = %(key)s, generation = %(generation)s,
    fingerprint = %(fingerprint)s, queue = %(queue)s, header_task = %(header_task)s, consumer_service = %(service)s,
    reason = %(reason)s, first_error = coalesce(d.first_error, %(first_error)s), last_error = %(last_error)s,
    attempts = %(attempts)s, headers = %(headers)s, payload = %(payload)s, alerted_at = NULL
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
    id: OperationId,
    delivery: Delivery,
    claim: Claimed,
    *,
    reason: str,
    last_error: str,
    service: str | None = None,
) -> None:
    """Store the dead letter of a failing operation, in the failing transaction."""
    _store(connection, id, delivery, claim.generation, reason, last_error, claim.attempts, service)


def store_refusal(
    connection: Connection,
    id: OperationId,
    delivery: Delivery,
    *,
    generation: int,
    reason: str,
    error: str,
    service: str | None = None,
) -> None:
    """Store a delivery that was refused while the record under its key stays as it is (another fingerprint)."""
    _store(connection, id, delivery, generation, reason, error, 0, service)


@dataclass(frozen=True, slots=True)
class BrokerLetter:
    """A message that no worker will run, as it is stored; `payload` is a message's text (`Message.to_text`)."""

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
    """Store a message of a dead-letter queue. Returns the letter's id; None when it is stored already."""
    id: int | None = connection.exec_driver_sql(_STORE_MESSAGE, asdict(letter)).scalar_one_or_none()
    return id


def store_end(connection: Connection, letter: BrokerLetter) -> int | None:
    """Store the message whose operation this transaction ends; its open letter, if it has one, becomes this one."""
    id: int | None = connection.exec_driver_sql(_ADOPT, asdict(letter)).scalar_one_or_none()
    return id if id is not None else store_message(connection, letter)


def _store(
    connection: Connection,
    id: OperationId,
    delivery: Delivery,
    generation: int,
    reason: str,
    last_error: str,
    attempts: int,
    service: str | None,
) -> None:
    connection.exec_driver_sql(
        _STORE,
        {
            "tenant": id.tenant,
            "task": id.task,
            "key": id.key,
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
    """The headers of a stored message; none of one that cannot be read, which is no reason to keep it from its letter."""
    try:
        return Message.from_text(message).headers
    except ValueError:
        return {}


_SAY_AGAIN = """
UPDATE idempotency.dead_letters SET reason = %(reason)s, last_error = %(error)s
WHERE tenant = %(tenant)s AND task = %(task)s AND key = %(key)s AND generation = %(generation)s
  AND status = 'open' AND source <> 'relay' AND reason <> 'fingerprint_mismatch' AND reason <> %(reason)s
"""


def say_again(connection: Connection, id: OperationId, generation: int, end: FailedEnd, *, reason: str) -> None:
    """Let the open letter of a failed operation say how it has ended now, so that no one replays it for its old reason."""
    connection.exec_driver_sql(
        _SAY_AGAIN,
        {
            "tenant": id.tenant,
            "task": id.task,
            "key": id.key,
            "generation": generation,
            "reason": reason,
            "error": end.error,
        },
    )


def headers_text(headers: Mapping[str, Any]) -> str:
    """The headers of a message as they are stored: JSON, with anything that JSON does not know as its type's name."""
    return json.dumps(headers, default=lambda value: f"<{type(value).__name__}>")


# Counted before the try, and by itself: one that ends the process counts too, and so does one that is rolled back.
_COUNT_TRY = """
INSERT INTO idempotency.dead_letter_tries AS t (digest, tries) VALUES (%(digest)s, 1)
ON CONFLICT (digest) DO UPDATE SET tries = t.tries + %(counts)s
RETURNING tries
"""
_FORGET_TRIES = "DELETE FROM idempotency.dead_letter_tries WHERE digest = %(digest)s"


def count_try(connection: Connection, digest: str, *, counts: bool) -> int:
    """Note that the application's part of a letter's end is about to be tried. Returns the number of tries.

    `counts` is false for a try whose predecessor was interrupted by an outage: it is the same one again.
    """
    fields = {"digest": digest, "counts": int(counts)}
    tries: int = connection.exec_driver_sql(_COUNT_TRY, fields).scalar_one()
    return tries


def forget_tries(connection: Connection, digest: str) -> None:
    """Forget how often a letter's end was tried: it is stored."""
    connection.exec_driver_sql(_FORGET_TRIES, {"digest": digest})
