"""Every error of the library, and what each one means for the message.

    IdempotencyError
    ├── SettingsError               the configuration cannot keep the promise: nothing starts
    ├── CallRefused                 raised where the call is made: nothing was written, nothing was published
    │   ├── MissingKey
    │   ├── InvalidKey
    │   └── InvalidArguments
    ├── PermanentError              ends the operation as failed, without another attempt
    │   ├── AttemptsExhausted
    │   │   └── RetriesExhausted    by the body's own max_retries
    │   ├── EffectMismatch          the same name with other arguments
    │   ├── EffectNameReused        the same name twice in one attempt
    │   ├── EffectUnknown           an effect was begun and its outcome is not known: a person decides
    │   ├── Unfinished              an effect has happened and the operation cannot finish: a person decides
    │   ├── StoredRefusal           a refusal that the provider keeps under the idempotency key
    │   ├── InvalidResult           not JSON, over the limit, or not what `effect_types` says
    │   ├── OpenTransaction         a call outside while the session has a transaction open
    │   ├── SessionNotYours         commit() on the attempt's session
    │   └── UnsupportedControl      Ignore, Reject or replace() from a body
    ├── Defer                       not the operation's fault: later, without using an attempt
    │   └── NotSent                 from an effect: nothing was sent to the provider
    ├── Again                       the body asks for another attempt, as Celery's retry() does
    ├── StoredFailure               the provider replays a stored failure under this key
    ├── LeaseLost                   this attempt is no longer the holder: it must stop
    ├── OutcomeInDoubt              a COMMIT whose reply was lost: the operation is claimed again
    ├── FingerprintMismatch         this key was used with other arguments: nothing ran
    ├── OperationBusy               another attempt holds the operation (eager calls); not ended in time (Handle)
    ├── OperationFailed             a duplicate of an operation that has failed
    ├── OperationNotFound
    ├── UnknownVersion              made by newer code: left to processes that know it
    │                               commands of operators, which have changed nothing:
    ├── ReplayRefused
    ├── BulkRefused                 more dead letters than one command may change
    ├── ChangeRefused
    ├── DiscardRefused
    ├── NotAllowed                  no token, or a role that may not do this
    └── MailRefused                 the report could not be mailed

    Exception                       within the library: none of these reaches a task or its caller
    ├── Unanswered                  Postgres did not answer for as long as a delivery may wait
    ├── PartBroken                  an undo or on_failed has ended its transaction
    ├── BrokerAway
    └── NotConnected                SQLAlchemy's OperationalError: no connection to Postgres could be had

Celery serialises exceptions as ``(type, args)`` and rebuilds them, so each one keeps in ``args`` exactly what
its constructor takes.
"""

from __future__ import annotations

import sqlalchemy.exc

from .text import NAME_LIMIT, storable


class IdempotencyError(Exception):
    """Base of every error that this library raises for its users to catch."""


class SettingsError(IdempotencyError):
    """The configuration cannot keep the promise. The message names both values."""


class CallRefused(IdempotencyError):
    """The call was refused where it was made; nothing was written and nothing was published."""


class MissingKey(CallRefused):
    """No idempotency key: the call has none and the task's template yields none."""


class InvalidKey(CallRefused):
    """The idempotency key breaks a rule; the message names the rule and what was got."""


class InvalidArguments(CallRefused):
    """The arguments or options cannot be accepted; the message names the field and the limit."""


class PermanentError(IdempotencyError):
    """Raise it from a body, an effect or a step to end the operation as failed, without another attempt.

    `message` is stored and shown to operators, so it must hold no secret; `code` is a short word for programs.
    """

    default_code = "permanent_error"

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message, code)
        self.message = message
        self.code = code or self.default_code

    def __setattr__(self, name: str, value: object) -> None:
        # Both are stored, whatever they are made from.
        if name == "message":
            value = storable(str(value))
        elif name == "code":
            value = storable(str(value or self.default_code))[:NAME_LIMIT]
        super().__setattr__(name, value)

    def __str__(self) -> str:
        return self.message


class AttemptsExhausted(PermanentError):
    """The last allowed attempt has failed, or died."""

    default_code = "attempts_exhausted"


class RetriesExhausted(AttemptsExhausted):
    """`retry()` was called beyond its `max_retries`: told from a body's own AttemptsExhausted, which is a last word."""


class EffectMismatch(PermanentError):
    """An effect or step was begun under this name with other arguments."""

    default_code = "effect_mismatch"


class EffectNameReused(PermanentError):
    """The same effect or step name was used twice in one attempt."""

    default_code = "effect_name_reused"


class EffectUnknown(PermanentError):
    """The operation ended while an effect was begun and its outcome was not known; a person has to find out."""

    default_code = "effect_unknown"


class Unfinished(PermanentError):
    """The operation cannot finish although an effect has happened; what the effect used must stay used."""

    default_code = "unfinished"


class StoredRefusal(PermanentError):
    """Raise it from an effect for a refusal that the provider keeps and replays under the idempotency key.

    It answers every call under that key, also an earlier one whose reply was lost. Any other `PermanentError` from a
    repeated call (an API key revoked since, a parameter no longer valid) says nothing about the first call.
    """

    default_code = "stored_refusal"


class InvalidResult(PermanentError):
    """The result is not JSON, is over `result_limit` bytes, or is not what `effect_types` says; it was not stored."""

    default_code = "invalid_result"


class OpenTransaction(PermanentError):
    """`effect` or `step` was called while the session has a transaction open, reads included."""

    default_code = "open_transaction"


class SessionNotYours(PermanentError):
    """`commit()` or `begin()` on the attempt's session; use `self.step` for what must be committed earlier."""

    default_code = "session_not_yours"


class UnsupportedControl(PermanentError):
    """`Ignore`, `Reject` or `replace()` from a body would acknowledge past the record."""

    default_code = "unsupported_control"


class Defer(IdempotencyError):
    """Raise it when it is not the operation's fault: the next attempt comes after `seconds`, and none is used.

    Bounded by `defer_budget` from the first claim since the operation was accepted or replayed; after that it counts as
    an ordinary error.
    """

    def __init__(self, seconds: float, reason: str) -> None:
        super().__init__(seconds, reason)
        self.seconds = seconds
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class NotSent(Defer):
    """Raise it from an effect when nothing was sent to the provider: its circuit is open, or it has no connection.

    A first call is closed as one that did not happen; about an earlier call under the same key it says nothing.
    """


class Again(IdempotencyError):
    """The body asks for another attempt: after `delay` seconds, or when the back-off says. `cause` is why."""

    def __init__(self, delay: float | None, cause: BaseException) -> None:
        super().__init__(delay, cause)
        self.delay = delay
        self.cause = cause

    def __str__(self) -> str:
        return str(self.cause)


class StoredFailure(IdempotencyError):
    """Raise it from an effect when the provider replays a stored failure under this idempotency key.

    Calling again under the same key can never succeed (Stripe keeps the first answer of a key, 500s included),
    so the effect moves to its next key once `reconcile` or a person has said that nothing happened.
    """


class LeaseLost(IdempotencyError):
    """This attempt is no longer the holder; whatever it still writes matches nothing."""


class OutcomeInDoubt(IdempotencyError):
    """A commit was sent and its answer never came; the record decides, under a new fence."""


class FingerprintMismatch(IdempotencyError):
    """This key was used before with other arguments; nothing ran and the stored result is untouched."""


class OperationBusy(IdempotencyError):
    """Another attempt holds this operation now; from a `Handle`: it has not ended in the time given."""


class OperationFailed(IdempotencyError):
    """The operation this call duplicates has failed; `code` and the message are the stored ones."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class OperationNotFound(IdempotencyError):
    """There is no operation with this key, or no dead letter or operator of this number or name."""


class UnknownVersion(IdempotencyError):
    """A message or a record was made by newer code than this; its message waits for a process that knows it."""


# ---------------------------------------------------------------- told to operators


class ReplayRefused(IdempotencyError):
    """This dead letter cannot be replayed; the message says why. Nothing was changed."""


class BulkRefused(IdempotencyError):
    """More dead letters than one command may change; the message names both numbers. Nothing was changed."""


class ChangeRefused(IdempotencyError):
    """The change cannot be made; the message says why. Nothing was changed."""


class DiscardRefused(IdempotencyError):
    """This dead letter cannot be discarded; the message says why. Nothing was changed."""


class NotAllowed(IdempotencyError):
    """No token, a wrong or an expired one, or a role that may not do this. Nothing was changed, and it was noted."""


class MailRefused(IdempotencyError):
    """The report could not be mailed; the message says why, never with a password."""


# ---------------------------------------------------------------- within the library: none of these reaches a task or its caller


class Unanswered(Exception):
    """Postgres has not answered for as long as this delivery may wait; the cause is the last error."""


class PartBroken(Exception):
    """An undo or `on_failed` has ended the transaction that its operation was to end in."""


class BrokerAway(Exception):
    """The broker cannot be reached, or does not confirm in time. No message is to blame."""


class NotConnected(sqlalchemy.exc.OperationalError):
    """Postgres could not be reached, or had no connection left: nothing was asked."""


# ----------------------------------------------------------------


def permanent_error(message: str, code: str) -> PermanentError:
    """The error of a stored code: of the library's own class for its codes, so that `on_failed` is told one type for each."""
    for kind in PermanentError.__subclasses__():
        if kind.__module__ == __name__ and kind.default_code == code:
            return kind(message, code)
    return PermanentError(message, code)
