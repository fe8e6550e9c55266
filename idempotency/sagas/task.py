"""`@saga`: a task that calls others, waits for events, and is undone if it fails.

    @saga("return_processing", key="{return_id}", entity="return_id", app=app)
    def process_return(saga, return_id):
        label = saga.call(create_label, return_id=return_id, undo=void_label)
        if saga.wait_for("carrier.pickup_confirmed", match=return_id, timeout=timedelta(days=5)) is None:
            saga.step("escalate", open_case, return_id)

The code runs again from its beginning each time the saga goes on, and what it has recorded is read instead of done. So it
must come to the same steps in the same order: whatever may differ is read in a step, or by `now` and `uuid`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn
from uuid import UUID, uuid4

from celery import Celery

from ..attempt.attempt import Attempt
from ..attempt.policy import Policy
from ..attempt.runtime import Runtime
from ..errors import (
    CallRefused,
    Defer,
    InvalidArguments,
    Misuse,
    SettingsError,
)
from ..events import expect, matched_by
from ..observe.logs import log
from ..reasons import SAGA_MISMATCH
from ..store import clock
from ..store.answers import Claimed
from ..text import storable
from ..wire import keys
from ..wire.delivery import Delivery, Named
from ..wire.headers import KEY_HEADER, TENANT_HEADER
from ..worker.decorator import MakesTask
from ..worker.task import IdempotentTask
from . import compensation, stopping, waits
from .attempt import SagaAttempt
from .calls import Call, call, run_all
from .misuse import raised_as_misuse
from .trouble import TRANSIENT
from .waits import seconds_of


class SagaTask(IdempotentTask[..., Any]):
    """A task that is a saga; its code gets it as its first argument. Made by `@saga`."""

    abstract = True
    saga_entity: ClassVar[str | None] = None
    saga_events: ClassVar[Mapping[str, str]] = MappingProxyType({})

    # ------------------------------------------------------------ what the code uses

    def step(self, name: str, fn: Callable[..., Any], /, *args: Any, undo: Any = None, **kwargs: Any) -> Any:
        """Commit a database phase, once: `fn(session, *args, **kwargs)`. Returns its result, which is JSON.

        `undo`, an idempotent task, is called with the same arguments if the saga fails later, and with `result=` if it
        has such a parameter. Raises what `fn` raises, `Misuse`, `InvalidResult` and `LeaseLost`. Only a
        `PermanentError` is recorded: code that catches any other meets it again at its next use of the saga.
        """
        with self._saga.used() as attempt:
            return attempt.step(name, fn, *args, undo=undo, **kwargs)

    def effect(
        self, name: str, fn: Callable[..., Any], /, *args: Any, reconcile: Any = None, undo: Any = None, **kwargs: Any
    ) -> Any:
        """Call the outside world under a stable key, as `IdempotentTask.effect` does; `undo` as in `step`."""
        with self._saga.used() as attempt:
            return attempt.effect(name, fn, *args, reconcile=reconcile, undo=undo, **kwargs)

    def call(self, task: Any, /, *args: Any, undo: Any = None, **kwargs: Any) -> Any:
        """Run an idempotent task, and wait for its result: enqueued in the commit that records the call.

        Its key is derived from the saga's. Raises `CallFailed` if the task fails, and `Misuse`.
        """
        with self._saga.used() as attempt:
            return run_all(attempt, [call(task, *args, undo=undo, **kwargs)])[0]

    def gather(self, *calls: Call) -> list[Any]:
        """Run several tasks at once, and wait for all: `saga.gather(call(a, 1), call(b, 2))`. Returns their results.

        If some fail, the failure of the one named first is raised, once all have ended.
        """
        with self._saga.used() as attempt:
            return run_all(attempt, calls)

    def wait_for(self, event_type: str, *, match: str | int | UUID, timeout: timedelta | float) -> Any | None:
        """Wait for an event that matches; returns it as a consumer gets it, or None after `timeout`.

        The saga has to name the type in `events=`, with the part of the event's data that `match` is compared with. An
        event that has come before the wait counts; each event ends one wait of a saga. Waiting holds nothing.
        """
        with self._saga.used() as attempt:
            if event_type not in self.saga_events:
                known = ", ".join(sorted(self.saga_events)) or "none"
                raise Misuse(f"wait_for: the saga does not name the event {event_type!r} in events=; named: {known}")
            with raised_as_misuse():
                value = keys.check_key(str(match) if type(match) is int else match, field="match")
            wanted = matched_by(self.saga_events[event_type], value)
            return waits.wait_for(attempt, event_type, wanted, seconds_of("timeout", timeout))

    def sleep(self, duration: timedelta | float) -> None:
        """Wait for a time, by the database's clock."""
        with self._saga.used() as attempt:
            waits.sleep(attempt, seconds_of("sleep", duration))

    def now(self) -> datetime:
        """The database's time when the code first came here; the same each time it runs again."""

        def database_time() -> float:
            with self._saga.runtime.autocommit(self.tenant) as connection:
                return clock.database_time(connection)

        with self._saga.used() as attempt:
            return datetime.fromtimestamp(attempt.value("now", database_time), UTC)

    def uuid(self) -> UUID:
        """A random UUID; the same each time the code runs again."""
        with self._saga.used() as attempt:
            return UUID(attempt.value("uuid", lambda: str(uuid4())))

    def version(self, name: str) -> bool:
        """Whether this saga takes the new path: `if saga.version("refund-first"): ...`.

        False if it had passed this point before the code that asks was deployed. Each saga gets the same answer for good.
        """
        with self._saga.used() as attempt:
            return attempt.version(name)

    @property
    def session(self) -> NoReturn:
        with self._saga.used():
            raise Misuse("a saga reads and writes in its steps, which are recorded: saga.step(name, fn, ...)")

    def replace(self, sig: Any) -> NoReturn:
        with self._saga.used():
            raise Misuse("replace: a saga cannot be replaced; it can call another one")

    def apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise CallRefused(f"{self.name}: a saga may wait for days, so it is not run here; enqueue it")

    def _run_as_errback(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
        raise CallRefused(
            f"{self.name}: a saga may wait for days, so it is no errback; enqueue it from a task that is one"
        )

    # ------------------------------------------------------------ one delivery

    @property
    def _saga(self) -> SagaAttempt:
        if not self._is_running:
            raise Misuse(f"{self.name}: a saga is used by its own code, in the thread that runs it")
        attempt = self._attempt
        assert isinstance(attempt, SagaAttempt)
        return attempt

    def _new_attempt(self, runtime: Runtime, claim: Claimed, delivery: Delivery, policy: Policy) -> SagaAttempt:
        about = claim.id.key if self.saga_entity is None else delivery.arguments.get(self.saga_entity)
        entity = None if about is None else storable(str(about))[:255] or claim.id.key
        return SagaAttempt(runtime, claim, delivery, policy, entity_id=entity)

    def named_anywhere(self, args: Sequence[Any], kwargs: Mapping[str, Any], headers: Mapping[str, Any]) -> Named:
        """As for any task. Arguments that do not fit are no reason to refuse a saga: a deploy has changed them, and it may be
        undone without them."""
        try:
            return super().named_anywhere(args, kwargs, headers)
        except InvalidArguments:
            if (key := headers.get(KEY_HEADER)) is None:
                raise
            by_name = {**dict(zip(self.signature_of_run.parameters, args, strict=False)), **kwargs}
            return Named(self._operation_anywhere(by_name, key, headers.get(TENANT_HEADER)), by_name)

    def _body(self, attempt: Attempt) -> Any:
        assert isinstance(attempt, SagaAttempt)
        attempt.has_run = True
        if attempt.is_compensating:
            if compensation.is_open(attempt):
                self._settle(attempt)
            compensation.run(attempt, self.app.tasks)
        try:
            self._bound(self.request.args or (), self.request.kwargs or {})
        except InvalidArguments as error:
            stopping.stop(
                attempt, SAGA_MISMATCH, f"it was called before a deploy changed it: {error}", tries_again=True
            )
        try:
            return super()._body(attempt)
        except Exception as error:
            attempt.raise_unrecorded(error)
            raise

    def _settle(self, attempt: SagaAttempt) -> None:
        """Run the code once more, as far as an effect of unknown outcome: it knows how to ask. It may begin nothing."""
        attempt.ends_as = compensation.reason(attempt.saga)
        try:
            super()._body(attempt)
        except (Defer, *TRANSIENT):
            raise
        except Exception as error:
            log.info("saga_settled", task=self.name, error=type(error).__name__)
        attempt.writes.roll_back()


def saga(
    name: str,
    *,
    key: Any,
    entity: str | None = None,
    events: Mapping[str, str] = MappingProxyType({}),
    app: Celery,
    **options: Any,
) -> MakesTask[SagaTask]:
    """Make a saga of a function: its first argument is the saga, the others are those of `enqueue`.

    `name` is its type, and the task's name; never rename one that has begun. `key` as for any task; `entity`: the argument
    that says what it is about, shown as `entity_id`. `events`: the types of events it may wait for, each with the
    template that a wait's `match` is compared with: `{"carrier.pickup_confirmed": "{return_id}"}`. `options` are those of
    `@app.task`. Raises `SettingsError`.
    """

    def register(function: Callable[..., Any]) -> Any:
        task = app.task(
            bind=True,
            name=name,
            key=key,
            saga_entity=entity,
            saga_events=dict(events),
            **{"base": SagaTask, "shared": False, **options},  # its events are of this application
        )(function)
        if entity is not None and entity not in task.signature_of_run.parameters:
            raise SettingsError(f"saga {name}: entity={entity!r} is no argument of {function.__name__}")
        for event_type, template in events.items():
            keys.check_key(event_type, field="events")
            expect(app, event_type, template)
        return task

    return register
