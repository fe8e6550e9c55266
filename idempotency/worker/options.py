"""Options of a task that are misspelt or have a value of no use, which Celery would take as they are."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    Field,
    InstanceOf,
    Strict,
    TypeAdapter,
    ValidationError,
)

from ..errors import SettingsError
from ..providers import ProviderContract


def name_of(cls: type[Any]) -> str:
    """A task as its sender calls it; a base has the name of its class alone."""
    return vars(cls).get("name") or cls.__name__


def check_spelling(cls: type[Any], root: type[Any]) -> None:
    """Refuse an option of the decorator that is nearly one of `root` or of a class derived from it.

    Celery takes any name and would run without it. Raises `SettingsError`.
    """
    if "_decorated" not in vars(cls):
        return  # a base of the application's own, with methods and attributes as it likes
    ours = {
        name
        for base in cls.__mro__[1:]
        if issubclass(base, root)
        for name in vars(base).get("__annotations__", {})
        if not name.startswith("_")
    }
    known = {name for base in cls.__mro__[1:] for name in vars(base)}
    for name in (name for name in vars(cls) if not name.startswith("_") and name not in known):
        if near := get_close_matches(name, ours, n=1, cutoff=0.65 if len(name) <= 4 else 0.8):
            raise SettingsError(f"{name} of {name_of(cls)}: no such option; did you mean {near[0]}?")


def _takes(arguments: int) -> AfterValidator:
    """A function that can be called with so many positional arguments."""

    def check(value: Any) -> Any:
        try:
            inspect.signature(value).bind(*range(arguments))
        except TypeError as error:  # also of what is no function
            raise ValueError(str(error)) from None
        except ValueError:  # written in C, without a signature
            pass
        return value

    return AfterValidator(check)


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, type) else value


_Seconds = Annotated[float, Strict(), AllowInfNan(False), Field(gt=0)]

# What each option has to be, and in words.
_NEEDED: dict[str, tuple[Any, str]] = {
    "key": (str | Annotated[Any, _takes(1)] | None, "a template, a function of the arguments, or None"),
    "on_failed": (Annotated[Any, _takes(3)] | None, "a function that takes (session, operation, error)"),
    "permanent_errors": (
        Annotated[tuple[type[BaseException], ...], BeforeValidator(_listed)],
        "a tuple of exception classes",
    ),
    "provider": (InstanceOf[ProviderContract] | None, "a ProviderContract, as idempotency.providers has them"),
    "effect_types": (Mapping[str, Any], "a mapping of effects' names to types"),
    "on_busy": (Literal["ack", "wait"], "'ack' or 'wait'"),
    "batch": (Annotated[int, Strict(), Field(ge=1, le=1000)], "a whole number from 1 to 1000"),
    "batch_commit": (Literal["together", "each"], "'together' or 'each'"),
    "batch_wait": (_Seconds, "seconds above 0, as a number"),
    "amount": (Annotated[str, Strict(), Field(min_length=1)] | None, "a template, the name of an argument, or None"),
    "moves_money": (Annotated[bool, Strict()], "True or False"),
    "max_attempts": (Annotated[int, Strict(), Field(ge=1)] | None, "a whole number from 1"),
    "retention_completed": (_Seconds | None, "seconds above 0, as a number"),
    "retention_failed": (_Seconds | None, "seconds above 0, as a number"),
}
_CHECKS = {name: TypeAdapter(type_) for name, (type_, _) in _NEEDED.items()}


def check_values(cls: type[Any]) -> None:
    """Refuse an option whose value is of no use, which would show only in the worker, when it is first needed.

    One class as `permanent_errors` becomes a tuple. A base has the options that it declares. Raises `SettingsError`.
    """
    for name, (_, needed) in _NEEDED.items():
        if not hasattr(cls, name):
            continue
        value = getattr(cls, name)
        try:
            checked = _CHECKS[name].validate_python(value)
        except ValidationError:
            raise SettingsError(f"{name} of {name_of(cls)}: must be {needed}, got {value!r}") from None
        if name == "permanent_errors":
            cls.permanent_errors = checked


def check_batch(cls: type[Any], given: Iterable[str]) -> None:
    """Refuse options of batches in a task that has none: its messages would be claimed one by one. Raises `SettingsError`."""
    if cls.batch == 1 and "batch" not in vars(cls):
        for name in given:
            raise SettingsError(f"{name} of {name_of(cls)}: does nothing without batch=, how many are claimed at once")
