"""A handle on an operation: its status, and its result once there is one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Generic, Self, cast

from celery import Celery
from sqlalchemy.exc import OperationalError
from typing_extensions import TypeVar

from .application import runtime_for, runtime_of
from .errors import FingerprintMismatch, OperationBusy, OperationFailed, OperationNotFound
from .framework import framework
from .store import edits, operations, waking
from .store.answers import error_fields
from .store.callers import Caller, in_transaction_of
from .wire import references, results
from .wire.keys import OperationId, check_key, fingerprint_version

# Seconds between two reads of the record. Most operations end within a few; for the others, a pause that grows with the
# time waited delays the answer by at most half of it, and a hundred waiters cost Postgres a hundred reads a second.
FIRST_PAUSE = 0.05
PAUSE_GROWTH = 1.5
LONGEST_PAUSE = 1.0

# What a task's function returns. The value has been through JSON: a tuple comes back as a list.
R_co = TypeVar("R_co", covariant=True, default=Any)


@dataclass(frozen=True, slots=True)
class StoredOperation(Generic[R_co]):
    """An operation as it is recorded. `status`: "started", "released", "completed" or "failed".

    `error`: what its last attempt has ended with, also while another one follows; None once it is completed.
    """

    id: OperationId
    status: str
    generation: int
    attempts: int
    duplicates: int
    result_text: str | None
    error: dict[str, str] | None
    _decode: Callable[[str], Any] = field(default=results.from_text, repr=False, compare=False)

    @property
    def has_ended(self) -> bool:
        """Whether it is completed or failed."""
        return self.status in ("completed", "failed")

    @property
    def is_erased(self) -> bool:
        """Whether it was carried out, and its result has been erased since."""
        return self.result_text == results.ERASED

    @property
    def result(self) -> R_co | None:
        """The stored result; None also when there is none, so look at `status` first.

        A large one is fetched each time; on an event loop, `await handle` does that in a thread. Raises `ResultErased`,
        `ResultUnreadable`, and what the place of large results raises.
        """
        return None if self.result_text is None else cast(R_co, self._decode(self.result_text))


@dataclass(frozen=True, slots=True)
class Handle(Generic[R_co]):
    """Returned by `enqueue`; also made from an app and a key alone. Reads Postgres, never a result backend."""

    app: Celery
    id: OperationId
    task_id: str | None = None
    # of the call's arguments, from `enqueue`: the record of another call under the same key is not its own
    fingerprint: str | None = None

    @classmethod
    def of(cls, app: Celery, task: str, key: str, *, tenant: str | None = None) -> Self:
        """The handle of an operation by its task's name and its key, whether or not it exists; `tenant` defaults to the setting.

        Raises `InvalidKey` for a key that none can have.
        """
        return cls(app, OperationId(tenant or runtime_of(app).settings.tenant, task, check_key(key, field="key")))

    def lookup(self) -> StoredOperation[R_co] | None:
        """The stored operation; None before its first attempt.

        Raises, as all that reads it does, `FingerprintMismatch` if the key was used before with other arguments, and
        `OperationNotFound` if there is no such operation and its task is a misspelt name of one of the application's.
        """
        stored = self._read()
        if stored is None:
            _check_spelling(self.app, self.id.task)
        return stored

    def _read(self) -> StoredOperation[R_co] | None:
        runtime = runtime_for(self.app, self.id.tenant)
        with runtime.autocommit(self.id.tenant) as connection:
            row = operations.lookup(connection, self.id, runtime.settings.service)
            is_anothers = row is not None and self._is_anothers(row.fingerprint)
            # a person may have edited its arguments since
            is_anothers = is_anothers and edits.became(connection, self.id, [str(self.fingerprint)]) is None
        if row is None:
            return None
        if is_anothers:
            raise FingerprintMismatch(
                f"{self.id.task}: the key was used before with other arguments; this call never runs"
            )
        error = None if row.error is None or row.status == "completed" else error_fields(row.error)
        counts = row.generation, row.attempts, row.duplicates
        return StoredOperation(self.id, row.status, *counts, row.result, error, runtime.read_result)

    def _is_anothers(self, recorded: str) -> bool:
        # one by another rule cannot be compared
        is_comparable = fingerprint_version(recorded) == fingerprint_version(self.fingerprint)
        return self.fingerprint is not None and is_comparable and recorded != self.fingerprint

    def status(self) -> str:
        """How far it is: "accepted" before the first attempt, then "started", "released", "completed" or "failed".

        "not_found": nothing is stored. It was never enqueued, or that is not committed or was rolled back, or it ended and was
        purged; or its message went past the outbox, by `delay`, and waits in the broker.
        """
        operation = self.lookup()
        if operation is None and not self._waits():
            operation = self._read()  # it may have begun, and even ended, between the two
            if operation is None:
                return "not_found"
        return "accepted" if operation is None else operation.status

    def _waits(self) -> bool:
        runtime = runtime_for(self.app, self.id.tenant)
        with runtime.autocommit(self.id.tenant) as connection:
            return operations.accepted(connection, self.id, runtime.settings.service) is not None

    def wake(self, session: Caller) -> None:
        """Let an operation that waits for a provider (`Undecided`) ask again, once the session commits.

        For the code that learns of the provider's decision, such as a webhook. One that runs at this moment asks once more if it
        finds nothing decided; one that has ended or is not known stays as it is. Returns nothing, also not whether one waits:
        read `status` for that. On an event loop: `await session.run_sync(handle.wake)`. Raises `InvalidArguments` if the session
        is none, and `OperationNotFound` if the task is a misspelt name of one of the application's.
        """
        _check_spelling(self.app, self.id.task)
        runtime = runtime_for(self.app, self.id.tenant)
        waking.wake(in_transaction_of(session, runtime.home_for(self.id.tenant)), self.id, runtime.settings.service)

    def wait(self, timeout: float) -> StoredOperation[R_co]:
        """Wait until the operation has ended. Raises `OperationBusy` after `timeout` seconds, also if Postgres is away.

        Reads the record after longer and longer pauses, up to a second, and holds no connection in between.
        """
        deadline = time.monotonic() + timeout
        away, read = None, self.lookup
        for pause in _pauses():
            try:
                operation, away, read = read(), None, self._read  # a name is checked once
            except OperationalError as error:  # Postgres may be back before the time is over
                operation, away = None, error
            if operation is not None and operation.has_ended:
                return operation
            if (left := deadline - time.monotonic()) <= 0:
                break
            time.sleep(min(pause, left))
        raise OperationBusy(f"{self.id.task}: not finished within {timeout} s") from away

    def result(self, timeout: float = 0.0) -> R_co:
        """The result, waiting for it for up to `timeout` seconds.

        Raises `OperationFailed` with the stored error, `ResultErased`, and `OperationBusy` if the operation has not ended by
        then.
        """
        return _result_of(self.wait(timeout))

    async def alookup(self) -> StoredOperation[R_co] | None:
        """The stored operation, as `lookup()` returns it, read in a thread: the event loop is not blocked.

        A large result is fetched where `result` is read, so leave that to `await handle`.
        """
        return await self._in_thread(self.lookup)

    async def _in_thread(self, read: Callable[[], StoredOperation[R_co] | None]) -> StoredOperation[R_co] | None:
        if (reader := framework().reader()) is not None:
            return cast("StoredOperation[R_co] | None", await reader(read))
        readers = runtime_for(self.app, self.id.tenant).readers
        return await asyncio.get_running_loop().run_in_executor(readers, read)

    def __await__(self) -> Generator[Any, None, R_co]:
        """`await handle` gives the result, once the operation has ended. Raises `OperationFailed` with the stored error.

        Waits for as long as it takes, also for a Postgres that is away: `async with asyncio.timeout(5): await handle`
        limits that. A handle may be awaited by several callers, and more than once.
        """
        return self._aresult().__await__()

    async def _aresult(self) -> R_co:
        read, operation = self.lookup, None
        for pause in _pauses():
            with suppress(OperationalError):  # waits for Postgres, too
                operation, read = await self._in_thread(read), self._read  # a name is checked once
                if operation is not None and operation.has_ended:
                    break
            await asyncio.sleep(pause)
        assert operation is not None
        if not references.is_reference(operation.result_text or ""):
            return _result_of(operation)
        fetchers = runtime_for(self.app, self.id.tenant).fetchers
        return await asyncio.get_running_loop().run_in_executor(fetchers, _result_of, operation)


def _check_spelling(app: Celery, task: str) -> None:
    if task in app.tasks:
        return
    app.loader.import_default_modules()
    if task not in app.tasks and (near := get_close_matches(task, app.tasks, n=1, cutoff=0.8)):
        raise OperationNotFound(f"{task}: the application has no such task; did you mean {near[0]}?")


def _pauses() -> Iterator[float]:
    pause = FIRST_PAUSE
    while True:
        yield pause
        pause = min(pause * PAUSE_GROWTH, LONGEST_PAUSE)


def _result_of(operation: StoredOperation[R_co]) -> R_co:
    if operation.error is not None and operation.status == "failed":
        raise OperationFailed(operation.error["message"], operation.error["code"])
    return cast(R_co, operation.result)


def lookup(app: Celery, task: str, key: str, *, tenant: str | None = None) -> StoredOperation:
    """Read an operation by its task's name and its key; `tenant` defaults to the setting.

    Raises `OperationNotFound`, and `InvalidKey` for a key that none can have.
    """
    stored: StoredOperation | None = Handle.of(app, task, key, tenant=tenant).lookup()
    if stored is None:
        raise OperationNotFound(f"{task}: no operation has this key")
    return stored
