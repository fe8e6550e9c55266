"""Operations that move money: a person changes them only with a token that proves who they are.

A task or a stream declares it by `moves_money=True`. A saga moves money if it declares it, or if a task does that it has called
or is undone by; then so does what it has called, whose end may have it undone. A task that this application does not know
counts as moving money.
"""

from __future__ import annotations

from collections.abc import Sequence

from celery import Celery
from sqlalchemy import Connection

from ..application import runtime_of
from ..errors import NotAuthenticated
from ..store import letter_operations, renaming, saga_reading
from ..store.outbox import EXTERNAL
from ..streams.declaring import TASK_PREFIX, stream_of
from ..wire.keys import OperationId
from .change import Change, called

NEEDS_TOKEN = "moves money, or its task is not known here, so a change needs an operator's token"  # noqa: S105


def moves_money(app: Celery, connection: Connection, id: OperationId) -> bool:
    """Whether an operation moves money, as far as this application knows."""
    app.loader.import_default_modules()
    return any(_moves(app, task) for task in (id.task, *saga_reading.tasks_of(connection, id)))


def stream_moves_money(app: Celery, name: str) -> bool:
    """Whether the handler of the stream of this name moves money; one that is not known here counts as if it did."""
    app.loader.import_default_modules()
    return _moves(app, TASK_PREFIX + name)


def service_moves_money(app: Celery, connection: Connection, service: str) -> bool:
    """Whether anything stored for the application `service` moves money, as far as this one knows."""
    app.loader.import_default_modules()
    return any(_moves(app, task) for task in renaming.tasks_of(connection, service))


def letters_move_money(app: Celery, connection: Connection, letters: Sequence[int]) -> bool:
    """Whether the operation of one of these dead letters moves money."""
    app.loader.import_default_modules()
    for row in letter_operations.named(connection, letters):
        if row.tenant is None or row.task is None or row.key is None:
            if _moves(app, row.header_task or ""):
                return True
        elif moves_money(app, connection, OperationId(row.tenant, row.task, row.key)):
            return True
    return False


def check_verified(app: Celery, connection: Connection, id: OperationId, change: Change) -> None:
    """Raise `NotAuthenticated` for a change of what moves money by a person who has not proved who they are."""
    if not change.is_verified and moves_money(app, connection, id):
        raise NotAuthenticated(f"{called(id)}: {NEEDS_TOKEN}")


def check_verified_for(app: Celery, service: str, change: Change) -> None:
    """The same for a change of all that is stored for the application `service`."""
    with runtime_of(app).autocommit() as connection:
        if not change.is_verified and service_moves_money(app, connection, service):
            raise NotAuthenticated(f"{service}: {NEEDS_TOKEN}")


def _moves(app: Celery, name: str) -> bool:
    task = stream_of(name) or app.tasks.get(name)
    if task is None and name.startswith(EXTERNAL):  # an event for others, which runs nothing
        return False
    return bool(getattr(task, "moves_money", task is None))
