"""What the record keeps of effects and steps, by name: the rules that both share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import EffectMismatch, EffectNameReused, InvalidArguments, OpenTransaction
from ..wire import results
from .refusals import refusal_of

if TYPE_CHECKING:
    from .attempt import Attempt


def check_call(what: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Raise `InvalidArguments` if a function does not take these arguments, or is `async`.

    One without a signature is not checked.
    """
    refuse_coroutine(what, function)
    try:
        # not the wrapped function's: a decorator may call it with other arguments
        inspect.signature(function, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidArguments(f"{what} cannot be called with these arguments: {error}") from None
    except ValueError:
        return


def refuse_coroutine(what: str, function: Callable[..., Any]) -> None:
    """Raise `InvalidArguments` for an `async` function: called, it would return without having done anything."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        raise InvalidArguments(f"{what}: the function is `async`, and nothing here would await it")


def recorded(attempt: Attempt, name: str, kind: str, arguments: str) -> dict[str, Any] | None:
    """What earlier attempts recorded under a name.

    Raises `LeaseLost`, `OpenTransaction`, `EffectNameReused`, `EffectMismatch`.
    """
    attempt.check_lease()
    if attempt.writes.in_transaction:
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
    # What has not happened, or was undone, may be done with other arguments: it is another call, under the next key.
    is_closed = (
        recorded["state"] in ("not_happened", "compensated") and refusal_of(recorded, attempt.claim.generation) is None
    )
    if recorded["args"] != arguments and not is_closed:
        raise EffectMismatch(f"{name!r} was begun with other arguments in an earlier attempt")
    return recorded


def _article(kind: str) -> str:
    return "an effect" if kind == "effect" else "a step"


def as_text(attempt: Attempt, name: str, result: Any) -> str:
    return results.to_text(result, limit=attempt.runtime.settings.result_limit, what=f"result of {name!r}")
