"""What a handler is given for one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..attempt.attempt import Attempt
from ..attempt.conclusions import Undo
from ..attempt.effects import Reconcile
from ..attempt.session import AttemptSession
from .message import StreamMessage


class Handling:
    """One run of a handler: `session`, `effect` and `step`, as a task has them, and the message."""

    __slots__ = ("_attempt", "message")

    def __init__(self, attempt: Attempt, message: StreamMessage) -> None:
        self._attempt = attempt
        self.message = message

    @property
    def key(self) -> str:
        """The idempotency key."""
        return self._attempt.claim.id.key

    @property
    def tenant(self) -> str:
        """Whose operation it is."""
        return self._attempt.claim.id.tenant

    @property
    def session(self) -> AttemptSession:
        """The SQLAlchemy session; its work is committed with the position. Raises `LeaseLost`."""
        return self._attempt.session

    def check_lease(self) -> None:
        """Raise `LeaseLost` if another process may handle the message by now."""
        self._attempt.check_lease()

    def effect(
        self, name: str, fn: Callable[..., Any], /, *args: Any, reconcile: Reconcile | None = None, **kwargs: Any
    ) -> Any:
        """Call the outside world under the message's key, as `IdempotentTask.effect` does."""
        return self._attempt.effect(name, fn, *args, reconcile=reconcile, **kwargs)

    def step(self, name: str, fn: Callable[..., Any], /, *args: Any, undo: Undo | None = None, **kwargs: Any) -> Any:
        """Commit a database phase before the handler goes on, as `IdempotentTask.step` does."""
        return self._attempt.step(name, fn, *args, undo=undo, **kwargs)
