"""The last look: how a claim ends its operation instead of trying again, without leaving half of it done outside.

A claim whose attempts are used up, or that was revoked, begins nothing new. But an effect may have happened, or may be
of unknown outcome. Then the body runs once more to finish that, if asking the provider allows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..errors import AttemptsExhausted, Defer, LeaseLost, OutcomeInDoubt, PermanentError
from ..reasons import REVOKED
from ..store import claims
from ..store.statements import describe
from ..text import number_of
from . import conclusions
from .attempt import Attempt

# Seconds until a last look that met a Postgres in trouble is taken again; `defer_budget` bounds how often.
LOOK_PAUSE = 5.0


def reason_to_end(attempt: Attempt) -> PermanentError | None:
    """Why this claim ends the operation instead of trying again, if it does."""
    if attempt.claim.attempts > attempt.policy.max_attempts:
        attempt.note_spent()  # the record keeps it: the next deploy may change the limit
    if _is_revoked(attempt):
        return conclusions.NotDeclined("revoked through Celery before it had ended", REVOKED)
    if attempt.claim.spent_at is not None:
        died = "; the process of the last one died, or was cut off" if attempt.claim.taken_over else ""
        return AttemptsExhausted(f"no result after {number_of(attempt.claim.spent_at - 1, 'attempt')}{died}")
    return None


def take_last_look(attempt: Attempt, body: Callable[[Attempt], Any], end: PermanentError) -> Any:
    """Finish what has happened outside and return the result, or raise `end`. Raises `Defer` if Postgres is in trouble.

    Taken in one attempt beyond the last, even if that attempt is given back: a body that kills its process ends with it.
    """
    claimed = attempt.claim
    is_too_late = claimed.spent_at is not None and claimed.attempts > claimed.spent_at
    if is_too_late or not conclusions.has_acted(claimed.effects):
        raise end
    attempt.ends_as = end
    try:
        result = body(attempt)
    except (LeaseLost, OutcomeInDoubt, Defer):
        raise
    except (OperationalError, PoolTimeout) as error:
        # Postgres is to blame: a look that could not be taken decides nothing.
        raise Defer(LOOK_PAUSE, f"the last look met {describe(error)}") from error
    except Exception as error:
        raise _because_of(error, end) from error
    if attempt.stopped or attempt.passed_over("begun"):
        raise end  # the body swallowed the error over a new effect, or did not reach one of unknown outcome
    return result


def _because_of(error: Exception, end: PermanentError) -> PermanentError:
    """The end with what the body has met: nobody else says why an effect stays of unknown outcome."""
    return end if error is end else type(end)(f"{end.message}; the last look met {describe(error)}", end.code)


def _is_revoked(attempt: Attempt) -> bool:
    if attempt.claim.revoked or not attempt.delivery.is_revoked:
        return attempt.claim.revoked
    with attempt.runtime.autocommit(attempt.claim.id.tenant) as connection:
        return claims.revoke(
            connection,
            attempt.claim.id,
            attempt.claim.fingerprint,
            service=attempt.runtime.settings.service,
            remembered=True,
        )
