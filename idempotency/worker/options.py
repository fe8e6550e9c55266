"""Options of a task that are misspelt or have a value of no use, which Celery would take as they are."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from string import Formatter
from typing import Annotated, Any, Literal

from celery.utils.time import rate
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


def _rate(value: Any) -> Any:
    try:
        rate(value)
    except KeyError:
        raise ValueError("no such unit") from None
    return value


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, type) else value


_Seconds = Annotated[float, Strict(), AllowInfNan(False), Field(gt=0)]
_Limit = Annotated[float, Strict(), AllowInfNan(False), Field(ge=0)]

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
    "batch_wait": (Annotated[_Seconds, Field(le=60)], "seconds above 0 and at most 60, as a number"),
    "time_limit": (_Limit | None, "seconds from 0, which is none, as a number"),
    "soft_time_limit": (_Limit | None, "seconds from 0, which is none, as a number"),
    "rate_limit": (
        Annotated[str | int | float, AfterValidator(_rate)] | None,
        "as Celery reads it: 10, '10/s', '10/m' or '10/h'",
    ),
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
    _check_amount(cls)


def _check_amount(cls: type[Any]) -> None:
    """Refuse an `amount` that names no argument of the task. Raises `SettingsError`."""
    amount, run = getattr(cls, "amount", None), cls.__dict__.get("run")
    if amount is None or run is None:
        return
    try:
        named = (
            [field for _, field, _, _ in Formatter().parse(amount) if field is not None] if "{" in amount else [amount]
        )
    except ValueError as error:
        raise SettingsError(f"amount of {name_of(cls)}: {error}") from None
    parameters = inspect.signature(getattr(run, "__func__", run)).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    for field in named:
        if (argument := re.split(r"[.[]", field)[0]) not in parameters:
            raise SettingsError(f"amount of {name_of(cls)}: the task has no argument {argument!r}")


def check_batch(cls: type[Any], given: Iterable[str]) -> None:
    """Refuse options of batches in a task whose messages are claimed one by one. Raises `SettingsError`.

    `given`: by the task itself, of `batch_commit`, `batch_wait` and `rate_limit`.
    """
    if cls.batch > 1 and "rate_limit" in given and cls.rate_limit is not None:
        raise SettingsError(
            f"batch of {name_of(cls)}: does nothing with a rate_limit, by which messages go to the pool one by one"
        )
    if cls.batch == 1 and "batch" not in vars(cls):
        for name in sorted(set(given) - {"rate_limit"}):
            raise SettingsError(f"{name} of {name_of(cls)}: does nothing without batch=, how many are claimed at once")
