"""Money in doubt: calls outside whose outcome nobody knows, asking the provider, and saying what a person has found out."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..attempt.effects import DidNotHappen, Happened
from ..errors import ChangeRefused, InvalidResult, OperationNotFound
from ..operate.change import Shown, read
from ..operate.replay import replay
from ..operate.resolve import resolve_effect, resolve_effect_of_saga
from ..operate.saga import is_saga
from ..store import dead_letters, doubts, operations
from ..upkeep.notices import at_stake
from ..wire.keys import OperationId
from . import runbooks
from .desk import (
    ROWS,
    Desk,
    Fields,
    change_of,
    desk_of,
    form_of,
    letter_of,
    number,
    operation_of,
    seen,
    text_of,
    visitor_of,
)
from .shown import done, page, path_of

# The most rows of sagas, and of what still tries, on the page.
FEW = 100


def link_of(desk: Desk, task: str, effect: str, key: str | None) -> str | None:
    """Where the provider shows a call, if a setting says so."""
    pattern = desk.settings.web_effect_link
    if pattern is None or not key:
        return None
    return pattern.format(key=quote(key, safe=""), task=quote(task, safe=""), effect=quote(effect, safe=""))


def show(request: Request) -> Response:
    """The page."""
    desk, tenants = desk_of(request), visitor_of(request).tenants
    before = number(request.query_params.get("before"), what="before")
    with desk.reading() as connection:
        rows, more = doubts.open_effects(connection, desk.service, tenants, before=before, limit=ROWS)
        of_sagas = [] if before else doubts.open_effects_of_sagas(connection, desk.service, tenants, limit=FEW + 1)
        tried = [] if before else doubts.still_tried(connection, desk.service, tenants, limit=FEW + 1)
        not_all = doubts.are_more(connection)
    found = [
        {name: value for name, value in row._asdict().items() if name != "payload"}
        | {"link": link_of(desk, row.task, row.effect, row.provider_key), "stake": at_stake(desk.celery, [row])}
        for row in [*of_sagas[:FEW], *rows]
    ]
    book = runbooks.html("effect_unknown")
    return page(
        request, "doubts.html", title="Money in doubt", rows=found, tried=tried[:FEW], more=more, book=book, few=FEW,
        more_of_sagas=len(of_sagas) > FEW, more_tried=len(tried) > FEW, not_all=not_all, bound=doubts.BOUND,
    )  # fmt: skip


def ask(request: Request) -> Response:
    """Ask, or call again: the letter is replayed, and the call's `reconcile` is asked before anything is called."""
    visitor_of(request).require("operator", "ask the provider")
    desk, letter = desk_of(request), number(form_of(request).get("letter"), what="letter")
    if letter is None:
        raise OperationNotFound("letter: which one")
    with desk.reading() as connection:
        letter_of(request, connection, letter)
    id = replay(desk.celery, letter, change_of(request), confirmed=())
    return done(
        request, path_of(id), "The operation runs again, and asks the provider first if its call has `reconcile`."
    )


def form(request: Request) -> Response:
    """The form in which a person says what has become of a call."""
    return _form(request, dict(request.query_params))


def _form(request: Request, fields: dict[str, str], *, status: int = 200, why: str | None = None) -> Response:
    desk, name = desk_of(request), fields.get("effect", "")
    with desk.reading() as connection:
        id = seen(request, connection, operation_of(fields))
        shown = read(connection, id, desk.service)
        of_saga = is_saga(desk.celery, connection, id)
        effect = operations.operation(connection, id)["effects"].get(name)
        letter = dead_letters.open_letter(connection, id)
    if effect is None and not of_saga:
        raise OperationNotFound(f"effect: the operation has none called {name[:80]!r}")
    key = None if effect is None else effect.get("key")
    return page(
        request, "resolve.html", status=status, title=f"What has become of {name}?", id=id, name=name, effect=effect, shown=shown,
        of_saga=of_saga, letter=letter, schema=_schema(desk, id, name), why=why, given=Fields(fields),
        link=link_of(desk, id.task, name, key), action=path_of(id, "/doubts/resolve"),
    )  # fmt: skip


def _schema(desk: Desk, id: OperationId, name: str) -> Any:
    """What the task says that the call returns, as a JSON schema; None: it does not say."""
    kind = getattr(desk.celery.tasks.get(id.task), "effect_types", {}).get(name)
    if kind is None:
        return None
    try:
        return TypeAdapter(kind).json_schema()
    except Exception:  # of a type with checks of its own there may be none: the result is checked all the same
        return {"title": getattr(kind, "__name__", "a type of the task")}


def resolve(request: Request) -> Response:
    """Record it, as `effects resolve` does."""
    visitor_of(request).require("operator", "effects resolve")
    desk, fields = desk_of(request), form_of(request)
    name, change = fields.get("effect", ""), change_of(request)
    with desk.reading() as connection:
        id = seen(request, connection, operation_of(fields))
        of_saga = is_saga(desk.celery, connection, id)
        status = text_of(fields, "status") or ""
        shown = Shown(id, status, number(fields.get("fence"), what="fence"))
        if shown.status != (now := read(connection, id, desk.service)).status:
            raise ChangeRefused(f"it was {status} when it was shown and is {now.status} now; look again")
    try:
        outcome = _outcome(fields)
        if of_saga:
            resolve_effect_of_saga(desk.celery, id, name, outcome, change)
            return done(request, path_of(id, "/saga"), f"Recorded for {name}; the saga goes on.")
        code = resolve_effect(desk.celery, shown, name, outcome, change, end=bool(fields.get("end")))
    except InvalidResult as refusal:
        return _form(request, fields, status=422, why=str(refusal))
    ends = bool(fields.get("end"))
    then = f"It has ended as {code}." if ends else "Now replay its dead letter, so that it goes on."
    return done(request, path_of(id), f"Recorded for {name}. {then}")


def _outcome(fields: dict[str, str]) -> Happened | DidNotHappen:
    """What the form says. Raises `InvalidResult` for a result that is no JSON."""
    match fields.get("outcome"):
        case "not_happened":
            return DidNotHappen()
        case "happened":
            try:
                return Happened(json.loads(fields.get("result", "")))
            except (ValueError, RecursionError):
                raise InvalidResult("result: must be JSON, as the call returns it") from None
    raise InvalidResult("say whether it has happened or not")


routes = [
    Route("/doubts", show),
    Route("/doubts/ask", ask, methods=["POST"]),
    Route("/doubts/resolve", form, methods=["GET"]),
    Route("/doubts/resolve", resolve, methods=["POST"]),
]
