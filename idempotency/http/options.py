"""The middleware's options, checked when it is made: a wrong one would otherwise protect nothing, and say nothing."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from functools import partial
from typing import Any

from ..attempt.runtime import Runtime
from ..errors import SettingsError
from .body import media_type_of
from .rules import SERVER_ERRORS


def methods(given: Collection[str]) -> frozenset[str]:
    """Methods in capitals, as requests have them."""
    return frozenset(method.upper() for method in _texts("methods", given))


def headers(given: Collection[str]) -> frozenset[str]:
    return frozenset(name.lower() for name in _texts("kept_headers", given))


def media_types(given: Collection[str] | None) -> frozenset[str] | None:
    """Media types without their parameters, which no request is compared by."""
    return None if given is None else frozenset(media_type_of(each) for each in _texts("media_types", given))


def check_server_errors(given: str) -> None:
    if given not in SERVER_ERRORS:
        raise SettingsError(f"server_errors: must be one of {', '.join(SERVER_ERRORS)}, got {given!r}")


def check_functions(**given: Any) -> None:
    """Refuse coroutine functions: their coroutine would be taken for the answer, and `required` for true."""
    for name, function in given.items():
        if isinstance(function, partial):
            function = function.func
        if any(inspect.iscoroutinefunction(each) for each in (function, getattr(function, "__call__", None))):  # noqa: B004
            raise SettingsError(f"{name}: must be an ordinary function, not a coroutine function")


def takes_tenant(runtime: Any) -> bool:
    """Whether the runtime is given as a function of the tenant."""
    if isinstance(runtime, Runtime):
        return False
    parameters = inspect.signature(runtime).parameters.values()
    return any(
        each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        for each in parameters
    )


def _texts(name: str, given: Collection[str]) -> Collection[str]:
    if isinstance(given, str | bytes) or not all(isinstance(each, str) for each in given):
        raise SettingsError(f"{name}: must be a collection of texts, got {given!r}")
    return given
