"""The errors that parts of the library share, and what each one means for the message.

    IdempotencyError
    ├── SettingsError               the configuration is unsafe: nothing starts
    ├── MissingExtra                a part of the library is used whose dependencies are not installed
    ├── CallRefused                 raised by the call itself: nothing was written or published
    │   ├── MissingKey
    │   ├── InvalidKey
    │   ├── WrongCell               the tenant is of another cell, or of none
    │   └── InvalidArguments        a TypeError, too
    │       └── Misuse              of a saga by its own code: it stops, and is not undone
    ├── PermanentError              fails the operation without another attempt
    │   ├── AttemptsExhausted
    │   │   └── RetriesExhausted    by the max_retries given to retry()
    │   ├── EffectMismatch          an effect name with different arguments than before
    │   ├── EffectNameReused        an effect name twice in one attempt
    │   ├── EffectUnknown           an effect was begun and its outcome is unknown: a person decides
    │   ├── Unfinished              an effect happened but the operation cannot finish: a person decides
    │   ├── StoredRefusal           a refusal that the provider stores under the idempotency key
    │   ├── InvalidResult           not JSON, too large, or not of the type in `effect_types`
    │   ├── OpenTransaction         an external call while the session has an open transaction
    │   ├── SessionNotYours         commit() or begin() on the attempt's session
    │   ├── CallFailed              a task that a saga has called has failed
    │   └── UnsupportedControl      Ignore, Reject or replace() from a body
    ├── Defer                       not the operation's fault: try later, without using up an attempt
    │   ├── NotSent                 from an effect: nothing was sent to the provider
    │   └── Undecided               from an effect: the provider has accepted the call and decides later
    ├── Again                       the body asks for another attempt, as Celery's retry() does
    │   └── NothingDone             an HTTP handler's answer says nothing: its key is free if nothing is recorded
    ├── StoredFailure               the provider replays a stored failure under this key
    ├── LeaseLost                   this attempt is no longer the holder and must stop
    ├── OutcomeInDoubt              the reply to a COMMIT was lost: the operation is claimed again
    ├── FingerprintMismatch         this key was used with other arguments: nothing ran
    ├── ServiceMismatch             this key is used by another application on the same tables: nothing ran
    ├── OperationBusy               another attempt holds the operation (eager calls); not ended in time (Handle)
    ├── OperationFailed             a duplicate of a failed operation
    ├── ResultErased                a duplicate of an operation whose data was erased
    ├── ResultUnreadable            a stored result that is altered, gone, or kept where this process does not look
    ├── OperationNotFound
    ├── UnknownVersion              written by newer code: left to processes that can read it
    ├── AddressRefused              a webhook may not be sent there
    ├── ReplayRefused               this and those below: from operators' commands, which then changed nothing
    ├── DiscardRefused
    ├── BulkRefused                 too many dead letters for one command
    ├── ChangeRefused
    └── NotAllowed                  a role that may not do this
        └── NotAuthenticated        no token, or none that is valid
    Exception                       internal: never reaches a task or its caller
    ├── Unanswered                  Postgres did not answer within the time a delivery may wait
    ├── TransactionEnded            an undo or on_failed ended its transaction
    ├── BrokerUnavailable
    └── NotConnected                SQLAlchemy's OperationalError: no connection to Postgres
    AssertionError
    └── NotIdempotent               of a test with `assert_idempotent`

Celery serialises an exception as ``(type, args)``, so ``args`` always holds exactly what the constructor takes.
"""

from __future__ import annotations

import math

import sqlalchemy.exc

from .text import NAME_LIMIT, storable, without_values


class IdempotencyError(Exception):
    """Base of every error that this library raises for its users to catch."""


class SettingsError(IdempotencyError):
    """The configuration is invalid or unsafe. The message names the setting; if two conflict, it has both values."""


class MissingExtra(IdempotencyError):
    """A part of the library needs a package that is not installed; the message names the package and the extra."""


class CallRefused(IdempotencyError):
    """The call was refused at the call site; nothing was written or published."""


class MissingKey(CallRefused):
    """There is no idempotency key: none was passed, and the task's key template produced none."""


class InvalidKey(CallRefused):
    """The idempotency key breaks a rule; the message says which."""


class WrongCell(CallRefused):
    """The tenant is of another cell than this process or session, or of none; the message names both."""


class InvalidArguments(CallRefused, TypeError):
    """An argument or option is invalid; the message names the field and the limit. A `TypeError`, as in Celery."""


class Misuse(InvalidArguments):
    """A saga's code broke a rule of the saga API. The saga stops, with nothing undone, until other code is deployed."""


class PermanentError(IdempotencyError):
    """Raise this from a body, an effect or a step to fail the operation without another attempt.

    `message` is stored and shown to operators, so keep secrets out of it. `code` is a short identifier for programs.
    Use few: of each task, a process counts the first hundred codes separately, and all later ones as `other`.
    """

    default_code = "permanent_error"

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message, code)
        self.message, self.code = message, code or self.default_code

    def __setattr__(self, name: str, value: object) -> None:
        if name == "message":  # both end up in Postgres
            value = without_values(storable(str(value)))
        elif name == "code":
            value = storable(str(value or self.default_code))[:NAME_LIMIT]
        super().__setattr__(name, value)

    def __str__(self) -> str:
        return self.message


class AttemptsExhausted(PermanentError):
    """The last allowed attempt failed, or its process died."""

    default_code = "attempts_exhausted"


class RetriesExhausted(AttemptsExhausted):
    """`retry()` was called more than `max_retries` times. Distinct from an AttemptsExhausted that the body raises."""


class EffectMismatch(PermanentError):
    """An effect or step was begun earlier under this name with different arguments."""

    default_code = "effect_mismatch"


class EffectNameReused(PermanentError):
    """The same effect or step name was used twice in one attempt."""

    default_code = "effect_name_reused"


class EffectUnknown(PermanentError):
    """The operation ended while the outcome of an effect was unknown; a person has to find it out."""

    default_code = "effect_unknown"


class Unfinished(PermanentError):
    """An effect has happened, but the operation cannot finish; what the effect used up must stay used up."""

    default_code = "unfinished"


class StoredRefusal(PermanentError):
    """Raise this from an effect for a refusal that the provider stores under the idempotency key, and replays.

    No other refusal says anything about an earlier call whose reply was lost; this one does: nothing has happened.
    """

    default_code = "stored_refusal"


class InvalidResult(PermanentError):
    """The result is not JSON, exceeds `result_limit` bytes, or does not match `effect_types`; it was not stored."""

    default_code = "invalid_result"


class OpenTransaction(PermanentError):
    """`effect` or `step` was called while the session had an open transaction; a read opens one too."""

    default_code = "open_transaction"


class SessionNotYours(PermanentError):
    """`commit()` or `begin()` was called on the attempt's session; use `self.step` to commit something early."""

    default_code = "session_not_yours"


class CallFailed(PermanentError):
    """A task that a saga has called has failed; `code` and the message are those of the failure."""

    default_code = "call_failed"
    is_declined = False  # whether that was a refusal by a provider or by the application's own code


class UnsupportedControl(PermanentError):
    """A body raised `Ignore` or `Reject`, or asked for a `retry` or `replace` that cannot be; the message says why."""

    default_code = "unsupported_control"


class Defer(IdempotencyError):
    """Raise this to try again after `seconds` without using up an attempt, when it is not the operation's fault.

    Less than 0 counts as 0. Once `defer_budget` seconds have passed since the first claim, or replay, it is an ordinary error.
    """

    def __init__(self, seconds: float, reason: str) -> None:
        is_for_a_wake = isinstance(self, Undecided) and seconds == math.inf
        if not math.isfinite(max(seconds, 0.0)) and not is_for_a_wake:
            raise ValueError(f"seconds: must be a finite number, got {seconds}")
        super().__init__(seconds, reason)
        self.seconds, self.reason = max(seconds, 0.0), reason

    def __str__(self) -> str:
        return self.reason


class NotSent(Defer):
    """Raise this from an effect when nothing was sent (an open circuit): a first call under its key has not happened."""


class Undecided(Defer):
    """Raise this from an effect, or from its `reconcile`, when the provider has accepted the call and decides later.

    The effect stays open and is not called again: `reconcile` is asked after `seconds`, or at once after `Handle.wake` (with
    `math.inf` only then); no attempts and no `defer_budget` are used up.
    """


class Again(IdempotencyError):
    """The body asks for another attempt, after `delay` seconds or the usual back-off, because of `cause`."""

    def __init__(self, delay: float | None, cause: BaseException) -> None:
        if delay is not None and not math.isfinite(delay):
            raise ValueError(f"delay: must be a finite number, got {delay}")
        super().__init__(delay, cause)
        self.delay, self.cause = None if delay is None else max(delay, 0.0), cause

    def __str__(self) -> str:
        return str(self.cause)


class NothingDone(Again):
    """An HTTP handler's answer says nothing about the operation: as `Again`, and if nothing is recorded its key is free."""


class StoredFailure(IdempotencyError):
    """Raise this from an effect if the provider replays a stored failure, as Stripe does: a next key is used if nothing happened."""


class LeaseLost(IdempotencyError):
    """This attempt is no longer the holder; its writes are fenced out."""


class OutcomeInDoubt(IdempotencyError):
    """The answer to a COMMIT was lost; the operation is claimed again to see whether it took effect."""


class FingerprintMismatch(IdempotencyError):
    """This key was used before with different arguments; nothing ran, and the stored result is unchanged."""

    code = "fingerprint_mismatch"


class ServiceMismatch(IdempotencyError):
    """Another application has an operation of this tenant, task and key in the same database; nothing ran."""

    code = "service_mismatch"


class OperationBusy(IdempotencyError):
    """Another attempt holds this operation; from a `Handle`, it did not end within the time-out."""


class OperationFailed(IdempotencyError):
    """This call duplicates an operation that failed; `code` and the message are those of the failure."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class ResultErased(IdempotencyError):
    """The operation was carried out once, and its data has been erased since; it never runs again."""


class ResultUnreadable(IdempotencyError):
    """The operation was carried out, and this process cannot read its stored result; it never runs again."""


class OperationNotFound(IdempotencyError):
    """No operation has this key, no dead letter this number, or no operator this name."""


class UnknownVersion(IdempotencyError):
    """A message or record was written by newer code; its message waits for a process that can read it."""


class AddressRefused(IdempotencyError):
    """A webhook may not be sent to this URL or its addresses; the message names the rule, and neither of them."""


class ReplayRefused(IdempotencyError):
    """This dead letter cannot be replayed; the message says why. Nothing was changed."""


class BulkRefused(IdempotencyError):
    """More dead letters match than one command may change; the message names the limit. Nothing was changed."""


class ChangeRefused(IdempotencyError):
    """The change cannot be made; the message says why. Nothing was changed."""


class DiscardRefused(IdempotencyError):
    """This dead letter cannot be discarded; the message says why. Nothing was changed."""


class NotAllowed(IdempotencyError):
    """The token's role may not do this. Nothing was changed; the refusal is audited."""


class NotAuthenticated(NotAllowed):
    """There is no token, no operator has it, or it has expired. The refusal is audited."""


class Unanswered(Exception):  # internal, as all below
    """Postgres, or a store, did not answer within the time this delivery may wait; the cause is the last error."""


class TransactionEnded(Exception):
    """An undo or `on_failed` committed or rolled back the transaction in which its operation ends."""


class BrokerUnavailable(Exception):
    """The broker cannot be reached or did not confirm in time; the messages are not at fault."""


class NotConnected(sqlalchemy.exc.OperationalError):
    """Postgres could not be reached or had no connection left; no statement was sent."""


class NotIdempotent(AssertionError):
    """The task left something other than its plain run did; the message says where, and what usually causes it."""
