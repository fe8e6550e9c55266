"""A handle on an operation: its status, and its result once there is one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from celery import Celery

from .application import runtime_of
from .errors import OperationBusy, OperationFailed, OperationNotFound
from .store import operations
from .store.answers import error_fields
from .wire import results
from .wire.keys import OperationId

# Seconds between two reads of the record. Most operations end within a few; for the others, a pause that grows with the
# time waited delays the answer by at most half of it, and a hundred waiters cost Postgres a hundred reads a second.
FIRST_PAUSE = 0.05
PAUSE_GROWTH = 1.5
LONGEST_PAUSE = 1.0


@dataclass(frozen=True, slots=True)
class StoredOperation:
    """An operation as it is recorded. `status`: "started", "released", "completed" or "failed"."""

    id: OperationId
    status: str
    generation: int
    attempts: int
    duplicates: int
    result_text: str | None
    error: dict[str, str] | None

    @property
    def result(self) -> Any:
        """The stored result; None also when there is none, so look at `status` first."""
        return None if self.result_text is None else results.from_text(self.result_text)


@dataclass(frozen=True, slots=True)
class Handle:
    """Returned by `enqueue`; also made from an app and a key alone. Reads Postgres, never a result backend."""

    app: Celery
    id: OperationId
    task_id: str | None = None

    def lookup(self) -> StoredOperation | None:
        """The stored operation; None before its first attempt."""
        runtime = runtime_of(self.app)
        with runtime.autocommit() as connection:
            row = operations.lookup(connection, self.id, runtime.settings.service)
        if row is None:
            return None
        error = None if row.error is None else error_fields(row.error)
        return StoredOperation(self.id, row.status, row.generation, row.attempts, row.duplicates, row.result, error)

    def status(self) -> str:
        """ "waiting" before the first attempt, then "started", "released", "completed" or "failed"."""
        operation = self.lookup()
        return "waiting" if operation is None else operation.status

    def wait(self, timeout: float) -> StoredOperation:
        """Wait until the operation has ended. Raises `OperationBusy` after `timeout` seconds.

        Reads the record after longer and longer pauses, up to a second, and holds no connection in between.
        """
        deadline = time.monotonic() + timeout
        pause = FIRST_PAUSE
        while True:
            operation = self.lookup()
            if operation is not None and operation.status in ("completed", "failed"):
                return operation
            if (left := deadline - time.monotonic()) <= 0:
                raise OperationBusy(f"{self.id.task}: not finished within {timeout} s")
            time.sleep(min(pause, left))
            pause = min(pause * PAUSE_GROWTH, LONGEST_PAUSE)

    def result(self, timeout: float = 0.0) -> Any:
        """The result, waiting for it for up to `timeout` seconds.

        Raises `OperationFailed` with the stored error, `OperationBusy` if the operation has not ended by then.
        """
        operation = self.wait(timeout)
        if operation.error is not None and operation.status == "failed":
            raise OperationFailed(operation.error["message"], operation.error["code"])
        return operation.result


def lookup(app: Celery, task: str, key: str, *, tenant: str | None = None) -> StoredOperation:
    """Read an operation by its task's name and its key; `tenant` defaults to the setting. Raises `OperationNotFound`."""
    id = OperationId(tenant or runtime_of(app).settings.tenant, task, key)
    stored = Handle(app, id).lookup()
    if stored is None:
        raise OperationNotFound(f"{task}: no operation has this key")
    return stored
