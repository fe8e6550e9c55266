"""Options of a task that are misspelt, which Celery would take as they are."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from ..errors import SettingsError


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
            raise SettingsError(f"{name} of {cls.__name__}: no such option; did you mean {near[0]}?")
