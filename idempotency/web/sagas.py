"""Sagas: which there are, and one as a diagram of its steps: done, waiting, failed, undone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import ChangeRefused, OperationNotFound
from ..operate.saga import cancel_saga, retry_saga
from ..store import saga_reading
from ..store.saga_reading import Filter
from ..wire.keys import OperationId
from .desk import ROWS, Fields, change_of, desk_of, form_of, operation_of, seen, text_of, visitor_of
from .shown import done, page, path_of

STATUSES = ("RUNNING", "COMPENSATING", "COMPLETED", "FAILED")


def show_list(request: Request) -> Response:
    """A page of sagas, newest first."""
    desk, visitor = desk_of(request), visitor_of(request)
    asked = {name: value for name, value in request.query_params.items() if name != "said"}
    status, before = text_of(asked, "status"), text_of(asked, "before")
    if status not in (None, *STATUSES):
        raise ChangeRefused(f"status: one of {', '.join(STATUSES)}")
    try:
        moment, _, last = (before or "").partition("|")
        at, last_id = (datetime.fromisoformat(moment), UUID(last)) if before else (None, None)
    except ValueError:
        raise ChangeRefused("before: a time in ISO 8601, `|` and an id") from None
    only = Filter(
        desk.service,
        status=status,
        type=text_of(asked, "type"),
        tenant=text_of(asked, "tenant"),
        stopped=bool(asked.get("stopped")),
        tenants=visitor.tenants,
        before=at,
        before_id=last_id,
    )
    with desk.reading() as connection:
        rows = saga_reading.list_sagas(connection, only, limit=ROWS)
    found = [
        row._asdict() | {"task": row.type, "why": None if row.why is None else json.loads(row.why)} for row in rows
    ]
    more = f"{rows[-1].created_at.isoformat()}|{rows[-1].id}" if len(rows) == ROWS else None
    return page(request, "sagas.html", title="Sagas", rows=found, statuses=STATUSES, filters=Fields(asked), more=more)


def show(request: Request) -> Response:
    """One saga."""
    desk = desk_of(request)
    with desk.reading() as connection:
        id = operation_of(dict(request.query_params))
        noted = saga_reading.saga(connection, id)
        # a process that an observer has noted has no operation
        if noted is None or not noted.observed or not visitor_of(request).sees(id.tenant):
            seen(request, connection, id)
        found = saga_reading.show(connection, id)
    if found["saga"] is None:
        raise OperationNotFound("saga: it has not begun, or the operation is none")
    return page(request, "saga.html", title=id.task, id=id, found=found, saga=found["saga"], nodes=diagram(found))


def diagram(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of the saga's generation in order, each with its undo, and how it stands in one word.

    `waiting`: begun and not ended. `undone`: its undo is done. `undoing` and `undo failed`: its undo is under way, or has failed.
    """
    of_now = [row for row in found["steps"] if row["generation"] == found["saga"]["generation"]]
    undos = {row["undoes"]: row for row in of_now if row["kind"] == "undo" and row["undoes"] is not None}
    return [
        dict(row) | {"undone_by": undos.get(row["position"]), "stands": _stands(row, undos.get(row["position"]))}
        for row in of_now
        if row["kind"] != "undo"
    ]


def _stands(row: Mapping[str, Any], undo: Mapping[str, Any] | None) -> str:
    if undo is not None:
        return {"done": "undone", "begun": "undoing", "failed": "undo failed"}.get(
            str(undo["state"]), str(undo["state"])
        )
    return {"begun": "waiting", "not_happened": "not happened"}.get(str(row["state"]), str(row["state"]))


def cancel(request: Request) -> Response:
    """Have it undone, as `saga cancel` does."""
    id = _allowed(request, "saga cancel")
    cancel_saga(desk_of(request).celery, id, change_of(request))
    return done(request, path_of(id, "/saga"), "It is undone from now on.")


def retry(request: Request) -> Response:
    """Let it go on, as `saga retry` does."""
    id = _allowed(request, "saga retry")
    retried = retry_saga(desk_of(request).celery, id, change_of(request))
    said = f"It goes on after: {', '.join(retried.waits_for)}." if retried.waits_for else "It goes on."
    return done(request, path_of(id, "/saga"), said)


def _allowed(request: Request, action: str) -> OperationId:
    visitor_of(request).require("operator", action)
    with desk_of(request).reading() as connection:
        return seen(request, connection, operation_of(form_of(request)))


routes = [
    Route("/sagas", show_list),
    Route("/saga", show),
    Route("/saga/cancel", cancel, methods=["POST"]),
    Route("/saga/retry", retry, methods=["POST"]),
]
