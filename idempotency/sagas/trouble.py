"""Errors of a saga's code that say nothing about the saga, and those that end it for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..attempt.policy import Policy
from ..errors import Again, Defer, LeaseLost, OutcomeInDoubt, PermanentError
from ..store.statements import describe

# Trouble of an attempt, which the next one may not have: it decides nothing.
TRANSIENT = (LeaseLost, OutcomeInDoubt, OperationalError, PoolTimeout, SoftTimeLimitExceeded)


def final_as_refusal(policy: Policy, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function; an error that fails the task for good is raised as a `PermanentError`, which can be recorded."""
    try:
        return fn(*args, **kwargs)
    except (PermanentError, Again, Defer, *TRANSIENT):
        raise
    except policy.permanent_errors as error:
        raise PermanentError(describe(error), type(error).__name__) from error
