"""What a client is told about the outcome of a request whose handler did not run, or did not finish."""

from __future__ import annotations

import math

from ..attempt.endings import Ended, Release
from ..errors import CallRefused, Defer, PermanentError
from ..store.answers import Busy, Completed, Failed, Foreign, Mismatch
from ..wire import results
from .problems import Answer, problem
from .quota import RETRY_AFTER as QUOTA_RETRY_AFTER
from .quota import QuotaExceeded
from .response import replay

# Seconds until a request is worth sending again after it met a running one, or a Postgres that did not answer.
RETRY_AFTER = 1
_NOT_DUE = "What this request waits for takes a while. Send it again, with the same key."


class AnswerNotStored(Exception):
    """A handler's answer does not end its operation: the next request under the key runs the handler again. Internal."""


def answer_to(outcome: object) -> Answer:
    """The answer to a request by what became of its operation."""
    match outcome:
        case Completed(result=results.ERASED):
            return problem(
                410,
                "erased",
                "Done before; its data was erased",
                "A request with this Idempotency-Key was carried out once, and its answer has been erased. Use a new key for a new request.",
            )
        case Completed():
            return replay(outcome.value())
        case Busy(due_in=float() as seconds):
            return unavailable(_NOT_DUE, seconds)
        case Busy():
            return problem(
                409,
                "request_in_progress",
                "The same request is being carried out",
                "A request with this Idempotency-Key has not been answered yet. Send it again, with the same key.",
                retry_after=RETRY_AFTER,
            )
        case Mismatch():
            return problem(
                422,
                "idempotency_key_reused",
                "Idempotency-Key was used for another request",
                "This key came with another method, path, query or body before. Use a new key for a new request.",
            )
        case Ended(error=PermanentError(code="cancelled")) | Failed(code="cancelled"):
            return problem(
                500,
                "operation_failed",
                "The request was cancelled",
                "A person has ended it before it was finished. Repeating does not help; use a new key.",
                code="cancelled",
            )
        case Ended(error=PermanentError(code=code)) | Failed(code=code):
            return problem(
                500,
                "operation_failed",
                "The request ended without success",
                "What it did outside is not known or not complete. A person has to resolve it; repeating does not help.",
                code=code,
            )
        case Foreign():
            return problem(
                500,
                "service_mismatch",
                "Idempotency-Key belongs to another application",
                "Another application on this database uses this key. Give the two applications different tenants.",
            )
        case Release(cause=AnswerNotStored(), delay=delay):
            return unavailable("The answer was not completed. Nothing was kept; send the request again.", delay)
        case Release(cause=Defer(), delay=delay):
            return unavailable(_NOT_DUE, delay)
        case Release(delay=delay):
            return unavailable("The request could not be committed. Nothing was kept; send it again.", delay)
        case QuotaExceeded(what=what, limit=limit):
            return problem(
                429,
                "quota_exceeded",
                "Quota used up",
                f"This tenant's requests may keep {limit} {what} at a time. Keys that were used before are still answered.",
                retry_after=QUOTA_RETRY_AFTER,
                limit=limit,
                unit=what,
            )
        case CallRefused():
            return problem(400, "body_malformed", "Malformed body", str(outcome))
    return unavailable("It is not known whether the request was carried out. Send it again, with the same key.")


def unavailable(detail: str, delay: float = RETRY_AFTER) -> Answer:
    """503, with the number of seconds after which the same request may be sent again."""
    return problem(503, "unavailable", "Try again", detail, retry_after=max(math.ceil(delay), RETRY_AFTER))
