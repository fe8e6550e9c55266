"""How an operation failed for a bad input."""

from __future__ import annotations

import json

from sqlalchemy import Connection, text

from tests.support import operations as op
from tests.support.refused_messages import SECRET


def failed(connection: Connection, *, over_an_effect: bool) -> tuple[str, str, int]:
    """What ended the one failed record, and its attempts. Over an effect that happened it is unfinished for that cause."""
    row = connection.execute(text("SELECT * FROM idempotency.records WHERE status = 'failed'")).one()
    (letter,) = op.dead_letters(connection)
    error = json.loads(row.error)
    assert error["code"] == letter.reason
    assert SECRET not in row.error + letter.last_error + letter.first_error
    cause = error["cause"] if over_an_effect else error
    assert (error["code"] == "unfinished") == over_an_effect
    return cause["code"], cause["message"], row.attempts
