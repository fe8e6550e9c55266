"""What `IdempotentTask` has and `DeduplicatedTask` has not, because only a record in Postgres can keep it."""

from __future__ import annotations

import inspect
from typing import Any

from ..errors import SettingsError, UnsupportedControl
from .options import name_of

_COMMIT = "its record and its effects are not one commit"
_BATCH = "a batch is claimed by one statement in Postgres"
_NO_EFFECT = "no effect is recorded"
_NO_OUTBOX = "it has no outbox"
# Options of the decorator, and why there are none.
_OPTIONS = {
    "on_failed": _COMMIT,
    "on_busy": "a duplicate of what runs always comes back for the result",
    "provider": f"{_NO_EFFECT}; give `self.outside_key` to the provider",
    "effect_types": _NO_EFFECT,
    "batch": _BATCH,
    "batch_commit": _BATCH,
    "batch_wait": _BATCH,
    "moves_money": "people change no operation of a store",
}


class NotHere(UnsupportedControl, AttributeError):
    """`IdempotentTask` has this and `DeduplicatedTask` has not; the message says why. In a body it ends the operation."""


class _Absent:
    """An attribute that there is none of: whoever uses it is told why."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, task: Any, owner: type | None = None) -> Any:
        if task is None:
            return self
        raise NotHere(f"{self._name}: not of a DeduplicatedTask, because {self._why}; use IdempotentTask")


class Without:
    """The attributes of `IdempotentTask` that are refused by name."""

    session: Any = _Absent(_COMMIT)
    effect: Any = _Absent(_NO_EFFECT)
    step: Any = _Absent(_COMMIT)
    may_have_happened: Any = _Absent(_NO_EFFECT)
    refusal_of: Any = _Absent(_NO_EFFECT)
    enqueue: Any = _Absent(_NO_OUTBOX)
    aenqueue: Any = _Absent(_NO_OUTBOX)
    using: Any = _Absent(_NO_OUTBOX)
    replace: Any = _Absent("what replaces it would have to be one commit with its record")


def check_absent(cls: type[Any]) -> None:
    """Refuse the options that there are none of. Raises `SettingsError`, which names one."""
    for name, why in _OPTIONS.items():
        if inspect.getattr_static(cls, name, None) is not None:
            raise SettingsError(
                f"{name} of {name_of(cls)}: not of a DeduplicatedTask, because {why}; use IdempotentTask"
            )
