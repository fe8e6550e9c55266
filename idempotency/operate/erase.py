"""Erase: take a person's data out of an operation that has ended, and leave its key spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from celery import Celery

from ..application import runtime_of
from ..errors import ChangeRefused
from ..objects import ObjectStore
from ..observe.logs import log
from ..sagas.task import SagaTask
from ..store import erasure, objects, operations
from ..store.statements import repeatable
from ..wire.keys import OperationId
from .change import Change, audit, called, read, repeated
from .money import check_verified


class Erased(NamedTuple):
    """`operations`: whose data is erased, the one that was asked for first. `not_found`: large results that are not in their place.

    If that place was changed since, they are still in the one before. None is told again for a change that is repeated
    under its `request_id`.
    """

    operations: list[OperationId]
    not_found: list[str]


@repeatable
def erase(app: Celery, id: OperationId, change: Change) -> Erased:
    """Erase the arguments, results, errors, messages, answers and events of an operation, and of all that it has called as a saga.

    Its key stays spent: a duplicate is answered as one, without a result, other arguments are refused, and nothing runs it again.
    What has come since, as a late copy of its message, is erased by another call. Raises `OperationNotFound`,
    `NotAuthenticated`, and `ChangeRefused` for what has not ended, and while a letter, an effect, a message or a saga still
    needs its data.
    """
    app.loader.import_default_modules()  # its sagas
    runtime = runtime_of(app)
    with runtime.engine.begin() as connection:
        if repeated(connection, change, "erase", id) is not None:
            return Erased(erasure.family(connection, id), [])
        read(connection, id, runtime.settings.service)
        check_verified(app, connection, id, change)
        ids = erasure.family(connection, id)
        erasure.lock(connection, ids)
        rows = {each: operations.read_locked(connection, each) for each in ids}
        if rows[id] is None:
            raise ChangeRefused(f"{called(id)}: has not begun; only what has ended is erased")
        sagas = [name for name, task in app.tasks.items() if isinstance(task, SagaTask)]
        for each in ids:
            if (why := erasure.obstacle(connection, each, sagas)) is not None:
                raise ChangeRefused(f"{called(each)}: {why}")
        large = objects.of_operations(connection, ids)
        if large and runtime.settings.large_results_at is None:
            raise ChangeRefused(
                f"{called(id)}: has a large result; set idempotency_large_results_at, so that it can be erased"
            )
        erasure.erase(connection, ids)
        for each in ids:
            said = change if each == id else replace(change, request_id=None)
            audit(connection, said, "erase", each, rows[each], details={} if each == id else {"called_by": called(id)})
    return Erased(ids, _delete(runtime.settings.large_results_at, large))


def _delete(store: ObjectStore | None, names: Sequence[str]) -> list[str]:
    """Delete large results; returns those that are not there."""
    not_found: list[str] = []
    if store is None:
        return not_found
    for name in names:
        if _is_gone(store, name):
            not_found.append(name)
            continue
        try:
            store.delete([name])
        except Exception as error:  # nothing refers to it any more: then the next sweep deletes it
            log.warning("erased_object_left", object=name, error=type(error).__name__)
    if not_found:
        log.warning("erased_objects_not_found", objects=", ".join(not_found))
    return not_found


def _is_gone(store: ObjectStore, name: str) -> bool:
    """Whether the place has no such object; one that may be deleted there and not read counts as there."""
    try:
        store.get(name, 1)
    except KeyError:
        return True
    except Exception:
        return False
    return False
