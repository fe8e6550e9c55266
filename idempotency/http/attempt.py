"""The attempt that a handler works in, and how its thread and the event loop take turns.

`run()` holds the operation in a thread. Its body starts the application on the event loop and then waits in that
thread, where it runs the calls that the handler submits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context, copy_context
from queue import Empty, SimpleQueue
from threading import Lock, get_ident
from typing import Any, TypeVar

from ..attempt import conclusions
from ..attempt.attempt import Attempt
from ..attempt.effects import Reconcile
from ..attempt.entries import refuse_coroutine
from ..attempt.session import AttemptSession
from ..errors import EffectMismatch, EffectUnknown, Unfinished

T = TypeVar("T")
# Seconds between two checks by a waiting thread that its event loop still runs.
LOOP_CHECK = 1.0


class RequestAttempt:
    """What a handler of a keyed request finds in `request.state.idempotency`.

    A synchronous handler uses `session`, `effect` and `step` directly. An asynchronous one awaits `run_sync`, so that
    the event loop stays free.
    """

    def __init__(self, attempt: Attempt, loop: asyncio.AbstractEventLoop) -> None:
        self._attempt = attempt
        self._loop = loop
        # the thread that runs the handler's calls
        self._thread = get_ident()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = Lock()
        self._has_ended = False
        self.has_session = False
        # Set when a person has to decide about an effect. It overrides the handler's answer.
        self.verdict: EffectUnknown | Unfinished | EffectMismatch | None = None

    @property
    def tenant(self) -> str:
        return self._attempt.claim.id.tenant

    @property
    def key(self) -> str:
        return self._attempt.claim.id.key

    @property
    def session(self) -> AttemptSession:
        """The SQLAlchemy session; its work is committed with the answer. For synchronous handlers. Raises `LeaseLost`."""
        self._check_open()
        return self._opened()

    def _opened(self) -> AttemptSession:
        self.has_session = True
        session = self._attempt.session
        session.stay_off(self._loop)
        return session

    def check_lease(self) -> None:
        """Raise `LeaseLost` if another request may hold the operation by now."""
        self._attempt.check_lease()

    def effect(
        self, name: str, fn: Callable[..., Any], /, *args: Any, reconcile: Reconcile | None = None, **kwargs: Any
    ) -> Any:
        """Call the outside world, as `IdempotentTask.effect` does."""
        self._check_open()
        try:
            return self._attempt.effect(name, fn, *args, reconcile=reconcile, **kwargs)
        except (EffectUnknown, Unfinished) as verdict:
            self.verdict = verdict
            raise
        except EffectMismatch as mismatch:
            # Every next request would meet it, too. Over an effect that was begun it becomes a person's matter.
            if conclusions.has_acted(self._attempt.claim.effects):
                self.verdict = mismatch
            raise

    def step(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Commit a database phase before the handler goes on: `fn(session, *args, **kwargs)`.

        It stays committed whatever the handler answers: unlike a task's, it takes no `undo`.
        """
        self._check_open()
        return self._attempt.step(name, fn, *args, **kwargs)

    async def run_sync(self, fn: Callable[[AttemptSession], T]) -> T:
        """Call `fn(session)` in the attempt's own thread, and wait for it without blocking the event loop.

        Raises `InvalidArguments` for a coroutine function: the thread has no event loop.
        """
        return await asyncio.wrap_future(self._submit(fn))

    def run(self, fn: Callable[[AttemptSession], T]) -> T:
        """Call `fn(session)` in the attempt's own thread, from a synchronous handler.

        For Django: its ORM is part of the attempt's transaction in that thread only.
        """
        return self._submit(fn).result()

    def _submit(self, fn: Callable[[AttemptSession], T]) -> Future[T]:
        refuse_coroutine("run_sync", fn)
        answer: Future[T] = Future()
        context: Context = copy_context()

        def call() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(context.run(fn, self._opened()))
            except BaseException as error:
                answer.set_exception(error)

        with self._lock:
            self._check_open()
            is_nested = get_ident() == self._thread
            if not is_nested:
                self._calls.put(call)
        if is_nested:
            call()  # the thread would wait for itself
        return answer

    def _check_open(self) -> None:
        """Raise for a thread or a task that outlives the handler: what it does has no part in the answer."""
        if self._has_ended:
            raise RuntimeError("the request has ended: its session is closed")

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the attempt's thread: do what the handler asks for, until it has ended.

        Raises `RuntimeError` if the loop is closed first: its process ends, and no handler will answer.
        """
        while not loop.is_closed():
            with suppress(Empty):
                if (call := self._calls.get(timeout=LOOP_CHECK)) is None:
                    return
                call()
        raise RuntimeError("the event loop was closed while a handler ran")

    def end(self) -> None:
        """The handler has ended: refuse further calls."""
        with self._lock:
            self._has_ended = True
        self._calls.put(None)
