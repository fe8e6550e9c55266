"""How an idempotent task is called, under a key: enqueued, sent, or run here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, TypeVar, Unpack
from uuid import UUID

from celery import Signature
from kombu.utils.uuid import uuid
from typing_extensions import ParamSpec

from ..application import runtime_for, runtime_of, serves_no_cell
from ..errors import CallRefused, InvalidArguments, WrongCell
from ..framework import framework
from ..handle import Handle, R_co
from ..observe.logs import log
from ..settings import Settings
from ..store import outbox
from ..store.callers import AsyncCaller, Caller, Pending, in_transaction_of
from ..store.refused import explained
from ..wire.delivery import Named
from ..wire.headers import FINGERPRINT_HEADER, KEY_HEADER, TENANT_HEADER, senders_headers
from ..wire.keys import OperationId
from ..wire.message import Message
from . import eager, following, publishing, sending
from .following import FOLLOWS
from .keyed import Keyed, shown
from .using import CallOptions, P, Using, check_options, check_sent, checked_delay

if TYPE_CHECKING:
    from celery.result import AsyncResult

Q = ParamSpec("Q")
T = TypeVar("T")
TaskT = TypeVar("TaskT", bound="KeyedTask")

# The options of enqueue() that are not arguments of the task.
ENQUEUE_OPTIONS = tuple(CallOptions.__annotations__)
# The options of the decorator that every enqueued message gets.
TASK_OPTIONS = ("queue", "exchange", "routing_key", "priority", "time_limit", "soft_time_limit")
# Never a session: the caller forgot it.
_NO_SESSION = (type(None), str, int, float, list, tuple, dict, UUID)


def _needs_session(enqueue: Callable[Concatenate[TaskT, Q], T]) -> Callable[Concatenate[TaskT, Q], T]:
    """Say that the session is missing in `task.enqueue("p1")` and `task.enqueue(payment_id="p1")`, before anything else.

    Whether the session can be used is `store.callers`' to say.
    """

    @wraps(enqueue)
    def checked(task: TaskT, /, *args: Q.args, **kwargs: Q.kwargs) -> T:
        if not args or isinstance(args[0], _NO_SESSION):
            got = f"; got {type(args[0]).__name__}" if args else ""
            raise InvalidArguments(
                f"{task.name}.{enqueue.__name__}: the first argument is the session whose commit sends the message, as in "
                f"{enqueue.__name__}(session, ...){got}"
            )
        return enqueue(task, *args, **kwargs)

    return checked


class KeyedTask(Keyed[P, R_co], Generic[P, R_co]):
    """A Celery task that is called under a key, and whose calls may be part of a commit. Use `IdempotentTask`."""

    abstract = True

    @property
    def _settings(self) -> Settings:
        return runtime_of(self.app).settings

    def _settings_for(self, tenant: str) -> Settings:
        return runtime_for(self.app, tenant).settings

    def _check_serves(self, tenant: object) -> None:
        """Raise `WrongCell` where only `enqueue` is left: in a process that serves no cell, and so has no broker."""
        if serves_no_cell(self.app):
            cell = None if tenant is None else runtime_for(self.app, str(tenant)).settings.cell
            named = "no tenant is given" if cell is None else f"tenant {tenant!r} is of cell {cell!r}"
            raise WrongCell(
                f"{self.name}: {named}, and this process serves no cell: enqueue it, with a session of that cell's database"
            )

    @_needs_session
    def enqueue(self, session: Caller, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """Send this task with the caller's commit: `capture_payment.enqueue(session, payment_id=...)`.

        `session` is a Session or Connection of SQLAlchemy, or a connection of psycopg or psycopg 2, with a transaction.
        The arguments are the task's own, and of `apply_async`'s options countdown (seconds), eta (aware datetime),
        priority, queue, task_id, headers, idempotency_key, tenant and ordering_key; an argument of the task wins over an
        option of its name. A type checker accepts the arguments alone: with one, pass options through `using`. Celery's
        signals `before_task_publish` and `after_task_publish` are sent here.

        Raises `MissingKey`, `InvalidKey` and `InvalidArguments`; then nothing was written. Raises `SettingsError` where
        the tables, or a right on them, are missing.
        """
        parameters = self.signature_of_run.parameters
        named = [name for name in ENQUEUE_OPTIONS if name in kwargs and name not in parameters]
        arguments = {name: value for name, value in kwargs.items() if name not in named}
        return self._enqueue(session, args, arguments, {name: kwargs[name] for name in named})

    def using(self, **options: Unpack[CallOptions]) -> Using[P, R_co]:
        """The task with options for its next call: `capture_payment.using(countdown=60).enqueue(session, payment_id=...)`.

        The options are those of `enqueue`. Raises `InvalidArguments` for any other.
        """
        if unknown := sorted(options.keys() - set(ENQUEUE_OPTIONS)):
            raise InvalidArguments(f"using: no option {unknown[0]!r}; there are {', '.join(ENQUEUE_OPTIONS)}")
        return Using(self, options)

    def _enqueue(
        self,
        session: Caller,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Mapping[str, Any],
        *,
        beyond: int = 0,
    ) -> Handle[R_co]:
        args, kwargs = self._as_sent(args, kwargs)
        options = dict(given)
        countdown, eta = checked_delay(options.pop("countdown", None), options.pop("eta", None))
        task_id = str(options.pop("task_id", None) or uuid())
        own = senders_headers(options.pop("headers", None) or {})
        id, headers = self._checked(
            args, kwargs, options.pop("idempotency_key", None), options.pop("tenant", None), own, beyond=beyond
        )
        ordering_key = options.pop("ordering_key", None)
        check_options(self.app, task_id=task_id, **options)
        # the decorator's options apply to every message of the task, as in apply_async
        options = {name: value for name, value in self._get_exec_options().items() if name in TASK_OPTIONS} | options
        runtime = runtime_for(self.app, id.tenant)
        connection = in_transaction_of(session, runtime.home_for(id.tenant))

        def write(message: Message) -> None:
            if span is not None:
                sending.note_message(span, message, message.queue(self.app))
            with explained():
                outbox.insert(
                    connection,
                    id,
                    headers[FINGERPRINT_HEADER],
                    message,
                    service=runtime.settings.service,
                    queue=message.queue(self.app),
                    countdown=countdown,
                    eta=eta,
                    ordering_key=ordering_key,
                )

        headers = {**own, **headers}
        with sending.span_of(runtime, "enqueue", self.name, own) as span:
            headers |= {} if span is None else span.headers()
            publishing.publish(self, args, kwargs, write, task_id=task_id, headers=headers, **shown(id), **options)
        return Handle(self.app, id, task_id, headers[FINGERPRINT_HEADER])

    @_needs_session
    async def aenqueue(self, session: AsyncCaller, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """Send this task with an async caller's commit: `await capture_payment.aenqueue(session, payment_id=...)`.

        `session` is an AsyncSession or AsyncConnection of SQLAlchemy, with psycopg or asyncpg, or an AsyncConnection of
        psycopg. Everything else is as in `enqueue`.
        """
        pending = Pending()
        handle = self.enqueue(pending, *args, **kwargs)
        await pending.send(session)
        return handle

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        *,
        idempotency_key: object = None,
        tenant: str | None = None,
        **options: Any,
    ) -> AsyncResult[R_co]:
        """Send the task now. Protected against duplicates, not against a lost publish: that is what `enqueue` is for.

        Raises `MissingKey`, `InvalidKey` and `InvalidArguments`, also for `expires`, `expiration` and a `serializer` other than
        json; then nothing was sent.
        """
        follows = options.pop(FOLLOWS, False)
        celerys = (task_id, producer, link, link_error, shadow)
        named = {"idempotency_key": idempotency_key, "tenant": tenant}
        try:
            self._check_serves((options.get("headers") or {}).get(TENANT_HEADER) if tenant is None else tenant)
            if not follows:
                following.check(self.app, (link, options.get("chain"), options.get("chord")), link_error)
            with sending.span_of(runtime_of(self.app), "send", self.name, options.get("headers") or {}) as span:
                if span is not None:
                    options["headers"] = {**(options.get("headers") or {}), **span.headers()}
                return self._send(self._as_sent(args, kwargs), celerys, named, dict(options))
        except CallRefused as error:
            if not follows or following.is_too_large(args, kwargs):
                raise
            log.warning("refused_call_sent", task=self.name, error=f"{error}")
            return following.send_refused(self, args, kwargs, celerys, named, options)

    def apply(
        self,
        args: Any = None,
        kwargs: Any = None,
        *,
        idempotency_key: object = None,
        tenant: str | None = None,
        **options: Any,
    ) -> Any:
        """Run the task here, eagerly, under its key; retries follow at once, and a `Defer` is raised.

        Raises `CallRefused` inside an open transaction of this thread, because the task commits on another connection.
        """
        self._check_serves(tenant)
        framework().check_no_transaction()
        eager.check_no_transaction(runtime_of(self.app))
        args, kwargs = self._as_sent(args, kwargs)
        given = senders_headers(options.pop("headers", None) or {})
        id, headers = self._checked(args, kwargs, idempotency_key, tenant, given)
        eager.check_may_begin(self.app, id)
        return super().apply(args, kwargs, headers={**given, **headers}, **options)

    def _check_call(self, call: Signature) -> OperationId:
        """The operation that this signature is for. Raises the `CallRefused` that sending it would raise."""
        options = call.options
        args, kwargs = self._as_sent(call.args, call.kwargs)
        headers = senders_headers(options.get("headers") or {})
        check_sent(self.app, options, headers)
        id, _ = self._checked(args, kwargs, options.get("idempotency_key"), options.get("tenant"), headers)
        return id

    def named_by(self, args: Sequence[Any], kwargs: Mapping[str, Any], headers: Mapping[str, Any]) -> Named:
        """The operation that a message names, by its headers or by its arguments. Raises `CallRefused`, and `SettingsError`
        if it cannot be told which cell its tenant is of."""
        named = self.named_anywhere(args, kwargs, headers)
        self.check_cell(named.id)
        return named

    def named_anywhere(self, args: Sequence[Any], kwargs: Mapping[str, Any], headers: Mapping[str, Any]) -> Named:
        """The operation that a message names, whichever cell its tenant is of. Raises `CallRefused`."""
        arguments = self._bound(args, kwargs)
        return Named(
            self._operation_anywhere(arguments, headers.get(KEY_HEADER), headers.get(TENANT_HEADER)), arguments
        )
