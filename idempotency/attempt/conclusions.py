"""How an operation may end without success, and the application's part in it: undos of steps, and `on_failed`.

Whatever ends an operation without success goes through `conclude`, in the transaction that makes it fail:

    an effect was begun and is open    effect_unknown: nothing is undone, a person finds out
    an effect has happened             unfinished: nothing is undone, a person decides;
                                       unless an undo of an earlier step accepts `effects`: it answers for them
    otherwise                          the undos run, the last step first, and their steps are forgotten

The cause is kept beside both codes. The table refuses any other end (migration 0005), so that no path around this
module can say "failed" about a charge that went through.
"""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from ..errors import (
    CallFailed,
    EffectUnknown,
    InvalidArguments,
    LeaseLost,
    PermanentError,
    StoredRefusal,
    TransactionEnded,
    Unfinished,
)
from ..framework import framework
from ..observe.logs import log
from ..reasons import ON_FAILED_ERROR
from ..store.answers import error_text
from ..store.ends import FailedEnd
from ..store.statements import ERROR_LIMIT, describe, sqlstate
from ..wire import results
from ..wire.delivery import EffectOutcome, Operation
from ..wire.keys import OperationId
from .exits import exits_are_errors
from .session import sessions_of

OnFailed = Callable[[Session, Operation, PermanentError], object]
Undo = Callable[..., object]
# What a record keeps of an effect or a step, as JSON.
Entry = Mapping[str, Any]

_OUTCOMES = {"begun": "unknown", "done": "happened", "not_happened": "not_happened", "compensated": "compensated"}


class NotDeclined(PermanentError):
    """An end whose code has no class here, and that is not by a refusal: the library has found it, or a person wants it."""


@dataclass(frozen=True, slots=True)
class Concluded:
    """How an operation ends, for its record, and the reason that its dead letter gives."""

    error: PermanentError
    end: FailedEnd
    reason: str
    broken: str | None = None  # what the application's part raised, in one line


@dataclass(frozen=True, slots=True)
class _Undo:
    step: str
    function: Undo
    result: Any
    effects: dict[str, Any] | None  # None: the function does not accept them


def conclude(
    connection: Connection,
    id: OperationId,
    error: PermanentError,
    *,
    described: str | None = None,
    entries: Mapping[str, Entry],
    arguments: Mapping[str, Any],
    attempts: int,
    on_failed: OnFailed | None,
    skip: str | None = None,
) -> Concluded:
    """Say how an operation ends, and run the application's part of it in the connection's transaction.

    `described` is the error in one line, as it is stored; by default its message. `skip` says why neither an undo nor
    `on_failed` may run. If one of them raises, it leaves no rows, and the dead letter says so.
    Raises `OperationalError`, `LeaseLost` and `SoftTimeLimitExceeded`, which are not the application's fault: the end
    is tried again. Raises `TransactionEnded` when the caller's transaction is gone: call again, with that error as `skip`.
    """
    described = (error.message if described is None else described)[:ERROR_LIMIT]
    cause = _cause(error, described)
    ended, undos = _verdict(entries, error)
    if ended is not error:
        ended.__cause__ = error  # for `on_failed`
    if undos and skip is not None:
        ended, undos = _unfinished(f"its steps were not undone: {skip}"), []
    broken: str | None = None
    if undos:
        broken = _run(connection, lambda session: _undo_all(session, undos))
        if broken is not None:
            log.error("undo_error", error=broken, task=id.task, key=id.key)
            ended, undos = _unfinished(f"an undo failed: {broken}"), []
    operation = Operation(
        id.tenant, id.task, id.key, arguments, attempts, steps=_steps(entries), effects=_effects(entries)
    )
    reason = ended.code
    if on_failed is not None:
        failure = _run(connection, lambda session: on_failed(session, operation, ended)) if skip is None else skip
        if failure is not None:
            reason, broken = ON_FAILED_ERROR, failure
            log.error("on_failed_error", error=failure, task=id.task, key=id.key)
    in_rows = broken if reason == ON_FAILED_ERROR else None
    other = cause if cause["code"] != error.code else None
    stored = error_text(error.code, described, other, in_rows, declined=is_declined(error))
    if ended is not error:
        stored = error_text(ended.code, str(ended), cause, in_rows)
    answered = {name for undo in undos for name in undo.effects or ()}
    compensated = {name: {**entries[name], "state": "compensated"} for name in answered}
    forgotten = tuple(undo.step for undo in undos)
    return Concluded(ended, FailedEnd(ended.code, stored, forgotten, compensated), reason, broken)


def _cause(error: PermanentError, described: str) -> dict[str, Any]:
    """What ends the operation, apart from its effects. For a refused repeat it is the refusal, which led to the unknown."""
    refusal = error.__cause__
    if isinstance(error, EffectUnknown) and isinstance(refusal, PermanentError):
        error, described = refusal, str(refusal)
    cause = {"code": error.code, "message": described}
    return cause | {"declined": True} if is_declined(error) else cause


def is_declined(error: PermanentError) -> bool:
    """Whether a provider or the application's code has refused for good. Its codes may be ours; our classes are not its."""
    if isinstance(error, CallFailed):
        return error.is_declined
    is_ours = type(error).__module__ in (PermanentError.__module__, __name__)
    return not is_ours or type(error) in (PermanentError, StoredRefusal)


def is_open(entries: Mapping[str, Entry]) -> bool:
    """Whether an effect was begun and its outcome is not known."""
    return any(entry["state"] == "begun" for entry in entries.values())


def has_acted(entries: Mapping[str, Entry]) -> bool:
    """Whether an effect has happened, or may have."""
    return any(entry["kind"] == "effect" and entry["state"] in ("begun", "done") for entry in entries.values())


def has_undo(entries: Mapping[str, Entry]) -> bool:
    """Whether a recorded step has an undo."""
    return any(entry.get("undo") is not None for entry in entries.values())


def reference(undo: Undo) -> str:
    """Name an undo so that any process of the application can run it: `module:function`.

    Raises `InvalidArguments` for one that cannot be found by its name: a lambda, a nested function, a method of an object.
    """
    name = f"{getattr(undo, '__module__', None)}:{getattr(undo, '__qualname__', None)}"
    if _found(name) is not undo:
        raise InvalidArguments(f"undo: must be a function that can be imported by its name, got {name}")
    return name


def answers_for_effects(undo: Undo) -> bool:
    """Whether an undo accepts `effects`, and so takes care of those that have happened after its step."""
    try:
        return "effects" in inspect.signature(undo).parameters
    except ValueError:  # written in C, without a signature
        return False


def _verdict(entries: Mapping[str, Entry], error: PermanentError) -> tuple[PermanentError, list[_Undo]]:
    """The error that the operation ends with, and the undos to run."""
    if opened := sorted(name for name, entry in entries.items() if entry["state"] == "begun"):
        if isinstance(error, EffectUnknown):
            return error, []
        return EffectUnknown(f"effect {_listed(opened)}: begun, and the outcome is not known"), []
    if isinstance(error, EffectUnknown | Unfinished):  # decided by the body itself
        return error, []
    undos: list[_Undo] = []
    happened: dict[str, Any] = {}  # effects that no undo takes care of yet
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["position"], reverse=True):
        if entry["state"] != "done":
            continue
        if entry["kind"] == "effect":
            happened[name] = results.from_text(entry["result"])
        elif entry["undo"] is not None:
            function = _found(entry["undo"])
            if function is None:
                return _unfinished(f"step {name!r}: its undo {entry['undo']} is gone"), []
            answers = answers_for_effects(function)
            if happened and not answers:
                break
            undos.append(_Undo(name, function, results.from_text(entry["result"]), happened if answers else None))
            happened = {}
    if happened:
        return _unfinished(f"effect {_listed(sorted(happened))}: happened, and the operation cannot finish"), []
    return error, undos


def _unfinished(why: str) -> Unfinished:
    return Unfinished(why[:ERROR_LIMIT])


def _undo_all(session: Session, undos: list[_Undo]) -> None:
    for undo in undos:
        options = {} if undo.effects is None else {"effects": undo.effects}
        undo.function(session, undo.result, **options)


def _run(connection: Connection, part: Callable[[Session], object]) -> str | None:
    """Run the application's part behind a savepoint. Returns what went wrong in it, in one line."""
    transaction = connection.exec_driver_sql(_BEGIN_PART).scalar_one()
    session = sessions_of(connection).within(connection)
    try:
        with exits_are_errors(), framework().joined(lambda: session, ends=False):
            part(session)
        session.flush()
        # Check deferred constraints now: a violation rolls back this part, and not the end as it would at COMMIT.
        session.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))
        session.execute(text("SET CONSTRAINTS ALL DEFERRED"))
        _check_transaction(connection, transaction, None)
        session.execute(text("RESET ROLE"))  # SET LOCAL would last until the end of our own statements
        session.end_with_commit()
    except (LeaseLost, TransactionEnded, SoftTimeLimitExceeded):
        raise
    except OperationalError as error:
        if not connection.invalidated:
            _check_transaction(connection, transaction, error)
        raise  # Postgres is away or a lock timed out: not the application's fault
    except Exception as error:
        with contextlib.suppress(Exception):  # the check below shows whether that worked
            session.rollback()
        _check_transaction(connection, transaction, error)
        return describe(error)
    finally:
        with contextlib.suppress(Exception):
            session.end()
    return None


# A setting that ends with its transaction, and so identifies it.
_BEGIN_PART = "SELECT set_config('idempotency.part', gen_random_uuid()::text, true)"
_THIS_PART = "SELECT current_setting('idempotency.part', true)"


def _check_transaction(connection: Connection, expected: str, error: Exception | None) -> None:
    """Raise `TransactionEnded` unless the connection is still in the transaction that the part was given."""
    described = "it has ended the transaction it was given" + ("" if error is None else f": {describe(error)}")
    try:
        found = connection.exec_driver_sql(_THIS_PART).scalar_one()
    except OperationalError as unanswered:
        if sqlstate(unanswered) is None and error is None:
            raise  # Postgres is away
        raise TransactionEnded(described) from error
    except SQLAlchemyError:
        if isinstance(error, OperationalError):
            return  # the statement was refused, and its transaction waits for a rollback
        raise TransactionEnded(described) from error
    if found != expected:
        raise TransactionEnded(described) from error


def _found(name: str) -> Undo | None:
    try:
        found: Undo = pkgutil.resolve_name(name)
    except Exception:  # from the module's own code: it may need a secret that this process does not have
        return None
    return found


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def _steps(entries: Mapping[str, Entry]) -> dict[str, Any]:
    return {name: results.from_text(entry["result"]) for name, entry in entries.items() if entry["kind"] == "step"}


def _effects(entries: Mapping[str, Entry]) -> dict[str, EffectOutcome]:
    return {
        name: EffectOutcome(
            _OUTCOMES[entry["state"]],  # type: ignore[arg-type]
            results.from_text(entry["result"]) if entry["state"] in ("done", "compensated") else None,
        )
        for name, entry in entries.items()
        if entry["kind"] == "effect"
    }
