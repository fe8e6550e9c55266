"""What a person's word about an operation that has failed changes of its dead letter."""

from __future__ import annotations

from sqlalchemy import Connection

from ..errors import EffectUnknown, Unfinished
from ..wire.keys import OperationId
from . import letters
from .ends import FailedEnd
from .record import is_open

_UPDATE_OPEN_LETTER = f"""
UPDATE idempotency.dead_letters SET reason = %(reason)s, last_error = %(error)s
WHERE tenant = %(tenant)s AND task = %(task)s AND key = %(key)s AND generation = %(generation)s
  AND {is_open()} AND source <> 'relay' AND reason NOT IN ('fingerprint_mismatch', 'service_mismatch', %(reason)s)
"""


# A saga that has gone on from the end may have closed it, or two people, for what it said then; what it says now needs a person.
_REOPEN_LETTER = """
WITH opened AS (
    UPDATE idempotency.dead_letters SET status = 'open', closed_at = NULL, reason = %(reason)s, last_error = %(error)s,
        alerted_at = NULL, alert_logged_at = NULL
    WHERE id = (
        SELECT max(id) FROM idempotency.dead_letters
        WHERE tenant = %(tenant)s AND task = %(task)s AND key = %(key)s AND generation = %(generation)s
          AND source <> 'relay' AND reason NOT IN ('fingerprint_mismatch', 'service_mismatch')
        HAVING NOT bool_or(status = 'open'))
    RETURNING id
)
DELETE FROM idempotency.discards WHERE letter = (SELECT id FROM opened)
"""


# The letter may be purged: the record lives longer, by each word about it.
_STORE_LETTER = letters.insert_sql(
    "operation",
    {name: name for name in ("tenant", "task", "key", "generation", "fingerprint", "queue", "first_error", "attempts")}
    | {"header_task": "task", "consumer_service": "service", "payload": "message"}
    | {"reason": "%(reason)s", "last_error": "%(error)s"}
    | letters.of_earlier("r.tenant", "r.task", "r.key"),
    rows=f"""FROM idempotency.records r
WHERE tenant = %(tenant)s AND task = %(task)s AND key = %(key)s AND generation = %(generation)s AND NOT EXISTS (
    SELECT FROM idempotency.dead_letters d
    WHERE (d.tenant, d.task, d.key, d.generation) = (r.tenant, r.task, r.key, r.generation) AND {is_open("d")}
      AND d.reason NOT IN ('fingerprint_mismatch', 'service_mismatch'))""",
)


def update_open_letter(
    connection: Connection, id: OperationId, generation: int, end: FailedEnd, *, reason: str
) -> None:
    """Give a failed operation's open letter the reason of its corrected end, so that it is not replayed for the old one.

    An end in doubt opens it again if it was closed, and stores another one if it is purged.
    """
    fields = {"tenant": id.tenant, "task": id.task, "key": id.key, "generation": generation}
    fields |= {"reason": reason, "error": end.error}
    connection.exec_driver_sql(_UPDATE_OPEN_LETTER, fields)
    if end.code in (EffectUnknown.default_code, Unfinished.default_code):
        connection.exec_driver_sql(_REOPEN_LETTER, fields)
        connection.exec_driver_sql(_STORE_LETTER, fields)
