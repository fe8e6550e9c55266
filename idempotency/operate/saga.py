"""Sagas: cancel one, give one an event that did not come, and let one go on that has stopped."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from celery import Celery
from sqlalchemy import Connection, Row

from ..application import runtime_of
from ..errors import ChangeRefused, OperationNotFound
from ..events import as_data, matched_by, new_attributes
from ..framework import framework
from ..reasons import CANCELLED
from ..store import letters, operations, saga_changes, saga_reading, saga_steps, sagas
from ..store.answers import error_text
from ..store.saga_changes import Retried
from ..store.sagas import COMPENSATING, RUNNING
from ..store.statements import repeatable
from ..wire import keys
from ..wire.keys import OperationId
from .change import Change, audit, called, read, repeated
from .change import find as find_operation
from .money import check_verified


@dataclass(frozen=True, slots=True)
class Signalled:
    """An event that a person has given to a saga. `is_awaited`: the saga goes on with it now, not when it comes to wait."""

    event_type: str
    match: str
    event_id: str
    is_awaited: bool


OBSERVED = "is no saga that runs: an observer has noted it"


# ---------------------------------------------------------------- which one


def find(
    app: Celery, connection: Connection, key: str, *, type: str | None = None, tenant: str | None = None
) -> OperationId:
    """Find the one saga that has this key, also one that has not begun. `type` is its name, or its end after a dot.

    Raises `OperationNotFound`, and `ChangeRefused` with the choices if there are several, or if it is no saga.
    """
    service = runtime_of(app).settings.service
    found = saga_reading.find(connection, key, service, type=type, tenant=tenant)
    if all(is_observed for _, is_observed in found):  # an operation of its key goes first, also one that has not begun
        with suppress(ChangeRefused, OperationNotFound):
            accepted = find_operation(connection, key, service, task=type, tenant=tenant)
            found = [(accepted, False)] if is_saga(app, connection, accepted) else found
    named = [id for id, is_observed in found if not is_observed] or [id for id, _ in found]
    # an exact name wins over the end of a longer one
    chosen = [id for id in named if id.task == type] or named
    if len(chosen) > 1:
        choices = "; ".join(f"--type {id.task} --tenant {id.tenant}" for id in chosen)
        raise ChangeRefused(f"key {key!r}: {len(chosen)} sagas have it, choose one: {choices}")
    if chosen:
        return chosen[0]
    id = find_operation(connection, key, service, task=type, tenant=tenant)
    if not is_saga(app, connection, id):
        raise ChangeRefused(f"{called(id)}: is not a saga")
    return id


def is_saga(app: Celery, connection: Connection, id: OperationId) -> bool:
    """Whether an operation is a saga: by its rows, or by its task if it has not begun."""
    app.loader.import_default_modules()
    return hasattr(app.tasks.get(id.task), "saga_entity") or (
        (row := saga_reading.saga(connection, id)) is not None and not row.observed
    )


# ---------------------------------------------------------------- changes


@repeatable
def cancel_saga(app: Celery, id: OperationId, change: Change) -> None:
    """From now on a saga is undone; when that is done, it has failed with the code `cancelled`.

    One that waits goes on at once, one that runs at its next write, and one that has not begun ends without having run.
    Raises `ChangeRefused` if it has ended or is being undone already, and `OperationNotFound`.
    """
    runtime = runtime_of(app)
    with runtime.engine.begin() as connection:
        if repeated(connection, change, "saga_cancel", id) is not None:
            return
        check_verified(app, connection, id, change)
        read(connection, id, runtime.settings.service)  # what an observer notes is no operation
        if not is_saga(app, connection, id):
            raise ChangeRefused(f"{called(id)}: {OBSERVED}")
        is_cancelled = sagas.cancel(connection, id, error_text(CANCELLED, change.reason))
        row = operations.read_locked(connection, id)
        sent = operations.accepted(connection, id, runtime.settings.service) if row is None else None
        if sent is not None and sent.status == "failed":
            raise ChangeRefused(
                f"{called(id)}: its message could not be published; replay its dead letter, or end it: "
                f"{framework().command} cancel"
            )
        if row is not None and row.status in ("completed", "failed"):
            raise ChangeRefused(f"{called(id)}: has {row.status}; there is nothing left to cancel")
        was = saga_reading.saga(connection, id)
        assert was is not None
        if not is_cancelled and was.status == COMPENSATING:
            why = json.loads(was.error)["code"] if was.error else CANCELLED
            raise ChangeRefused(f"{called(id)}: is being undone already, because of {why}")
        if row is not None and row.generation != was.generation:
            raise ChangeRefused(f"{called(id)}: was replayed just now; look again")
        audit(connection, change, "saga_cancel", id, row, details={"begun": row is not None})


@repeatable
def signal_saga(
    app: Celery, id: OperationId, event_type: str, data: Any, change: Change, *, match: str | None = None
) -> Signalled:
    """Give a saga an event that it waits for, as if it had been published, and only this saga.

    `match`: keep the event for a wait that is still to come; it may also be the one of now. The event has an attribute
    `person`. Raises `ChangeRefused`, which names what the saga waits for, and `InvalidArguments`.
    """
    runtime = runtime_of(app)
    keys.check_key(event_type, field="TYPE")
    data = as_data(data, limit=runtime.settings.arguments_limit)
    said = {"event_type": event_type, "data": _digest(data)} | ({} if match is None else {"match": match})
    with runtime.engine.begin() as connection:
        if (done := repeated(connection, change, "saga_signal", id, said=said)) is not None:
            details = done.details
            return Signalled(event_type, details["compared_with"], details["event_id"], details["is_awaited"])
        check_verified(app, connection, id, change)
        saga = _running(connection, id, runtime.settings.service)
        _check_named(app, id, event_type)
        now = _awaited(connection, saga, event_type)
        if match is not None:
            template = getattr(app.tasks.get(id.task), "saga_events", {}).get(event_type)
            if template is None:
                raise ChangeRefused(
                    f"{called(id)}: this process does not know the saga, and so not what a wait matches"
                )
            match = matched_by(template, match)
        if now is None and match is None:
            waits = ", ".join(wait.event_type for wait in saga_reading.waits(connection, saga.id)) or "no event"
            raise ChangeRefused(f"{called(id)}: waits for {waits}; send {event_type} ahead with --match")
        match = match if match is not None else now
        assert match is not None
        attributes = new_attributes(event_type, f"/people/{quote(change.actor, safe='')}") | {"person": change.actor}
        text = json.dumps({**attributes, "data": data})
        saga_steps.keep_event(
            connection, id.tenant, saga.service, event_type, match, attributes["id"], text, saga=saga.id
        )
        # read again: with the event's lock, the saga's attempts decide no wait for it until this is committed
        is_awaited = _awaited(connection, saga, event_type) == match
        if now == match and not is_awaited:
            raise ChangeRefused(f"{called(id)}: its wait for {event_type} has ended at this moment; look again")
        details = said | {"compared_with": match, "event_id": attributes["id"], "is_awaited": is_awaited}
        audit(connection, change, "saga_signal", id, None, details=details)
    return Signalled(event_type, match, attributes["id"], is_awaited)


@repeatable
def retry_saga(app: Celery, id: OperationId, change: Change) -> Retried:
    """Let a saga that has stopped go on now: after a deploy, or once what an undo needs is there again.

    An undo that has failed is replayed, and the saga goes on when it has ended. Raises `ChangeRefused` if the saga has not
    stopped, and `ReplayRefused`.
    """
    runtime = runtime_of(app)
    with runtime.engine.begin() as connection:
        if (done := repeated(connection, change, "saga_retry", id)) is not None:
            return Retried({}, done.details["waits_for"])
        check_verified(app, connection, id, change)
        retried = saga_changes.retry(connection, id, service=runtime.settings.service, app=app)
        for letter, undo in retried.letters.items():
            audit(connection, replace(change, request_id=None), "replay", undo, None, details={"dead_letter": letter})
        details = {"dead_letters": list(retried.letters), "waits_for": retried.waits_for}
        audit(connection, change, "saga_retry", id, operations.read_locked(connection, id), details=details)
    return retried


@repeatable
def mark_undone(app: Celery, id: OperationId, name: str, change: Change) -> None:
    """Record that a person has undone what a stopped saga could not undo; it goes on with the rest.

    `name`: what is undone. Its undo never runs again. Raises `ChangeRefused` unless the saga has stopped while it is undone,
    and the undo has failed or has not begun.
    """
    runtime = runtime_of(app)
    with runtime.engine.begin() as connection:
        if repeated(connection, change, "saga_undone", id, said={"undone": name}) is not None:
            return
        check_verified(app, connection, id, change)
        step = _to_undo(connection, id, name)
        if step.call_key is not None:  # locked before the saga, as its end would
            undo = OperationId(id.tenant, step.call_task, step.call_key)
            record = operations.read_locked(connection, undo)
            letters.close_undone(connection, undo, id)  # its replay would undo a second time
            if record is not None and record.status not in ("failed", "completed"):  # completed: it was replaced
                raise ChangeRefused(f"{called(id)}: the undo of {name!r} is {record.status}; wait for its end")
        if step.kind == "call" and step.of_key is not None:  # it is seen to; nor may a replay finish it now
            of = OperationId(id.tenant, step.of_task, step.of_key)
            record = operations.read_locked(connection, of)
            letters.close_undone(connection, of, id)
            if step.of_state == "failed" and record is not None and record.status != "failed":
                raise ChangeRefused(f"{called(id)}: {name!r} is being replayed, and {record.status}; wait for its end")
        saga = saga_changes.locked_stopped(connection, id, at_rest=True)
        if saga.status != COMPENSATING or not saga_changes.undone(connection, id, step):
            raise ChangeRefused(f"{called(id)}: the undo of {name!r} has not failed; look again")
        saga_changes.go_on(connection, saga.id)
        row = operations.read_locked(connection, id)
        audit(connection, change, "saga_undone", id, row, details={"undone": name})


# ---------------------------------------------------------------- what a change depends on


def _running(connection: Connection, id: OperationId, service: str) -> Row[Any]:
    read(connection, id, service)
    saga = saga_reading.saga(connection, id)
    if saga is None or saga.observed or saga.status != RUNNING:
        what = "has not begun" if saga is None else OBSERVED if saga.observed else f"is {saga.status}"
        raise ChangeRefused(f"{called(id)}: {what}; it waits for no event")
    return saga


def _awaited(connection: Connection, saga: Row[Any], event_type: str) -> str | None:
    """What the saga's wait for this type is compared with; None if it does not wait for one."""
    return next((wait.match for wait in saga_reading.waits(connection, saga.id) if wait.event_type == event_type), None)


def _check_named(app: Celery, id: OperationId, event_type: str) -> None:
    """Raise `ChangeRefused` for an event that the saga's code can never wait for."""
    app.loader.import_default_modules()
    named = getattr(app.tasks.get(id.task), "saga_events", None)
    if named is not None and event_type not in named:
        known = ", ".join(sorted(named)) or "none"
        raise ChangeRefused(f"{called(id)}: never waits for {event_type}; its code names: {known}")


def _to_undo(connection: Connection, id: OperationId, name: str) -> Any:
    """What is undone by this name. Raises `ChangeRefused` unless its undo has failed, or was never begun."""
    steps = saga_changes.to_undo(connection, id)
    step = next((each for each in steps if each.name == name), None)
    if step is None:
        known = ", ".join(each.name for each in steps if each.undo_state != "done") or "nothing"
        raise ChangeRefused(f"{called(id)}: has nothing called {name!r} to undo; it has: {known}")
    if step.undo_state == "done":
        raise ChangeRefused(f"{called(id)}: {name!r} is undone already")
    if step.undo_state == "begun":
        raise ChangeRefused(f"{called(id)}: the undo of {name!r} runs as {step.call_task} {step.call_key}")
    return step


def _digest(data: Any) -> str:
    """Tells one event's data from another's; the data itself must not be in the audit table."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
