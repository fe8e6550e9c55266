"""The arguments of what a saga does, as they are recorded: a later deploy may give the same ones in another way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import InvalidArguments
from ..wire import keys
from .misuse import raised_as_misuse


@raised_as_misuse()
def recorded(args: Sequence[Any], kwargs: Mapping[str, Any], named: Mapping[str, Any] | None) -> str:
    """Fingerprints of arguments as they are given and, if it is known, by name: `f(1)` is `f(order=1)`.

    Both, because a parameter that gets another name changes only the second. Raises `Misuse` for what is not JSON.
    """
    given = keys.fingerprint({"args": args, "kwargs": kwargs})
    return given if named is None else f"{given} {keys.fingerprint(named)}"


def named(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], **added: Any
) -> dict[str, Any] | None:
    """The arguments by name, without those that are `added`; None: the function does not say."""
    try:
        bound = keys.bind(inspect.signature(fn), args, {**kwargs, **added})
    except (InvalidArguments, TypeError, ValueError):
        return None
    return {name: value for name, value in bound.items() if name not in added}


def are_same(one: str | None, other: str | None) -> bool:
    """Whether two such records may be of the same arguments."""
    return one == other or (one is not None and other is not None and not set(one.split()).isdisjoint(other.split()))
