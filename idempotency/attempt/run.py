"""Claim, run, commit. The file to read first.

    outcome = run(runtime, delivery, policy, body)

`body(attempt)` does the work with `attempt.session`, `attempt.effect` and `attempt.step`, and returns the result. Who
sends the delivery and what becomes of it afterwards is the caller's affair: a Celery worker's (`worker/task.py`), or
that of anything else which is told twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..errors import AttemptsExhausted, Defer, IdempotencyError, LeaseLost, OutcomeInDoubt, PermanentError
from ..observe import metrics
from ..observe.crash_points import crash_point
from ..store import claims
from ..store.answers import Busy, Claimed, Completed, Failed, Mismatch
from ..store.statements import describe
from ..wire.delivery import Delivery
from . import conclusions
from .attempt import Attempt
from .claim import Patience, at_once, claim
from .endings import Ended, Ending, Finished, Release, end_for
from .policy import Policy
from .runtime import Runtime

# A doubt is resolved by claiming again. Each round moves the fence, so five in a row mean something is broken.
DOUBT_ROUNDS = 5
# Until a last look that met a Postgres in trouble is taken again; `defer_budget` bounds how often.
LOOK_PAUSE = 5.0
# Whether the attempt has ended is not known, or not yet: the record knows, and is asked by claiming again.
IN_DOUBT = (LeaseLost, OutcomeInDoubt, DBAPIError, PoolTimeout, SoftTimeLimitExceeded)

Body = Callable[[Attempt], Any]
Outcome = Finished | Ended | Release | Completed | Failed | Mismatch | Busy


def run(runtime: Runtime, delivery: Delivery, policy: Policy, body: Body, patiently: Patience = at_once) -> Outcome:
    """Claim the operation, run its body and commit the result; or say what its record says.

    `patiently` asks the database for as long as the caller can wait. Raises what it raises, and the exception with
    which the process ends; every other exception of the body is an outcome.
    """
    token, ending = secrets.token_hex(16), None
    for _ in range(DOUBT_ROUNDS):
        with metrics.phase(delivery.id.task, "claim"):
            answer = claim(runtime, delivery, token, patiently)
        if not isinstance(answer, Claimed):
            return answer
        attempt = Attempt(runtime, answer, delivery, policy)
        delivery = attempt.delivery
        try:
            ending = _decided_before(ending, attempt) or perform(attempt, body)
            return ending.apply(attempt)
        except IN_DOUBT:
            if isinstance(ending, Release) and ending.ends_process is not None:
                raise ending.ends_process from None  # recovery has the rest
        finally:
            attempt.close()
    raise IdempotencyError(f"{delivery.id.task}: still in doubt after {DOUBT_ROUNDS} rounds")


def perform(attempt: Attempt, body: Body) -> Ending:
    """Run the body and commit its result. What it raises is how the attempt is to end.

    Raises `LeaseLost` and `OutcomeInDoubt`.
    """
    task = attempt.claim.id.task
    try:
        crash_point("claimed")
        if (end := _end_without_body(attempt)) is not None:
            result = _look_once_more(attempt, body, end)
        else:
            crash_point("body.entered")
            with metrics.phase(task, "body"):
                result = body(attempt)
        with metrics.phase(task, "commit"):
            attempt.complete(result)
    except (LeaseLost, OutcomeInDoubt):
        raise
    except BaseException as error:
        return end_for(error, attempt)
    return Finished(attempt.claim, result)


def _decided_before(ending: Ending | None, attempt: Attempt) -> Ending | None:
    """The ending decided before a doubt, if this claim resumes the attempt that decided it: it belongs to no other."""
    return ending if ending is not None and attempt.claim.resumes(ending.decided_under) else None


def _end_without_body(attempt: Attempt) -> PermanentError | None:
    """Why this claim ends the operation instead of running its body, if it does."""
    if attempt.claim.attempts > attempt.policy.max_attempts:
        attempt.note_spent()  # from here on counted by the record: the next deploy may change the limit
    if _is_revoked(attempt):
        return PermanentError("revoked through Celery before it had ended", "revoked")
    if attempt.claim.spent_at is not None:
        return AttemptsExhausted(f"no result after {attempt.claim.spent_at - 1} attempts")
    return None


def _is_revoked(attempt: Attempt) -> bool:
    if attempt.claim.revoked or not attempt.delivery.is_revoked:
        return attempt.claim.revoked
    with attempt.runtime.autocommit() as connection:
        return claims.revoke(connection, attempt.claim.id, attempt.claim.fingerprint, remembered=True)


def _look_once_more(attempt: Attempt, body: Body, end: PermanentError) -> Any:
    """Finish what has happened outside, if asking the provider allows it; begin nothing. Else raise `end`.

    One attempt beyond the last, however often that is given back: a body that kills its process ends with it.
    """
    claimed = attempt.claim
    is_spent = claimed.spent_at is not None and claimed.attempts > claimed.spent_at
    if is_spent or not conclusions.has_acted(claimed.effects):
        raise end
    attempt.ends_as = end
    try:
        result = body(attempt)
    except (LeaseLost, OutcomeInDoubt, Defer):
        raise
    except (OperationalError, PoolTimeout) as error:
        # Postgres is to blame: a look that could not be taken concludes nothing
        raise Defer(LOOK_PAUSE, f"the last look met {describe(error)}") from error
    except Exception as error:
        raise end from error
    if attempt.stopped or attempt.passed_over("begun"):
        raise end  # the body has gone on without what it was refused, or did not come to what is unknown
    return result
