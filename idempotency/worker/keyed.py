"""A Celery task whose calls have a key, wherever its records are: which operation a call names, and how it is sent."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from celery import Task
from celery._state import get_current_worker_task

from ..errors import InvalidArguments, InvalidKey, MissingKey, SettingsError, WrongCell
from ..handle import R_co
from ..settings import Settings
from ..wire import keys
from ..wire.headers import (
    FINGERPRINT_HEADER,
    KEY_HEADER,
    MESSAGE_VERSION,
    SERVICE_HEADER,
    TENANT_HEADER,
    VERSION_HEADER,
    senders_headers,
)
from ..wire.keys import KeyFrom, KeyFunction, OperationId
from . import signed_calls
from .options import check_spelling
from .using import P, check_kept, check_sent

if TYPE_CHECKING:
    from celery import Task as TypedTask
    from celery.result import AsyncResult
else:

    class TypedTask:
        """`Task`, where Celery's own has no parameters: before Celery 5.7."""

        def __class_getitem__(cls, parameters: Any) -> Any:
            return Task


class Keyed(TypedTask[P, R_co], Generic[P, R_co]):
    """A Celery task that is called under a key. Use `IdempotentTask` or `DeduplicatedTask`."""

    abstract = True
    acks_late = True
    reject_on_worker_lost = True
    # True would end in an acknowledgement of what has not ended.
    retry_on_worker_lost = False
    # A hard limit that passes before the claim must not acknowledge.
    acks_on_timeout = False
    # An exception leaves the wrapper only after the record says failed.
    acks_on_failure = True
    if not hasattr(Task, "acks_on_timeout"):  # Celery 5.5 and 5.6 have one option for both
        acks_on_failure_or_timeout = False
    # Celery logs results and sends them to Flower; a result may hold what neither should show. Not one character of a value is
    # shown, for the first alone tells true from false; before Celery 5.7, a list or a dictionary shows how it ends.
    resultrepr_maxsize = 0
    # What Celery would do outside the attempt: see `hooks`.
    tracks_attempts: ClassVar[bool] = False
    own_before_start: ClassVar[Any] = None
    own_call: ClassVar[Any] = None

    key: ClassVar[str | KeyFunction | None] = None
    _key_function: ClassVar[KeyFunction | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_spelling(cls, Keyed)
        if inspect.isfunction(key := cls.__dict__.get("key")):
            cls.key = staticmethod(key)
        function = cls._key_function = keys.template(cls.key) if isinstance(cls.key, str) else cls.key
        if (run := cls.__dict__.get("run")) is not None and isinstance(function, KeyFrom):
            parameters = inspect.signature(getattr(run, "__func__", run)).parameters
            for field in function.fields:
                if field not in parameters:
                    named = cls.__dict__.get("name") or cls.__name__
                    raise SettingsError(f"key of {named}: the task has no argument {field!r}")

    @property
    def _settings(self) -> Settings:
        """The settings of the application. Raises `SettingsError`."""
        raise NotImplementedError

    def _settings_for(self, tenant: str) -> Settings:
        """The settings where a tenant's operations are. Raises `WrongCell` and `SettingsError`."""
        settings = self._settings
        settings.check_cell(tenant)
        return settings

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R_co]:
        """Send the task now, like `apply_async`, with its arguments alone."""
        return self.apply_async(args, kwargs)

    def _send(self, call: Any, celerys: Any, named: dict[str, Any], options: dict[str, Any]) -> AsyncResult[R_co]:
        """Send a message. `celerys`: of Celery's arguments those with positions. Raises `CallRefused`."""
        args, kwargs = call
        if (serializer := options.get("serializer") or self.serializer or "json") != "json":
            raise InvalidArguments(f"serializer: must be 'json', got {serializer!r}")
        if (protocol := self.app.conf.task_protocol) != 2:
            raise SettingsError(f"task_protocol: must be 2, which workers accept, got {protocol}")
        task_id, *others, shadow = celerys
        given = senders_headers(options.pop("headers", None) or {})
        id, headers = self._checked(args, kwargs, named["idempotency_key"], named["tenant"], given)
        headers = {**given, **headers}
        options = shown(id) | options
        sent = {**self._get_exec_options(), **options, "headers": headers}
        shadow = shadow or self.shadow_name(args, kwargs, sent)
        # What follows a plain task has no caller who could be told: a worker refuses it, and a letter says so.
        if _follows_plain_task(options):
            check_kept(sent)
        else:
            check_sent(self.app, {**sent, "task_id": task_id, "shadow": shadow}, headers)
        if self.app.conf.task_always_eager:  # Celery goes on to `apply`
            options |= {"idempotency_key": id.key, "tenant": id.tenant}
        elif (
            cell := self._settings.own_cell
        ) is not None and self.app.conf.broker_write_url != cell.broker_url.get_secret_value():
            raise SettingsError(f"{self.name}: the broker is not that of the cell {self._settings.cell!r}")
        with signed_calls.signing(self._settings):
            return super().apply_async(args, kwargs, task_id, *others, shadow, headers=headers, **options)

    def _checked(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        key: object,
        tenant: str | None,
        headers: Mapping[str, Any] = MappingProxyType({}),
        *,
        beyond: int = 0,
    ) -> tuple[OperationId, dict[str, Any]]:
        """The operation that a call names, and the headers of its message. Raises `CallRefused`.

        `beyond`: bytes that the arguments may have beyond the limit.
        """
        arguments = self._bound(args, kwargs)
        key = headers.get(KEY_HEADER) if key is None else key
        tenant = headers.get(TENANT_HEADER) if tenant is None else tenant
        id = self._operation(arguments, key, tenant)
        settings = self._settings_for(id.tenant)
        limit = settings.arguments_limit + beyond
        if (size := len(keys.canonical_json(arguments))) > limit:
            raise InvalidArguments(f"arguments: at most {limit} bytes as JSON, got {size}")
        sent = {
            KEY_HEADER: id.key,
            TENANT_HEADER: id.tenant,
            FINGERPRINT_HEADER: keys.fingerprint(arguments),
            VERSION_HEADER: MESSAGE_VERSION,
            SERVICE_HEADER: settings.service,
        }
        return id, sent

    def corrected(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], id: OperationId, *, is_made: bool
    ) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        """Other arguments for an operation that has a message: as they travel, with the headers that name it.

        Checked as those of a call are. `is_made`: its key was made from the arguments, and has to come out the same. Raises
        `CallRefused`.
        """
        args, kwargs = self._as_sent(args, kwargs)
        named, headers = self._checked(args, kwargs, None if is_made else id.key, id.tenant)
        if named != id:
            raise InvalidKey(f"{self.name}: these arguments make another key, and so another operation")
        return list(args), dict(kwargs), headers

    def _as_sent(
        self, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they travel: of a task with `pydantic=True`, models as the JSON that Celery makes of them."""
        sent: tuple[Sequence[Any], Mapping[str, Any]] = tuple(args or ()), dict(kwargs or {})
        if (dump := getattr(self, "_dump_pydantic_arguments", None)) is not None:  # not before Celery 5.7
            sent = dump(*sent)
        return tuple(sent[0]), dict(sent[1])

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by parameter name. With `typing=False`, those that do not fit are left to the body."""
        try:
            return keys.bind(self.signature_of_run, args, kwargs)
        except InvalidArguments:
            if self.typing:
                raise
            return {"*": list(args), "**": dict(kwargs)}  # no parameter has such a name

    def may_vary(self, headers: Mapping[str, Any]) -> bool:
        """Whether a message may name another operation the next time: by its key function, which may read a clock, say."""
        return headers.get(KEY_HEADER) is None and not isinstance(self._key_function, KeyFrom)

    def check_cell(self, id: OperationId) -> None:
        """Raise `WrongCell` for an operation that is not of this process's cell, and `SettingsError` if that cannot be told."""
        try:
            self._settings_for(id.tenant)
        except WrongCell as refused:
            raise WrongCell(f"{self.name}: {refused}") from None

    def _operation(self, arguments: Mapping[str, Any], key: object, tenant: object) -> OperationId:
        id = self._operation_anywhere(arguments, key, tenant)
        self.check_cell(id)  # a key of another cell is none here
        return id

    def _operation_anywhere(self, arguments: Mapping[str, Any], key: object, tenant: object) -> OperationId:
        """The operation that a call names, whichever cell its tenant is of."""
        function = type(self)._key_function
        if tenant is None:
            tenant = self._settings.tenant
        try:
            if key is None and function is None:
                raise MissingKey("give idempotency_key=, or the task a key template")
            key = keys.made_by(function, arguments) if key is None and function is not None else keys.check_key(key)
            return OperationId(keys.check_key(tenant, field="tenant"), self.name, key)
        except (MissingKey, InvalidKey) as refused:
            raise type(refused)(f"{self.name}: {refused}") from None

    @property
    def signature_of_run(self) -> inspect.Signature:
        signature: inspect.Signature | None = self.__dict__.get("_cached_signature")
        if signature is None:
            signature = self.__dict__["_cached_signature"] = inspect.signature(self.run)
        return signature


def _follows_plain_task(options: Mapping[str, Any]) -> bool:
    """Whether a worker sends this because a task of another kind has ended, or as the body of a chord."""
    current = get_current_worker_task()
    if current is None or isinstance(current, Keyed):
        return False
    is_of_its_end = "root_id" in options and options.get("parent_id") == current.request.id
    return is_of_its_end or str(current.name).startswith("celery.")


def shown(id: OperationId) -> dict[str, Any]:
    """What Flower and the logs may show of a call: its key, never its arguments."""
    return {"argsrepr": f"idempotency-key={id.key}", "kwargsrepr": "{}"}
