"""Operations: lists by how far they are, those that have a key, and one with all that has happened in it."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from ..errors import ChangeRefused, InvalidArguments
from ..identities import Role
from ..letters.editing import arguments_of
from ..operate.cancel import cancel
from ..operate.change import Shown
from ..operate.release import release
from ..operate.reveal import reveal
from ..store import operation_pages, operations, provider_keys, saga_reading
from ..text import masked
from ..wire import keys
from ..wire.keys import OperationId
from ..wire.message import Message
from ..worker.calls import KeyedTask
from .business import Described
from .desk import ROWS, Desk, Fields, change_of, desk_of, form_of, number, operation_of, seen, text_of, visitor_of
from .doubts import link_of
from .shown import done, page, path_of
from .timeline import entries

STAGES = ("accepted", "running", "released", "ended")
CHANGES: Role = "operator"
# Seconds for which the address of a next page is good.
NEXT = 86400.0


def show_list(request: Request) -> Response:
    """A page of operations, or those that have a key, or had a call outside under it; a number that is no key is a dead letter's."""
    desk, tenants = desk_of(request), visitor_of(request).tenants
    asked = {name: value for name, value in request.query_params.items() if name != "said"}
    key = text_of(asked, "key")
    if key is not None:
        with desk.reading() as connection:
            rows, are_all = operation_pages.with_key(connection, desk.service, tenants, key)
            found = [OperationId(*row) for row in rows]
            if not found:
                called, are_all_asked = provider_keys.with_provider_key(connection, desk.service, tenants, key)
                # an operation may have made several calls under a key only if somebody has written that by hand
                found = list(dict.fromkeys(OperationId(row.tenant, row.task, row.key) for row in called))
                are_all = are_all and are_all_asked
        if len(found) == 1:
            return RedirectResponse(path_of(found[0]), 303)
        if not found and key.isascii() and key.isdigit() and len(key) < 19:
            return RedirectResponse(f"/letters/{key}", 303)
        return page(request, "found.html", title="Search", found=found, key=key, are_all=are_all)
    stage = asked.get("stage", "ended")
    if stage not in STAGES:
        raise ChangeRefused(f"stage: one of {', '.join(STAGES)}")
    listed, more = _page(request, stage, asked)
    return page(
        request,
        "operations.html",
        title="Operations",
        rows=listed,
        stage=stage,
        stages=STAGES,
        filters=Fields(asked),
        more=more,
    )


def _page(request: Request, stage: str, asked: dict[str, str]) -> tuple[Any, str | None]:
    desk, tenants = desk_of(request), visitor_of(request).tenants
    task, tenant, status = (text_of(asked, name) for name in ("task", "tenant", "status"))
    after = desk.sessions.read("after", asked.get("after", ""), age=NEXT)
    with desk.reading() as connection:
        if stage == "accepted":
            following = None if after is None else (after[0], after[1])
            rows, end = operation_pages.accepted(
                connection, desk.service, tenants, task=task, tenant=tenant, after=following, limit=ROWS
            )
            last = None if end is None else [end.queue, end.id]
        else:
            since = None if after is None else [after[0], datetime.fromisoformat(after[1]), *after[2:]]
            rows, end = operation_pages.page(
                connection,
                desk.service,
                tenants,
                stage,
                task=task,
                tenant=tenant,
                status=status,
                after=since,
                limit=ROWS,
            )
            last = None if end is None else [end.queue, end.at.isoformat(), end.tenant, end.task, end.key]
    return rows, None if last is None else desk.sessions.sign("after", last)


def show(request: Request) -> Response:
    """One operation."""
    desk = desk_of(request)
    with desk.reading() as connection:
        id = seen(request, connection, operation_of(dict(request.query_params)))
    return _shown(request, id)


def _shown(request: Request, id: OperationId, *, revealed: dict[str, Any] | None = None) -> Response:
    desk = desk_of(request)
    with desk.reading() as connection:
        found = operations.operation(connection, id)
        row = saga_reading.saga(connection, id)
        saga = None if row is None else saga_reading.show(connection, id)
        arguments = _arguments(connection, id)
    business = desk.business.of(Described(id.tenant, id.task, id.key, _named(desk, id.task, arguments)))
    effects = {
        name: effect | {"link": link_of(desk, id.task, name, effect.get("key"))}
        for name, effect in found["effects"].items()
    }
    return page(
        request, "operation.html", title=id.task, id=id, found=found, effects=effects, saga=saga, message=_masked(arguments), revealed=revealed, business=business,
        entries=entries(found, saga, () if business is None else business.rows, with_values=revealed is not None),
    )  # fmt: skip


def _arguments(connection: Any, id: OperationId) -> tuple[list[Any], dict[str, Any]] | None:
    """Positional and named arguments; None: no message is kept, or it cannot be read."""
    found = operations.operation(connection, id, with_payload=True)
    texts = [(found["record"] or {}).get("message"), *(row.get("message") for row in found["outbox"])]
    for text in filter(None, texts):
        with suppress(ValueError):
            if (read := arguments_of(Message.from_text(text))) is not None:
                return read[0], read[1]
    return None


def _masked(arguments: tuple[list[Any], dict[str, Any]] | None) -> dict[str, Any] | None:
    """The names and kinds of the arguments, with none of their values."""
    if arguments is None:
        return None
    args, kwargs = arguments
    named = {str(name)[:80]: masked(value) for name, value in kwargs.items()}
    return {f"argument {place}": masked(value) for place, value in enumerate(args, 1)} | named


def _named(desk: Desk, task: str, arguments: tuple[list[Any], dict[str, Any]] | None) -> dict[str, Any]:
    """The arguments by name, as far as the task is known here."""
    if arguments is None:
        return {}
    args, kwargs = arguments
    known = desk.celery.tasks.get(task)
    with suppress(InvalidArguments):
        return keys.bind(known.signature_of_run, args, kwargs) if isinstance(known, KeyedTask) else dict(kwargs)
    return dict(kwargs)


def show_payload(request: Request) -> Response:
    """The same with its messages and results, whose look is audited."""
    visitor_of(request).require(CHANGES, "reveal")
    id = _of_form(request)
    return _shown(request, id, revealed=reveal(desk_of(request).celery, id, change_of(request)))


def let_go(request: Request) -> Response:
    """Take it from its holder, as `release` does."""
    visitor_of(request).require(CHANGES, "release")
    id = _of_form(request)
    release(desk_of(request).celery, _as_shown(request, id), change_of(request))
    return done(request, path_of(id), "Taken from its holder; it is delivered again now.")


def end(request: Request) -> Response:
    """End it, as `cancel` does."""
    visitor_of(request).require(CHANGES, "cancel")
    id, form = _of_form(request), form_of(request)
    happened = bool(form.get("may_have_happened"))
    error = cancel(desk_of(request).celery, _as_shown(request, id), change_of(request), may_have_happened=happened)
    return done(request, path_of(id), f"It has ended as {error.code}.")


def _of_form(request: Request) -> OperationId:
    with desk_of(request).reading() as connection:
        return seen(request, connection, operation_of(form_of(request)))


def _as_shown(request: Request, id: OperationId) -> Shown:
    """What the person was shown when the form was made: it is changed only while it is still this."""
    form = form_of(request)
    return Shown(id, form.get("status", ""), number(form.get("fence"), what="fence"))


routes = [
    Route("/operations", show_list),
    Route("/operation", show),
    Route("/operation/reveal", show_payload, methods=["POST"]),
    Route("/operation/release", let_go, methods=["POST"]),
    Route("/operation/cancel", end, methods=["POST"]),
]
