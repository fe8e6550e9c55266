"""One keyed request: claimed in a thread, handled on the event loop, committed in the thread, and only then answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError, SQLAlchemyError

from ..attempt import conclusions
from ..attempt.attempt import Attempt
from ..attempt.claim import peek
from ..attempt.endings import Finished, Release
from ..attempt.policy import Policy
from ..attempt.run import Outcome, run
from ..attempt.runtime import Runtime
from ..errors import (
    Again,
    CallRefused,
    Defer,
    EffectUnknown,
    IdempotencyError,
    LeaseLost,
    NothingDone,
    OutcomeInDoubt,
    PermanentError,
    SessionNotYours,
    SettingsError,
    Unfinished,
)
from ..observe.logs import log
from ..observe.traces import trace_headers
from ..reasons import HTTP_STATUS
from ..store.answers import Completed
from ..wire import results
from ..wire.delivery import Delivery
from ..wire.keys import OperationId
from .answers import AnswerNotStored, answer_to
from .asgi import Application, Headers, Message, Scope, Send
from .attempt import RequestAttempt
from .quota import QuotaExceeded, Quotas
from .request import Request
from .response import Buffer, stored
from .rules import Rule

# There is no limit: every attempt was asked for by a request.
UNLIMITED = 2**31 - 1
T = TypeVar("T")
Result = Outcome | QuotaExceeded | IdempotencyError | SQLAlchemyError


@dataclass(frozen=True, slots=True)
class Terms:
    """How the responses of keyed requests are kept, and what their statuses mean."""

    rule_of: Callable[[int, Headers], Rule]
    kept_headers: Collection[str]
    response_limit: int
    spool_limit: int


class Exchange:
    """Carries out one request. `work` runs in a thread; the application runs on the loop that made the exchange."""

    def __init__(
        self, app: Application, request: Request, id: OperationId, runtime: Runtime, terms: Terms, quotas: Quotas
    ) -> None:
        self._app = app
        self._request = request
        # as it came: each run of the handler begins with it
        self._scope = {**request.scope, "state": {**request.scope.get("state", {})}}
        self.id = id
        self._runtime = runtime
        self._terms = terms
        self._quotas = quotas
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._task: asyncio.Task[None] | None = None
        # The handler's answer may be wrong about what is committed: the client does not get it.
        self._is_guess = False
        # the handler's one run: under which attempt, and what it was given
        self._ran: tuple[Attempt, RequestAttempt, Buffer] | None = None
        # its response, what it raised, and what was to be stored
        self.buffer: Buffer | None = None
        self.error: BaseException | None = None
        self.kept: dict[str, Any] | None = None

    async def peek(self) -> Result | None:
        """What the record says already, without a claim; None: the request is to be carried out."""
        readers = self._runtime.readers
        return await self._loop.run_in_executor(readers, self._asked, lambda: peek(self._runtime, self._delivery))

    def work(self) -> Result:
        """Claim, run, commit. What `run` raises is returned, since the request that waits may be gone.

        Raises `SettingsError` and `ProgrammingError`, which sending again does not help.
        """
        if self._runtime.traces is None:
            return self._asked(self._run)
        # a span of ours belongs to the trace that the request is in
        return self._context.copy().run(self._asked, self._run)

    def _run(self) -> Outcome | QuotaExceeded:
        settings, delivery = self._runtime.settings, self._delivery
        usual = Policy.by_settings(settings)
        policy = replace(usual, max_attempts=UNLIMITED, retention_completed=settings.retention_http)
        if (exceeded := self._quotas.refusal(self._runtime, self.id)) is not None:
            return exceeded
        return run(self._runtime, delivery, policy, self._body)

    def _asked(self, ask: Callable[[], T]) -> T | IdempotencyError | SQLAlchemyError:
        try:
            return ask()
        except CallRefused as error:
            return error
        except (SettingsError, ProgrammingError):
            raise  # no outage, but a setting, a table or a right that is missing: it is for the server's log
        except (IdempotencyError, SQLAlchemyError) as error:
            log.warning("http_unanswered", task=self.id.task, key=self.id.key, error=type(error).__name__)
            return error

    @cached_property
    def _delivery(self) -> Delivery:
        fingerprint, *others = self._request.fingerprints(self.id.tenant)
        headers: dict[str, str] = {}
        if self._runtime.traces is not None:
            headers = trace_headers({name.decode(): value.decode("latin-1") for name, value in self._request.headers})
        return Delivery(self.id, fingerprint, {}, headers=headers, only_asked=True, also=others)

    def _body(self, attempt: Attempt) -> dict[str, Any]:
        """Run the application, and say what its answer means."""
        if self._ran is not None:
            return self._conclude_again(attempt, *self._ran)
        given, self.buffer = RequestAttempt(attempt, self._loop), Buffer(self._terms.spool_limit)
        self._ran = attempt, given, self.buffer
        # the context is that of the request: tracing and logging find what they keep there
        context = self._context if self._runtime.traces is None else copy_context()
        self._loop.call_soon_threadsafe(self._start, given, self.buffer, context=context)
        given.serve(self._loop)
        assert self._task is not None
        self.error = asyncio.CancelledError() if self._task.cancelled() else self._task.exception()
        attempt.check_lease()
        return self._conclude(attempt, given, self.buffer)

    def _start(self, given: RequestAttempt, buffer: Buffer) -> None:
        self._task = self._loop.create_task(self._handle(given, buffer))
        self._task.add_done_callback(lambda _: given.end())

    async def _handle(self, given: RequestAttempt, buffer: Buffer) -> None:
        scope: Scope = {
            **self._scope,
            # replays get what is stored, so nothing inside may compress it for this client
            "headers": [header for header in self._request.headers if header[0] != b"accept-encoding"],
            "state": {**self._scope["state"], "idempotency": given},
            # nothing may reach the client past the buffer
            "extensions": {},
        }
        body: list[Message] = [{"type": "http.request", "body": self._request.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await buffer.ended.wait()  # a client that has gone does not stop what was begun
            return {"type": "http.disconnect"}

        try:
            await self._app(scope, receive, buffer.send)
        finally:
            self._pass_on(scope)

    def _pass_on(self, scope: Scope) -> None:
        """Let the middleware outside see what was found, as the route: it would have, without this one."""
        outside, own = self._request.scope, ("headers", "state", "extensions")
        outside.update((name, value) for name, value in scope.items() if name not in own)
        if found := {name: value for name, value in scope["state"].items() if name != "idempotency"}:
            outside.setdefault("state", {}).update(found)

    def _conclude_again(self, attempt: Attempt, ran: Attempt, given: RequestAttempt, buffer: Buffer) -> dict[str, Any]:
        """After a doubt: no request runs its handler twice. The answer of its run counts, unless another ran in between."""
        if isinstance(self.error, LeaseLost | OutcomeInDoubt) or not attempt.claim.resumes(ran.claim):
            raise given.verdict or self._lost()
        attempt.calls.update(ran.calls)
        return self._conclude(attempt, given, buffer, is_again=True)

    def _conclude(
        self, attempt: Attempt, given: RequestAttempt, buffer: Buffer, *, is_again: bool = False
    ) -> dict[str, Any]:
        """The response to store. Raises what else the answer means: `Again` to release, `PermanentError` to end."""
        if given.verdict is not None:  # also if the handler has caught it
            raise given.verdict
        error = self.error
        if isinstance(error, EffectUnknown | Unfinished | Defer):
            raise error
        if error is not None or buffer.is_too_large or not buffer.is_complete:
            raise self._released(error or _defect(buffer)) from error
        rule = self._rule(buffer)
        effects = attempt.claim.effects
        if rule is Rule.FORGET:
            raise NothingDone(0.0, AnswerNotStored(f"answered {buffer.status}"))
        if rule is Rule.RELEASE or conclusions.is_open(effects):
            # over an open effect any answer would be a guess: the next request asks the provider
            self._is_guess = rule is not Rule.RELEASE
            raise self._released(AnswerNotStored(f"answered {buffer.status}"))
        if rule is Rule.REFUSE and conclusions.has_acted(effects):
            raise PermanentError(f"answered {buffer.status} after an effect", f"{HTTP_STATUS}{buffer.status}")
        if rule is Rule.REFUSE:
            attempt.writes.discard()
        elif given.has_session:
            if is_again:  # what it wrote was rolled back with the earlier claim
                raise self._lost()
            self._flush(attempt)
        if effects:
            attempt.policy = replace(attempt.policy, retention_completed=self._longer())
        most = self._runtime.settings.result_limit
        self.kept = stored(buffer, self._terms.kept_headers, self._terms.response_limit, most)
        attempt.response_code = buffer.status
        return self.kept

    def _rule(self, buffer: Buffer) -> Rule:
        try:
            return self._terms.rule_of(buffer.status, buffer.headers)
        except Exception as error:  # of the user's function
            self.error = error
            raise self._released(error) from error

    def _longer(self) -> float:
        """How long a request is kept that has acted: its key is not free while its provider remembers the call."""
        settings = self._runtime.settings
        return max(settings.retention_http, settings.retention_completed, settings.provider_key_retention)

    def _flush(self, attempt: Attempt) -> None:
        """Send what the handler's session still holds: an error in it is the handler's own."""
        try:
            attempt.session.flush()
            if attempt.writes.is_broken:
                raise SessionNotYours("a database error was caught, and its transaction is lost: use begin_nested()")
        except Exception as error:
            self.error = error
            raise self._released(error) from error

    def _released(self, cause: BaseException) -> Again:
        """Due at once. The record names the kind of the error alone: its text may have the request's data in it."""
        said = cause if isinstance(cause, AnswerNotStored) else AnswerNotStored(f"raised {type(cause).__name__}")
        return Again(0.0, said)

    def _lost(self) -> Again:
        self._is_guess = True
        return self._released(AnswerNotStored("lost its hold of the operation"))

    async def answer(self, outcome: object, send: Send) -> None:
        """Send the handler's own answer if this request ran it to its end, and otherwise what the outcome means.

        Raises what the handler raised, for the server's error page and log.
        """
        match outcome:
            case Release(cause=DBAPIError() as error) if not isinstance(error, OperationalError):
                raise error  # Postgres has refused what the handler wrote, at COMMIT
            case Release(cause=AnswerNotStored()) if self.error is not None and not self._is_guess:
                raise self.error
            case Finished():
                is_own = True
            case Completed():
                # the answer to COMMIT was lost, and the record shows that it was carried out
                is_own = self.kept is not None and outcome.result != results.ERASED and outcome.value() == self.kept
            case Release(cause=AnswerNotStored()):
                is_own = not self._is_guess
            case _:
                is_own = False
        if is_own and self.buffer is not None and self.buffer.is_complete:
            await self.buffer.send_to(send)
        else:
            await answer_to(outcome)(self._request.scope, self._nothing, send)

    async def _nothing(self) -> Message:
        return {"type": "http.disconnect"}

    def close(self) -> None:
        if self.buffer is not None:
            self.buffer.close()


def _defect(buffer: Buffer) -> AnswerNotStored:
    return AnswerNotStored("answered too much" if buffer.is_too_large else "did not answer to the end")
