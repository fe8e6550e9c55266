"""Effects: what an operation does outside, and how that comes to happen at most once.

That an effect begins is committed before the call, and its result is recorded before it is returned. An effect that was
begun and has no result is *unknown*: it may have happened. The provider is asked first (`reconcile`); if that brings
no answer, the call is repeated under the same key for as long as the provider keeps keys, and after that a person
decides. The key is derived from tenant, task, key and name, never from the attempt, so that a provider which
honours idempotency keys acts once.

A refusal of a repeated call says nothing about the call before it. Only an answer that the provider keeps under the
key (`StoredRefusal`) or `reconcile` closes an effect that was begun earlier.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import (
    Defer,
    EffectUnknown,
    NotSent,
    PermanentError,
    StoredFailure,
    StoredRefusal,
    Unfinished,
)
from ..observe.crash_points import crash_point
from ..store import clock
from ..wire import results
from ..wire.keys import OperationId, fingerprint
from . import entries, refusals
from .refusals import refusal_of

if TYPE_CHECKING:
    from .attempt import Attempt


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Happened:
    """`reconcile` answers: it happened, with this result."""

    result: Any


@dataclass(frozen=True, slots=True)
class DidNotHappen:
    """`reconcile` answers: it did not happen, and can no longer happen under this key.

    The call is made again under another key; with a `refusal` it is not, and the operation ends with that.
    """

    refusal: PermanentError | None = None


@dataclass(frozen=True, slots=True)
class StillUnknown:
    """`reconcile` answers: too early to tell, or the provider cannot say.

    `ask_again`: seconds after which the answer may change (a search that lags behind); None: it will not change.
    """

    ask_again: float | None = None

    def __post_init__(self) -> None:
        if self.ask_again is not None and not math.isfinite(self.ask_again):
            raise ValueError(f"ask_again: must be a finite number, got {self.ask_again}")


Answer = Happened | DidNotHappen | StillUnknown


@dataclass(frozen=True, slots=True)
class EffectInDoubt:
    """What is known of an effect that was begun and has no result.

    `age`: seconds since it was begun. `ended_for`: seconds since the provider was seen to end it with a failure that it
    stores, so that nothing more can happen under this key; None if it was not seen. A search that lags behind needs
    its time from then on, not from the beginning. Both are by the database's clock.
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
    # the arguments as they are recorded, if not by the rule below
    recorded_as: str | None = None

    @property
    def fingerprint(self) -> str:
        return self.recorded_as or fingerprint({"args": self.args, "kwargs": self.kwargs})


def provider_key(id: OperationId, name: str, number: int) -> str:
    """The idempotency key that the provider is given: the same in every attempt, generation and worker."""
    text = json.dumps([id.tenant, id.task, id.key, name, number])
    return f"idem-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def effect(attempt: Attempt, call: Call) -> Any:
    """Call the outside world under a key, unless its result is recorded already.

    Raises `InvalidArguments` before anything is begun if `fn` or `reconcile` does not take the arguments.
    """
    entry = entries.recorded(attempt, call.name, "effect", call.fingerprint)
    if entry is None or entry["state"] in ("not_happened", "compensated"):
        # Not once it was begun: a deploy may repair the function before the next attempt.
        entries.check_call(
            f"effect {call.name!r}: the function", call.fn, *call.args, **call.kwargs, idempotency_key=""
        )
        if call.reconcile is not None:
            what = f"effect {call.name!r}: reconcile, which is called with the effect's arguments and doubt=,"
            entries.check_call(what, call.reconcile, *call.args, **call.kwargs, doubt=None)
    attempt.calls[call.name] = call
    if entry is not None and entry["state"] == "done":
        return results.from_text(entry["result"])
    with attempt.runtime.traced("effect", effect=call.name, repeated=entry is not None):
        return _perform(attempt, call, entry)


def _perform(attempt: Attempt, call: Call, entry: Mapping[str, Any] | None) -> Any:
    repeated = False
    if entry is not None and (refusal := refusal_of(entry, attempt.claim.generation)) is not None:
        raise refusal  # the refused attempt died before it could end the operation
    if entry is not None and entry["state"] == "begun":
        match ask(attempt, call):
            case Happened(result):
                return result
            case DidNotHappen(refusal=PermanentError() as refusal):
                raise refusal
            case StillUnknown(ask_again):
                _check_repeatable(attempt, call, ask_again)
                repeated = True
    if not repeated:
        attempt.check_may_begin()
        entry = _begin(attempt, call, number=attempt.first_number if entry is None else _next_number(entry))
        if call.reconcile is not None and call.name not in attempt.asked_first and _asks_first(attempt):
            attempt.asked_first.add(call.name)
            return _perform(attempt, call, entry)
    assert entry is not None
    attempt.check_lease()
    crash_point("effect.begun")
    try:
        result = _run(attempt, lambda: call.fn(*call.args, **call.kwargs, idempotency_key=entry["key"]))
    except NotSent:
        if not repeated:
            _change(attempt, call.name, {"state": "not_happened", "sent": False})
        raise
    except StoredFailure as failure:
        return _after_stored_failure(attempt, call, failure)
    except (EffectUnknown, Unfinished):
        raise  # the call itself does not know: the effect stays open
    except PermanentError as error:
        if repeated and not (isinstance(error, StoredRefusal) and attempt.policy.provider_keeps_refusals):
            return _after_refused_repeat(attempt, call, error)
        # The outcome is known: nothing happened. Only a replay may call again, under the next key.
        _change(attempt, call.name, {"state": "not_happened"} | refusals.recorded(error, attempt.claim.generation))
        raise
    crash_point("effect.called")
    return _record(attempt, call.name, result)


def _asks_first(attempt: Attempt) -> bool:
    """Whether the provider may know of calls that this database has forgotten."""
    until = attempt.runtime.settings.ask_first_until
    if until is None:
        return False
    with attempt.runtime.autocommit(attempt.claim.id.tenant) as connection:
        return not clock.has_come(connection, until)


def ask(attempt: Attempt, call: Call, *, after: PermanentError | None = None) -> Answer:
    """Ask the provider what became of a call that was begun, and record its answer.

    `after`: the refusal of a repeat, which a "no" makes the outcome.
    """
    begun = attempt.claim.effects[call.name]
    if call.reconcile is None:
        return StillUnknown()
    with attempt.runtime.autocommit(attempt.claim.id.tenant) as connection:
        now = clock.database_time(connection)
    age = max(now - begun["begun_at"], 0.0)
    ended_for = None if begun["ended_at"] is None else max(now - begun["ended_at"], 0.0)
    reconcile, doubt = call.reconcile, EffectInDoubt(begun["key"], age, ended_for)
    with attempt.runtime.traced("reconcile", effect=call.name):
        answer = _run(attempt, lambda: reconcile(*call.args, **call.kwargs, doubt=doubt))
    match answer:
        case Happened(result):
            return Happened(_record(attempt, call.name, result))
        case DidNotHappen(refusal):
            refused = after if refusal is None else refusal
            _change(
                attempt,
                call.name,
                {"state": "not_happened"}
                | ({} if refused is None else refusals.recorded(refused, attempt.claim.generation)),
            )
        case StillUnknown():
            attempt.writes.roll_back()  # the call may follow, with no transaction open
        case _:  # a forgotten return must not count as an answer
            raise TypeError(
                f"effect {call.name!r}: reconcile must return Happened, DidNotHappen() or StillUnknown, "
                f"got {type(answer).__name__}"
            )
    return answer


def _check_repeatable(attempt: Attempt, call: Call, ask_again: float | None) -> None:
    """Raise unless the call may be repeated under its key: `EffectUnknown` for a person, `Defer` to ask again."""
    begun = attempt.claim.effects[call.name]
    with attempt.runtime.autocommit(attempt.claim.id.tenant) as connection:
        now = clock.database_time(connection)
    age = max(now - begun["begun_at"], 0.0)
    # A call may take as long as an attempt; its key must not expire meanwhile.
    if age > attempt.policy.provider_key_retention - attempt.runtime.settings.longest_run:
        raise EffectUnknown(f"effect {call.name!r}: begun {age:.0f} s ago, and its key could expire during the call")
    if begun["ended_at"] is not None:
        _check_askable(call)
        # Repeating is pointless, and it is too early to say no: ask again, after twice as long each time.
        seconds = max(now - begun["ended_at"], 1.0) if ask_again is None else ask_again
        raise Defer(min(seconds, 60.0), f"effect {call.name!r}: whether it happened is still open")
    if attempt.ends_as is not None:
        if ask_again is not None:
            raise Defer(ask_again, f"effect {call.name!r}: whether it happened is still open")
        attempt.check_may_begin()


def _check_askable(call: Call) -> None:
    """Raise `EffectUnknown` without a `reconcile`: after a stored failure, only a person could find out."""
    if call.reconcile is None:
        raise EffectUnknown(f"effect {call.name!r}: the provider replays a stored failure, and there is no reconcile")


def _after_stored_failure(attempt: Attempt, call: Call, failure: StoredFailure) -> Any:
    """The provider keeps a failure under this key: record that, then try the next key if nothing has happened."""
    with attempt.runtime.autocommit(attempt.claim.id.tenant) as connection:
        ended_at = clock.database_time(connection)
    _change(attempt, call.name, {"ended_at": ended_at})
    _check_askable(call)
    if call.name in attempt.moved_on:
        raise failure  # one more key per attempt: a provider that fails under every key is left alone for a while
    attempt.moved_on.add(call.name)
    return _perform(attempt, call, attempt.claim.effects[call.name])


def _after_refused_repeat(attempt: Attempt, call: Call, refusal: PermanentError) -> Any:
    """A repeat was refused, which says nothing about the call before it: ask the provider."""
    match ask(attempt, call, after=refusal):
        case Happened(result):
            return result
        case DidNotHappen(refusal=found):
            raise found or refusal
        case StillUnknown(ask_again) if ask_again is not None:
            raise Defer(ask_again, f"effect {call.name!r}: a repeat was refused, and whether it happened is still open")
    raise EffectUnknown(
        f"effect {call.name!r}: a repeated call was refused ({refusal.code}), which says nothing about the first one"
    ) from refusal


def _begin(attempt: Attempt, call: Call, *, number: int) -> dict[str, Any]:
    entry = {
        "kind": "effect",
        "state": "begun",
        "key": provider_key(attempt.claim.id, call.name, number),
        "number": number,
        "args": call.fingerprint,
        "position": attempt.next_position(),
        "ended_at": None,
    }
    attempt.claim.effects[call.name] = entry | {"begun_at": attempt.begin_effect(call.name, entry)}
    return attempt.claim.effects[call.name]


def _next_number(entry: Mapping[str, Any]) -> int:
    """The number of the next key: a key under which nothing was sent is used again."""
    return int(entry["number"]) + (1 if entry.get("sent", True) else 0)


def _record(attempt: Attempt, name: str, result: Any) -> Any:
    text = _run(attempt, lambda: entries.as_text(attempt, name, result))
    _change(attempt, name, {"state": "done", "result": text})
    crash_point("effect.recorded")
    return results.from_text(text)


def _run(attempt: Attempt, part: Callable[[], T]) -> T:
    """Call a function of the application. What it leaves in the session shares the commit of its recorded outcome.

    Committed later, it would be lost if the attempt is repeated: then the outcome is known, and the function not called.
    """
    try:
        return part()
    except BaseException:
        attempt.writes.roll_back()
        raise


def _change(attempt: Attempt, name: str, change: dict[str, Any]) -> None:
    attempt.change_effect(name, change)
    attempt.claim.effects[name] = attempt.claim.effects[name] | change
    attempt.writes.follow_up()
