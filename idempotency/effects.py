"""Effects and steps: what an operation does outside its final commit, at most once for the world to see.

An effect is begun in a commit of its own before the call, and its result is recorded before it is returned. Begun
without a result is *unknown*: perhaps it happened. The provider is asked first (`reconcile`); if that settles
nothing, the call is repeated under the same key for as long as the provider keeps keys, and after that a person
decides. The key is derived from tenant, operation, key and name, never from the attempt, so that a provider which
honours idempotency keys acts once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import records, results
from .crash_points import crash_point
from .errors import (
    Defer,
    EffectMismatch,
    EffectNameReused,
    EffectUnknown,
    OpenTransaction,
    PermanentError,
    StoredFailure,
)
from .keys import OperationId, fingerprint

if TYPE_CHECKING:
    from .attempt import Attempt


@dataclass(frozen=True, slots=True)
class Happened:
    """A reconcile's answer: it happened, with this result."""

    result: Any


@dataclass(frozen=True, slots=True)
class DidNotHappen:
    """A reconcile's answer: it did not happen, and under this key it cannot happen any more."""


@dataclass(frozen=True, slots=True)
class StillUnknown:
    """A reconcile's answer: too early to tell, or the provider cannot say."""


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
Reconcile = Callable[..., Happened | DidNotHappen | StillUnknown]


def provider_key(id: OperationId, name: str, number: int) -> str:
    """The idempotency key for the outside world; the same for every attempt, generation and worker."""
    text = json.dumps([id.tenant, id.operation, id.key, name, number])
    return f"idem-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def effect(
    attempt: Attempt,
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reconcile: Reconcile | None,
) -> Any:
    """Call the outside world under a key, unless its result is recorded already."""
    begun = _recorded(attempt, name, args, kwargs)
    if begun is None or begun["state"] == "not_happened":
        begun = _begin(attempt, name, args, kwargs, number=1 if begun is None else begun["number"] + 1)
    elif begun["state"] == "done":
        return results.from_text(begun["result"])
    else:
        settled = _settle_doubt(attempt, name, args, kwargs, begun, reconcile)
        if isinstance(settled, Happened):
            return settled.result
        if isinstance(settled, DidNotHappen):
            begun = _begin(attempt, name, args, kwargs, number=begun["number"] + 1)
    attempt.check_lease()
    crash_point("effect.begun")
    try:
        result = fn(*args, **kwargs, idempotency_key=begun["key"])
    except StoredFailure:
        return _after_stored_failure(attempt, name, fn, args, kwargs, begun, reconcile)
    except PermanentError as error:
        # A known outcome: nothing happened. Only a person's replay may call again, under the next key.
        _change(attempt, name, {"state": "not_happened", "error": str(error)[:500]})
        raise
    crash_point("effect.called")
    return _record(attempt, name, result)


def step(attempt: Attempt, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Commit a database phase together with its recorded result, unless it is recorded already."""
    recorded = _recorded(attempt, name, args, kwargs)
    if recorded is not None:
        return results.from_text(recorded["result"])
    session = attempt.session
    try:
        result = fn(session, *args, **kwargs)
        entry = {
            "state": "done",
            "args": _arguments(args, kwargs),
            "number": 1,
            "key": "",
            "result": _text(attempt, name, result),
        }
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
    return results.from_text(str(entry["result"]))


def _recorded(attempt: Attempt, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
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
    if recorded is not None and recorded["args"] != _arguments(args, kwargs):
        raise EffectMismatch(f"{name!r} was begun with other arguments in an earlier attempt")
    return recorded


def _begin(
    attempt: Attempt, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, number: int
) -> dict[str, Any]:
    entry = {
        "state": "begun",
        "key": provider_key(attempt.claim.id, name, number),
        "number": number,
        "args": _arguments(args, kwargs),
        "ended_at": None,
    }
    with attempt.runtime.autocommit() as connection:
        begun_at = records.begin_effect(connection, attempt.claim, name, entry)
    if begun_at is None:
        attempt.fenced()
    attempt.claim.effects[name] = entry | {"begun_at": begun_at}
    return attempt.claim.effects[name]


def _settle_doubt(
    attempt: Attempt,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    begun: dict[str, Any],
    reconcile: Reconcile | None,
) -> Happened | DidNotHappen | StillUnknown:
    """Ask whether it happened; StillUnknown means: repeat under the same key. Raises `EffectUnknown`."""
    with attempt.runtime.autocommit() as connection:
        now = records.database_time(connection)
    age = max(now - begun["begun_at"], 0.0)
    ended_for = None if begun["ended_at"] is None else max(now - begun["ended_at"], 0.0)
    answer: Happened | DidNotHappen | StillUnknown = StillUnknown()
    if reconcile is not None:
        answer = reconcile(*args, **kwargs, doubt=EffectInDoubt(begun["key"], age, ended_for))
    match answer:
        case Happened(result):
            _record(attempt, name, result)
        case DidNotHappen():
            _change(attempt, name, {"state": "not_happened"})
        case StillUnknown():
            if age > attempt.runtime.settings.provider_key_retention:
                raise EffectUnknown(f"effect {name!r}: begun {age:.0f} s ago, and the provider's key has expired")
            if ended_for is not None:
                # Repeating is pointless and it is too early to say no: ask again, each time after twice as long.
                raise Defer(min(max(ended_for, 1.0), 60.0), f"effect {name!r}: whether it happened is still open")
    return answer


def _after_stored_failure(
    attempt: Attempt,
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    begun: dict[str, Any],
    reconcile: Reconcile | None,
) -> Any:
    """The provider's last word under this key is a failure: settle what it left, then perhaps the next key."""
    with attempt.runtime.autocommit() as connection:
        ended_at = records.database_time(connection)
    _change(attempt, name, {"ended_at": ended_at})
    if reconcile is None:
        raise EffectUnknown(f"effect {name!r}: the provider replays a stored failure, and there is no reconcile")
    settled = _settle_doubt(attempt, name, args, kwargs, attempt.claim.effects[name], reconcile)
    if isinstance(settled, Happened):
        return settled.result
    attempt.names_used.discard(name)
    return effect(attempt, name, fn, args, kwargs, reconcile)


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


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return fingerprint({"args": args, "kwargs": kwargs})


def _text(attempt: Attempt, name: str, result: Any) -> str:
    return results.to_text(result, limit=attempt.runtime.settings.result_limit, what=f"result of {name!r}")
