"""Errors of a saga's code that say nothing about the saga, and those that end it for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..attempt.policy import Policy
from ..attempt.runtime import Runtime
from ..errors import Again, Defer, IdempotencyError, LeaseLost, OutcomeInDoubt, PermanentError, ResultErased
from ..store.saga_steps import Recorded
from ..store.statements import describe

# Trouble of an attempt, which the next one may not have: it decides nothing.
TRANSIENT = (LeaseLost, OutcomeInDoubt, OperationalError, PoolTimeout, SoftTimeLimitExceeded)


class CannotRead(Exception):
    """What a call has returned cannot be read: an extra or a setting is missing here, or the place of large results fails."""


def result_of(runtime: Runtime, row: Recorded) -> Any:
    """What a call has returned. Raises `CannotRead`, which is no reason to undo anything: the saga stops, and is tried again."""
    text = row.result if row.entry is None else row.entry.get("result")
    try:
        return runtime.read_result(text or "null")
    except (ResultErased, SoftTimeLimitExceeded):
        raise
    except Exception as error:
        # our own errors show no address; another library's text may
        why = describe(error) if isinstance(error, IdempotencyError) else type(error).__name__
        raise CannotRead(f"the result of {row.name!r} cannot be read here: {why}") from error


def final_as_refusal(policy: Policy, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function; an error that fails the task for good is raised as a `PermanentError`, which can be recorded."""
    try:
        return fn(*args, **kwargs)
    except (PermanentError, Again, Defer, *TRANSIENT):
        raise
    except policy.permanent_errors as error:
        raise PermanentError(describe(error), type(error).__name__) from error
