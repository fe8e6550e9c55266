"""What a body uses of its task: the session, effects and steps of the attempt that runs it.

Results keep the types of the functions that returned them. So do the arguments of a step without `undo`; those of an
effect are compared with its function when it is called, because Python's types cannot take `idempotency_key` out of a
function's parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from ..attempt import effects, steps
from ..attempt.attempt import Attempt
from ..attempt.conclusions import Undo
from ..attempt.session import AttemptSession
from ..errors import IdempotencyError, PermanentError
from ..handle import R_co
from .calls import KeyedTask
from .deliveries import attempt_of
from .using import P

Q = ParamSpec("Q")
T = TypeVar("T")


class RunningTask(KeyedTask[P, R_co], Generic[P, R_co]):
    """A task as its body sees it. Use `IdempotentTask`."""

    abstract = True

    @property
    def session(self) -> AttemptSession:
        """The SQLAlchemy session of this attempt: opened on first use, committed with the result. Raises `LeaseLost`."""
        return self._attempt.session

    @property
    def tenant(self) -> str:
        """Whose operation this is: the `tenant` it was enqueued with."""
        return self._attempt.claim.id.tenant

    def effect(
        self, name: str, fn: Callable[..., T], /, *args: Any, reconcile: effects.Reconcile | None = None, **kwargs: Any
    ) -> T:
        """Call the outside world: `fn(*args, idempotency_key=..., **kwargs)`. Returns its result, once that is recorded.

        No transaction may be open. If an earlier call has no recorded outcome, `reconcile(*args, doubt=..., **kwargs)` is
        asked first. Raises what `fn` raises, `EffectUnknown`, `EffectMismatch`, `EffectNameReused`, `OpenTransaction`,
        `InvalidArguments`, `InvalidResult`, `Defer` and `LeaseLost`.
        """
        return cast(T, effects.effect(self._attempt, effects.Call(name, fn, args, kwargs, reconcile)))

    def may_have_happened(self, name: str) -> bool:
        """Whether an earlier attempt has called this effect, and it has happened or may have."""
        return self._attempt.may_have_happened(name)

    def refusal_of(self, name: str) -> PermanentError | None:
        """What `effect` of this name will raise at once, because an earlier attempt was refused; not after a replay."""
        return self._attempt.refusal_of(name)

    # one signature cannot have a function's parameters and an option (PEP 612)
    @overload
    def step(self, name: str, fn: Callable[[AttemptSession], T], /, *, undo: Undo | None = None) -> T: ...
    @overload
    def step(
        self, name: str, fn: Callable[Concatenate[AttemptSession, ...], T], /, *args: Any, undo: Undo, **kwargs: Any
    ) -> T: ...
    @overload
    def step(
        self, name: str, fn: Callable[Concatenate[AttemptSession, Q], T], /, *args: Q.args, **kwargs: Q.kwargs
    ) -> T: ...
    def step(self, name: str, fn: Callable[..., Any], /, *args: Any, undo: Undo | None = None, **kwargs: Any) -> Any:  # type: ignore[misc]
        """Commit a database phase before the body goes on: `fn(session, *args, **kwargs)` and its result, once.

        If the operation ends without success, `undo(session, result)` takes the step back in the failing transaction,
        the last step first, and a replay does the step again. It must be a function that can be imported by its name. No
        undo runs while an effect is unknown, nor if a later effect has happened, unless it accepts `effects` (their
        results by name) and takes care of them. Raises what `fn` raises, `EffectMismatch`, `EffectNameReused`,
        `OpenTransaction`, `InvalidArguments`, `InvalidResult`, `OutcomeInDoubt` and `LeaseLost`.
        """
        return steps.step(self._attempt, name, fn, args, kwargs, undo)

    def check_lease(self) -> None:
        """Raise `LeaseLost` when another attempt may hold the operation; for long loops."""
        self._attempt.check_lease()

    @property
    def _is_running(self) -> bool:
        return attempt_of(self.request) is not None

    @property
    def _attempt(self) -> Attempt:
        attempt = attempt_of(self.request)
        if attempt is None:
            raise IdempotencyError(f"{self.name}: session, effect and step exist only while the task runs")
        return attempt
