"""What the command line says of an error: one line, without addresses."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError, OperationalError

from ..errors import IdempotencyError
from ..observe.unreachable import WRONG_ADDRESS, reason
from ..store.refused import INSUFFICIENT_PRIVILEGE, remedy
from ..store.rights import OPERATOR
from ..store.statements import describe, sqlstate


def sentence(error: Exception) -> str | None:
    """What to tell the operator; None if the error is a defect of ours."""
    match error:
        case IdempotencyError():
            return str(error)
        case OperationalError():
            return _no_answer(error)
        case DBAPIError() if sqlstate(error) == INSUFFICIENT_PRIVILEGE:
            if "idempotency.tenant" in describe(error):
                return (
                    f"{describe(error)}; log in with a role that sees all tenants, as {OPERATOR} does (docs/tenants.md)"
                )
            return f"{remedy(error)}; where there are roles, commands are {OPERATOR}'s, and migrations the owner's (docs/tenants.md)"
        case DBAPIError():
            return remedy(error) or f"the database refused: {describe(error)}"
    return None


def _no_answer(error: OperationalError) -> str:
    """Why the database did not do what was asked, without SQLAlchemy's own text, which would show the address."""
    if sqlstate(error) is not None:  # it did answer: a lock timed out, say
        return f"the database refused: {describe(error)}"
    why = reason(error)
    return f"idempotency_database_url: {why}" if why in WRONG_ADDRESS else f"the database did not answer: {why}"
