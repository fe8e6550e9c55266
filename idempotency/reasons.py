"""Why a dead letter is there, and what an alert or alarm is about: every code that the library itself writes.

Each has a page in docs/runbooks, named like the code (`page_of`). A code of any other spelling is a provider's or the
application's own: that work was declined, or ended by an exception in the task's `permanent_errors`, whose class it names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .errors import EffectUnknown, FingerprintMismatch, PermanentError, ServiceMismatch, StoredRefusal

# ---------------------------------------------------------------- what ends an operation, besides the classes of errors

CANCELLED, REVOKED, ABANDONED, CALL_REFUSED = "cancelled", "revoked", "abandoned", "call_refused"
# Of a saga that was undone for a doubt which is none any more.
RESOLVED = "resolved"
# Of a saga whose call has handed over to another task, whose end it does not know.
REPLACED = "replaced"
# The operation has ended as it should, and the application's rows do not say so.
ON_FAILED_ERROR = "on_failed_error"
# An outbox row that no broker takes, whose operation has not begun.
UNPUBLISHABLE = "unpublishable"
# An HTTP handler has answered with this status after an effect.
HTTP_STATUS = "http_"

# ---------------------------------------------------------------- why a saga goes no further

SAGA_MISMATCH, COMPENSATION_FAILED, RESULT_UNREADABLE = "saga_mismatch", "compensation_failed", "result_unreadable"
OF_SAGAS = (SAGA_MISMATCH, COMPENSATION_FAILED, RESULT_UNREADABLE, EffectUnknown.default_code)

# ---------------------------------------------------------------- why no worker runs a message

# It belongs to no operation, whatever it says.
UNSIGNED, ALTERED, BEYOND_LIMIT = "unsigned", "altered", "beyond_limit"
UNHANDLED = "unhandled"
# It is a copy, and not how its operation ends.
EXPIRED_EARLY = "expired_early"
# Its tenant is of another cell.
OTHER_CELL = "other_cell"
# Its key is another operation's.
FINGERPRINT_MISMATCH, SERVICE_MISMATCH = FingerprintMismatch.code, ServiceMismatch.code
# The error of its letter.
OF_MESSAGES = {
    "content_type": "a content type that is not accepted; it was not decoded",
    "undecodable": "the body, or what came with it, could not be decoded",
    "envelope": "the body is not a task's [args, kwargs, embed]",
    "protocol": "task message protocol 1 is not accepted",
    "missing_task": "no header 'task'",
    "missing_id": "no header 'id'",
    "unknown_task": "no task of this name is registered",
    "unknown_version": "made by newer code than this",
    "invalid_header": "eta or expires is not a time, timelimit no pair of seconds, headers no object, or one that is shown has "
    "characters that are not printable",
    "missing_key": "no idempotency key: no header, and the task has no key template",
    "invalid_key": "the idempotency key breaks a rule",
    "invalid_arguments": "the arguments do not fit the task, or are not JSON",
    "expired": "past its expires",
    EXPIRED_EARLY: "expired in the broker by a time to live that its sender did not give it; it belongs to no operation",
    "other_service": "in the outbox of another application, which is to run it",
    OTHER_CELL: "its tenant is of another cell than this one, or of none",
    "delivery_limit": "delivered too often without an answer: each delivery lost its worker or its connection",
    "maxlen": "the queue was full",
    "rejected": "rejected by the worker",
    BEYOND_LIMIT: "beyond a limit, so it was not decoded, and only its beginning is kept",
    UNSIGNED: "it has no signature, and this application requires one",
    ALTERED: "its signature is of no secret of this application, or it was altered",
    "stale": "published longer ago than redelivery_horizon, and nothing is known of its operation: it may have ended",
    UNHANDLED: "the relay could not handle it; its operation was not touched",
    FINGERPRINT_MISMATCH: "this idempotency key was used with other arguments",
    SERVICE_MISMATCH: "this idempotency key is used by another application in this database",
}

# ---------------------------------------------------------------- alerts and alarms that are about no single letter

# New outbox rows that failed without a letter; rows that the broker keeps refusing; too many open letters.
OUTBOX_FAILED, OUTBOX_STUCK, OPEN = "outbox_failed", "outbox_stuck", "open"
SILENT, NO_RELAY, UNNAMED_ROWS, NO_CONSUMERS, ACCEPTED, UNKNOWN_EFFECTS, LARGE_RESULTS, WEBHOOK_DISABLED = (
    "silent",
    "no_relay",
    "unnamed_rows",
    "no_consumers",
    "accepted",
    "unknown_effects",
    "large_results",
    "webhook_disabled",
)
STREAM_STOPPED, STREAM_UNOWNED = "stream_stopped", "stream_unowned"
ALERTS = (OUTBOX_FAILED, OUTBOX_STUCK, OPEN)
# The name of an alarm begins with its kind.
ALARMS = (
    SILENT,
    NO_RELAY,
    UNNAMED_ROWS,
    NO_CONSUMERS,
    ACCEPTED,
    UNKNOWN_EFFECTS,
    LARGE_RESULTS,
    WEBHOOK_DISABLED,
    STREAM_STOPPED,
    STREAM_UNOWNED,
)

# ---------------------------------------------------------------- all of them


def _codes(kind: type[PermanentError]) -> Iterator[str]:
    if kind.__module__ == PermanentError.__module__:
        yield kind.default_code
        for each in kind.__subclasses__():
            yield from _codes(each)


# Of the library's own classes of errors. `PermanentError` and `StoredRefusal` without a code are the application's word.
OF_ERRORS = frozenset(_codes(PermanentError))
# Codes of failures that the library itself finds. With any other code, or where the stored error says so, a provider or the
# task's own code has declined.
FOUND_BY_US = (OF_ERRORS | {*OF_MESSAGES, ABANDONED, CALL_REFUSED}) - {
    PermanentError.default_code,
    StoredRefusal.default_code,
}
# Every reason that the library gives a dead letter, but for those that begin with HTTP_STATUS.
OF_LETTERS = (
    OF_ERRORS
    | {CANCELLED, REVOKED, ABANDONED, CALL_REFUSED, RESOLVED, REPLACED, ON_FAILED_ERROR, UNPUBLISHABLE}
    | {*OF_SAGAS, *OF_MESSAGES}
)
# The page about a code of a provider's, or of the application's own.
DECLINED = "declined"


def page_of(reason: str, own: Iterable[str] = ()) -> str:
    """The name of the runbook's page about a reason, or about an alarm by its name or kind.

    `own`: the application's reasons with a page of their own. One that ends with `_` is about all that begin so, and its page
    is named without the `_`.
    """
    kind = reason.partition("/")[0]
    for known in (*OF_LETTERS, *ALERTS, *ALARMS, *own, HTTP_STATUS):
        if kind == known or (known.endswith("_") and kind.startswith(known)):
            return known.removesuffix("_")
    return DECLINED
