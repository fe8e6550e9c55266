"""Effects and steps: what an operation does outside its final commit, at most once for the world to see.

An effect is begun in a commit of its own before the call, and its result is recorded before it is returned. Begun
without a result is *unknown*: perhaps it happened. The provider is asked first (`reconcile`); if that settles
nothing, the call is repeated under the same key for as long as the provider keeps keys, and after that a person
decides. The key is derived from tenant, operation, key and name, never from the attempt, so that a provider which
honours idempotency keys acts once.

A refusal of a repeated call says nothing about the call before it. Only an answer that the provider keeps under the
key (`StoredRefusal`) or `reconcile` closes an effect that was begun earlier.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import (
    Defer,
    EffectMismatch,
    EffectNameReused,
    EffectUnknown,
    InvalidArguments,
    InvalidResult,
    NotSent,
    OpenTransaction,
    PermanentError,
    StoredFailure,
    StoredRefusal,
    Unfinished,
)
from ..observe.crash_points import crash_point
from ..store import records
from ..store.statements import ERROR_LIMIT
from ..wire import results
from ..wire.keys import OperationId, fingerprint
from . import conclusions

if TYPE_CHECKING:
    from .attempt import Attempt


# Bytes of JSON that an application's own error may keep beside code and message.
ATTRIBUTES_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class Happened:
    """A reconcile's answer: it happened, with this result."""

    result: Any


@dataclass(frozen=True, slots=True)
class DidNotHappen:
    """A reconcile's answer: it did not happen, and under this key it cannot happen any more."""


@dataclass(frozen=True, slots=True)
class StillUnknown:
    """A reconcile's answer: too early to tell, or the provider cannot say.

    `ask_again`: the seconds after which the answer may be another one (a search that lags behind); None: it stays so.
    """

    ask_again: float | None = None


Answer = Happened | DidNotHappen | StillUnknown


@dataclass(frozen=True, slots=True)
class EffectInDoubt:
    """What is known of an effect that was begun and has no result.

    Seconds by the database's clock: `age` since it was begun; `ended_for` since the provider was seen to have ended
    it with a failure that it stores, so that nothing more can happen under this key; None when it was not. A search
    that lags behind has to be given its time from then, not from the beginning.
    """

    idempotency_key: str
    age: float
    ended_for: float | None


# Asks the provider whether an effect happened: called with the effect's own arguments and `doubt=`.
Reconcile = Callable[..., Answer]


@dataclass(frozen=True, slots=True)
class Call:
    """One use of `self.effect` in a body."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reconcile: Reconcile | None

    @property
    def fingerprint(self) -> str:
        return fingerprint({"args": self.args, "kwargs": self.kwargs})


def check_call(what: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Raise `InvalidArguments` if a function does not take these arguments; one without a signature is believed."""
    try:
        # not that of the function which a decorator has wrapped: the decorator may call it otherwise
        inspect.signature(function, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidArguments(f"{what} cannot be called with these arguments: {error}") from None
    except ValueError:
        return


def provider_key(id: OperationId, name: str, number: int) -> str:
    """The idempotency key for the outside world; the same for every attempt, generation and worker."""
    text = json.dumps([id.tenant, id.operation, id.key, name, number])
    return f"idem-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def effect(attempt: Attempt, call: Call) -> Any:
    """Call the outside world under a key, unless its result is recorded already.

    Raises `InvalidArguments` for functions that cannot be called so, before anything is begun.
    """
    entry = _recorded(attempt, call.name, "effect", call.fingerprint)
    if entry is None or entry["state"] in ("not_happened", "compensated"):
        # What was begun is another matter: there a deploy may repair the function before the next attempt.
        check_call(f"effect {call.name!r}: the function", call.fn, *call.args, **call.kwargs, idempotency_key="")
        if call.reconcile is not None:
            check_call(f"effect {call.name!r}: reconcile", call.reconcile, *call.args, **call.kwargs, doubt=None)
    attempt.calls[call.name] = call
    return _perform(attempt, call, entry)


def _perform(attempt: Attempt, call: Call, entry: Mapping[str, Any] | None) -> Any:
    repeated = False
    if entry is not None and entry["state"] == "done":
        return results.from_text(entry["result"])
    if entry is not None and (refusal := _refusal(attempt, entry)) is not None:
        raise refusal  # its attempt has died before it could end the operation
    if entry is not None and entry["state"] == "begun":
        match ask(attempt, call):
            case Happened(result):
                return result
            case StillUnknown(ask_again):
                _check_repeatable(attempt, call, ask_again)
                repeated = True
    if not repeated:
        attempt.check_may_begin()
        entry = _begin(attempt, call, number=_next_number(entry))
    assert entry is not None
    attempt.check_lease()
    crash_point("effect.begun")
    try:
        result = call.fn(*call.args, **call.kwargs, idempotency_key=entry["key"])
    except NotSent:
        if not repeated:
            _change(attempt, call.name, {"state": "not_happened", "sent": False})
        raise
    except StoredFailure as failure:
        return _after_stored_failure(attempt, call, failure)
    except (EffectUnknown, Unfinished):
        raise  # the call itself says that it does not know: it stays open
    except PermanentError as error:
        if repeated and not (isinstance(error, StoredRefusal) and attempt.policy.provider_keeps_refusals):
            return _after_refused_repeat(attempt, call, error)
        # A known outcome: nothing happened. Only a person's replay may call again, under the next key.
        _change(attempt, call.name, {"state": "not_happened"} | _refused(attempt, error))
        raise
    crash_point("effect.called")
    return _record(attempt, call.name, result)


def step(
    attempt: Attempt,
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    undo: conclusions.Undo | None,
) -> Any:
    """Commit a database phase together with its recorded result, unless it is recorded already."""
    arguments = fingerprint({"args": args, "kwargs": kwargs})
    recorded = _recorded(attempt, name, "step", arguments)
    if recorded is not None:
        return results.from_text(recorded["result"])
    attempt.check_may_begin()
    entry: dict[str, Any] = {
        "kind": "step",
        "state": "done",
        "args": arguments,
        "position": _next_position(attempt),
        "undo": None if undo is None else _undo_named(name, undo),
    }
    session = attempt.session
    try:
        result = fn(session, *args, **kwargs)
        entry["result"] = _text(attempt, name, result)
        session.flush()
        lease = attempt.runtime.settings.lease
        attempt.guarded(lambda: records.record_step(session.connection(), attempt.claim, name, entry, lease=lease))
    except BaseException:
        session.rollback()
        raise
    crash_point("step.recorded")
    attempt.commit()
    attempt.claim.effects[name] = entry
    crash_point("step.committed")
    return results.from_text(entry["result"])


def _undo_named(name: str, undo: conclusions.Undo) -> str:
    if conclusions.answers_for_effects(undo):
        check_call(f"step {name!r}: undo", undo, None, None, effects={})
    else:
        check_call(f"step {name!r}: undo", undo, None, None)
    return conclusions.reference(undo)


def ask(attempt: Attempt, call: Call, *, after: PermanentError | None = None) -> Answer:
    """Ask the provider what became of a call that was begun, and record its answer.

    `after`: the refusal of a repeat, which a "no" makes the outcome.
    """
    begun = attempt.claim.effects[call.name]
    if call.reconcile is None:
        return StillUnknown()
    with attempt.runtime.autocommit() as connection:
        now = records.database_time(connection)
    age = max(now - begun["begun_at"], 0.0)
    ended_for = None if begun["ended_at"] is None else max(now - begun["ended_at"], 0.0)
    answer = call.reconcile(*call.args, **call.kwargs, doubt=EffectInDoubt(begun["key"], age, ended_for))
    match answer:
        case Happened(result):
            return Happened(_record(attempt, call.name, result))
        case DidNotHappen():
            _change(attempt, call.name, {"state": "not_happened"} | ({} if after is None else _refused(attempt, after)))
        case StillUnknown():
            pass
        case _:  # a forgotten return must not pass for an answer
            raise TypeError(
                f"effect {call.name!r}: reconcile must return Happened, DidNotHappen() or StillUnknown, "
                f"got {type(answer).__name__}"
            )
    return answer


def _check_repeatable(attempt: Attempt, call: Call, ask_again: float | None) -> None:
    """Raise unless the call may be repeated under its key: `EffectUnknown` for a person, `Defer` to ask again."""
    begun = attempt.claim.effects[call.name]
    with attempt.runtime.autocommit() as connection:
        now = records.database_time(connection)
    age = max(now - begun["begun_at"], 0.0)
    # A call may take as long as an attempt: its key must not expire on the way.
    if age > attempt.policy.provider_key_retention - attempt.runtime.settings.longest_run:
        raise EffectUnknown(f"effect {call.name!r}: begun {age:.0f} s ago, and its key could expire during the call")
    if begun["ended_at"] is not None:
        _check_askable(call)
        # Repeating is pointless and it is too early to say no: ask again, each time after twice as long.
        seconds = max(now - begun["ended_at"], 1.0) if ask_again is None else ask_again
        raise Defer(min(seconds, 60.0), f"effect {call.name!r}: whether it happened is still open")
    if attempt.ends_as is not None:
        if ask_again is not None:
            raise Defer(ask_again, f"effect {call.name!r}: whether it happened is still open")
        attempt.check_may_begin()


def _check_askable(call: Call) -> None:
    """Raise `EffectUnknown` after a stored failure that only a person can settle: waiting would bring no answer."""
    if call.reconcile is None:
        raise EffectUnknown(f"effect {call.name!r}: the provider replays a stored failure, and there is no reconcile")


def _after_stored_failure(attempt: Attempt, call: Call, failure: StoredFailure) -> Any:
    """The provider's last word under this key is a failure: settle what it left, then perhaps the next key."""
    with attempt.runtime.autocommit() as connection:
        ended_at = records.database_time(connection)
    _change(attempt, call.name, {"ended_at": ended_at})
    _check_askable(call)
    if call.name in attempt.moved_on:
        raise failure  # one further key in an attempt: a provider that fails under every key is left alone for a while
    attempt.moved_on.add(call.name)
    return _perform(attempt, call, attempt.claim.effects[call.name])


def _after_refused_repeat(attempt: Attempt, call: Call, refusal: PermanentError) -> Any:
    """A repeat was refused, which is no answer to the call before it: only the provider's records are."""
    match ask(attempt, call, after=refusal):
        case Happened(result):
            return result
        case DidNotHappen():
            raise refusal
        case StillUnknown(ask_again) if ask_again is not None:
            raise Defer(ask_again, f"effect {call.name!r}: a repeat was refused, and whether it happened is still open")
    raise EffectUnknown(
        f"effect {call.name!r}: a repeated call was refused ({refusal.code}), which says nothing about the first one"
    ) from refusal


def _refused(attempt: Attempt, error: PermanentError) -> dict[str, Any]:
    kind = type(error)
    refused = {
        "code": error.code,
        "message": str(error)[:ERROR_LIMIT],
        # so that a body which handles the refusal does so in its next attempt, too
        "type": f"{kind.__module__}:{kind.__qualname__}",
        "is_stored": isinstance(error, StoredRefusal),
        "attributes": _attributes(error),
    }
    return {"refused": refused, "generation": attempt.claim.generation}


def _refusal(attempt: Attempt, entry: Mapping[str, Any]) -> PermanentError | None:
    """The refusal that an earlier attempt of this generation was given."""
    refused = entry.get("refused")
    if entry["state"] != "not_happened" or refused is None or entry["generation"] != attempt.claim.generation:
        return None
    plain = (StoredRefusal if refused["is_stored"] else PermanentError)(refused["message"], refused["code"])
    if (kind := _error_type(refused["type"])) is None or refused["attributes"] is None:
        return plain
    try:
        error = kind.__new__(kind, refused["message"], refused["code"])
        PermanentError.__init__(error, refused["message"], refused["code"])
        error.__dict__.update(results.from_text(refused["attributes"]))
        str(error)
    except Exception:  # a class that is made otherwise
        return plain
    return error


def _attributes(error: PermanentError) -> str | None:
    """What the application keeps on its own error, as JSON; None where that is none, or too long to be kept."""
    # the message as it was given: what `str()` makes of it, it makes again
    own = {name: value for name, value in vars(error).items() if name not in ("code", "__notes__")}
    own["message"] = error.message[:ERROR_LIMIT]
    try:
        return results.to_text(own, limit=ATTRIBUTES_LIMIT)
    except InvalidResult:
        return None


def _error_type(name: str) -> type[PermanentError] | None:
    """The class that an error was raised as; None where it cannot be found any more, or by its name at all."""
    try:
        found = pkgutil.resolve_name(name)
    except Exception:  # the module's own code
        return None
    return found if isinstance(found, type) and issubclass(found, PermanentError) else None


def _recorded(attempt: Attempt, name: str, kind: str, arguments: str) -> dict[str, Any] | None:
    """The rules of a name, and what earlier attempts left under it."""
    attempt.check_lease()
    if attempt.session_in_transaction:
        raise OpenTransaction(
            f"{name!r}: the session has a transaction open; its locks and its snapshot would not survive the call. "
            "rollback() ends a read; what must be committed first belongs in self.step"
        )
    if name in attempt.names_used:
        raise EffectNameReused(f"{name!r} is used twice in one attempt; give each effect and step its own name")
    attempt.names_used.add(name)
    recorded = attempt.claim.effects.get(name)
    if recorded is None:
        return None
    if recorded["kind"] != kind:
        raise EffectMismatch(f"{name!r} was recorded as {_article(recorded['kind'])} and is {_article(kind)} now")
    # What has not happened, or was undone, may be done with other arguments: under the next key it is another call.
    is_closed = recorded["state"] in ("not_happened", "compensated") and _refusal(attempt, recorded) is None
    if recorded["args"] != arguments and not is_closed:
        raise EffectMismatch(f"{name!r} was begun with other arguments in an earlier attempt")
    return recorded


def _article(kind: str) -> str:
    return "an effect" if kind == "effect" else "a step"


def _begin(attempt: Attempt, call: Call, *, number: int) -> dict[str, Any]:
    entry = {
        "kind": "effect",
        "state": "begun",
        "key": provider_key(attempt.claim.id, call.name, number),
        "number": number,
        "args": call.fingerprint,
        "position": _next_position(attempt),
        "ended_at": None,
    }
    with attempt.runtime.autocommit() as connection:
        begun_at = records.begin_effect(connection, attempt.claim, call.name, entry)
    if begun_at is None:
        attempt.fenced()
    attempt.claim.effects[call.name] = entry | {"begun_at": begun_at}
    return attempt.claim.effects[call.name]


def _next_number(entry: Mapping[str, Any] | None) -> int:
    """The number of the next key: a key under which nothing was sent is used again."""
    if entry is None:
        return 1
    return int(entry["number"]) + (1 if entry.get("sent", True) else 0)


def _record(attempt: Attempt, name: str, result: Any) -> Any:
    text = _text(attempt, name, result)
    _change(attempt, name, {"state": "done", "result": text})
    crash_point("effect.recorded")
    return results.from_text(text)


def _change(attempt: Attempt, name: str, change: dict[str, Any]) -> None:
    with attempt.runtime.autocommit() as connection:
        changed = records.change_effect(connection, attempt.claim, name, change)
    if not changed:
        attempt.fenced()
    attempt.claim.effects[name] = attempt.claim.effects[name] | change


def _next_position(attempt: Attempt) -> int:
    # Undos run in reverse order, and jsonb keeps none.
    return 1 + max((entry["position"] for entry in attempt.claim.effects.values()), default=0)


def _text(attempt: Attempt, name: str, result: Any) -> str:
    return results.to_text(result, limit=attempt.runtime.settings.result_limit, what=f"result of {name!r}")
