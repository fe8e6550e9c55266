"""Claim, run, commit. The file to read first, from top to bottom.

    outcome = run(runtime, delivery, policy, body)

`body(attempt)` does the work with `attempt.session`, `attempt.effect` and `attempt.step`, and returns the result. The
caller decides where the delivery comes from and what happens to it afterwards: a Celery worker (`worker/task.py`), or
anything else that may be asked twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..errors import IdempotencyError, LeaseLost, OutcomeInDoubt
from ..framework import framework
from ..observe.crash_points import crash_point
from ..store.answers import Busy, Claimed, Completed, Failed, Foreign, Mismatch, Stale
from ..wire.delivery import Delivery
from . import tracing
from .attempt import Attempt
from .claim import Patience, at_once, claim
from .endings import Ended, Ending, Fail, Finished, Release, Waiting, end_for
from .last_look import reason_to_end, take_last_look
from .policy import Policy
from .runtime import Runtime

# A doubt is resolved by claiming again. Each round moves the fence, so five in a row mean that something is broken.
DOUBT_ROUNDS = 5
# After these it is not known whether the attempt has ended. The record knows; claiming again asks it.
IN_DOUBT = (LeaseLost, OutcomeInDoubt, DBAPIError, PoolTimeout, SoftTimeLimitExceeded)

Body = Callable[[Attempt], Any]
Outcome = Finished | Ended | Release | Completed | Failed | Mismatch | Foreign | Stale | Busy


def run(
    runtime: Runtime,
    delivery: Delivery,
    policy: Policy,
    body: Body,
    patiently: Patience = at_once,
    new_attempt: Callable[[Runtime, Claimed, Delivery, Policy], Attempt] = Attempt,
    token: str | None = None,
    claimed: Claimed | None = None,
) -> Outcome:
    """Claim the operation, run its body and commit the result; or answer from its record without running anything.

    `patiently` asks Postgres for as long as the caller can wait. Exceptions of the body are outcomes. Raises what
    `patiently` raises, the exception that ends the process (`SystemExit`, `KeyboardInterrupt`), and `IdempotencyError`
    after `DOUBT_ROUNDS` rounds without an answer; and `RuntimeError` if the runtime is closed. `token`: a batch may have
    claimed the operation under it. `claimed`: a batch has, and the first round uses that claim.
    """
    runtime.check_open()
    rounds = partial(_rounds, runtime, delivery, policy, body, patiently, new_attempt, token, claimed)
    return rounds() if runtime.traces is None else tracing.traced(runtime.traces, runtime, delivery, rounds)


def _rounds(
    runtime: Runtime,
    delivery: Delivery,
    policy: Policy,
    body: Body,
    patiently: Patience,
    new_attempt: Callable[[Runtime, Claimed, Delivery, Policy], Attempt],
    token: str | None,
    claimed: Claimed | None,
) -> Outcome:
    is_in_doubt, ending = token is not None, None
    token = token or secrets.token_hex(16)
    for _ in range(DOUBT_ROUNDS):
        answer = claimed or claim(runtime, delivery, token, patiently, again=is_in_doubt)
        claimed, is_in_doubt = None, True
        if not isinstance(answer, Claimed):
            return answer
        attempt = None
        try:
            attempt = new_attempt(runtime, answer, delivery, policy)
            delivery = attempt.delivery
            if runtime.traces is not None:
                tracing.note_attempt(runtime.traces, attempt)
            patiently(attempt.prepare)
            ending = _decided_before(ending, attempt) or _run_and_commit(attempt, body)
            return ending.apply(attempt) if runtime.traces is None else tracing.applied(runtime.traces, ending, attempt)
        except Waiting:
            return Release(answer, 0.0, None, give_back=True)  # as it is recorded already
        except IN_DOUBT:
            if attempt is None:
                raise  # a time limit, which comes once: what ran now would have none
            if isinstance(ending, Release) and ending.ends_process is not None:
                raise ending.ends_process from None  # recovery does the rest
        finally:
            _close(runtime, answer, attempt)
    raise IdempotencyError(f"{delivery.id.task}: still in doubt after {DOUBT_ROUNDS} rounds")


def _close(runtime: Runtime, claimed: Claimed, attempt: Attempt | None) -> None:
    """Renew nothing under the claim any more, also if a time limit interrupts the making of the attempt or its closing."""
    try:
        if attempt is not None:
            attempt.close()
    finally:
        runtime.heartbeat.drop(claimed.token)


def _run_and_commit(attempt: Attempt, body: Body) -> Ending:
    """Run the body and commit its result. Any exception becomes the ending that it means for the operation.

    The ending is not applied yet. Raises `LeaseLost` and `OutcomeInDoubt`.
    """
    try:
        crash_point("claimed")
        with framework().joined(lambda: attempt.session, ends=True):
            result = _run_body(attempt, body)
            with attempt.runtime.phase(attempt.claim.id.task, "commit"):
                attempt.complete(result)
    except (LeaseLost, OutcomeInDoubt, Waiting):
        raise
    except BaseException as error:
        return end_for(error, attempt)
    return Finished(attempt.claim, result)


def _run_body(attempt: Attempt, body: Body) -> Any:
    if (end := reason_to_end(attempt)) is not None:
        return take_last_look(attempt, body, end)
    crash_point("body.entered")
    with attempt.runtime.phase(attempt.claim.id.task, "body"):
        return body(attempt)


def _decided_before(ending: Ending | None, attempt: Attempt) -> Ending | None:
    """Reuse an ending decided before a doubt only if this claim resumes that attempt."""
    if ending is None or (attempt.fails_by_running and isinstance(ending, Fail)):
        return None
    return ending if attempt.claim.resumes(ending.decided_under) else None
