"""Dead letters: lists, one letter with what a replay would do, replaying, asking for it to be discarded, and its message."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..application import runtime_of
from ..errors import ChangeRefused
from ..operate import discard
from ..operate.replay import NotConfirmed, replay, to_confirm
from ..operate.reveal import reveal_letter
from ..store import discards, doubts, letter_pages, operations
from ..store.letter_pages import Letters
from ..store.statements import repeatable
from ..wire.keys import OperationId
from . import runbooks
from .confirming import digest, read_of
from .desk import ROWS, Fields, change_of, desk_of, form_of, letter_of, number, text_of, visitor_of
from .doubts import link_of
from .edits import edits_of
from .preview import preview, spent_at
from .shown import done, page, path_of

# Open ones without those that are archived, then these.
STATES = ("open", "archived", "replayed", "discarded", "all")
AGES = {"1h": 3600.0, "1d": 86400.0, "7d": 7 * 86400.0}


def chosen(fields: dict[str, str]) -> Letters:
    """The filter that a query or a form asks for. Raises `ChangeRefused`."""
    status = text_of(fields, "status") or "open"
    if status not in STATES:
        raise ChangeRefused(f"status: one of {', '.join(STATES)}, got {status[:20]!r}")
    within, over = (AGES.get(fields.get(name, "")) for name in ("within", "over"))
    named = {name: text_of(fields, name) for name in ("reason", "task", "tenant", "code_version")}
    return Letters(
        {"all": None, "archived": "open"}.get(status, status),
        {"open": False, "archived": True}.get(status),
        **named,
        older_than=over,
        newer_than=within,
        before=number(fields.get("before"), what="before"),
    )


def show_list(request: Request) -> Response:
    """A page of letters."""
    desk, visitor = desk_of(request), visitor_of(request)
    asked = {name: value for name, value in request.query_params.items() if name != "said"}
    only = chosen(asked)
    with desk.reading() as connection:
        rows = letter_pages.page(connection, desk.service, visitor.tenants, only, limit=ROWS + 1)
    return page(
        request, "letters.html", title="Dead letters", rows=rows[:ROWS], only=asdict(only), filters=Fields(asked), ages=list(AGES), states=STATES,
        more=rows[ROWS - 1].id if len(rows) > ROWS else None, book=_book(request, only.reason),
    )  # fmt: skip


def _book(request: Request, reason: str | None) -> Any:
    return None if reason is None else runbooks.html(runbooks.about(reason, desk_of(request).settings.own_runbooks))


def show(request: Request) -> Response:
    """One letter."""
    return _shown(request, request.path_params["letter"])


def _shown(request: Request, letter: int, *, status: int = 200, **more: Any) -> Response:
    desk = desk_of(request)
    with desk.reading() as connection:
        row = letter_of(request, connection, letter)
        id = None if None in (row.tenant, row.task, row.key) else OperationId(row.tenant, row.task, row.key)
        operation = None if id is None else operations.operation(connection, id)
        request_to_discard = discards.shown_request(connection, letter)
        found = to_confirm(connection, [letter]) if row.status == "open" else []
        to_edit = [each for each in found if each.was == "to_be_edited"]
        warnings = [each for each in found if each not in to_edit]
        looked = preview(desk, connection, row, operation)
        edited = edits_of(desk, connection, row, more.get("revealed"))
        in_doubt = doubts.of_letter(connection, desk.service, visitor_of(request).tenants, letter)
    given = {
        "row": row, "id": id, "operation": operation, "asked_to_discard": request_to_discard, "warnings": warnings, "to_edit": to_edit,
        "read": " ".join(map(digest, warnings)), "read_unedited": " ".join(map(digest, to_edit)), "preview": looked,
        "book": _book(request, row.reason), "revealed": None, "why": None, "edits": edited,
        "spent_at": spent_at(row, None if operation is None else operation["record"]),
        "in_doubt": [(each, link_of(desk, each.task, each.effect, each.provider_key)) for each in in_doubt],
    }  # fmt: skip
    return page(request, "letter.html", status=status, title=f"Dead letter {letter}", **given | more)


def replay_one(request: Request) -> Response:
    """Replay it, as `dead-letters replay` does."""
    letter = _allowed(request, "replay")
    desk, form = desk_of(request), form_of(request)
    with desk.reading() as connection:
        letter_of(request, connection, letter)
        said = f"{form.get('confirmed', '')} {form.get('unedited', '')}".split()
        confirmed = read_of(to_confirm(connection, [letter]), said)
    try:
        id = replay(desk.celery, letter, change_of(request), confirmed=confirmed)
    except NotConfirmed as refusal:
        return _shown(request, letter, status=409, why=f"{refusal}. To do so, say that you have read this.")
    return done(request, path_of(id), f"Dead letter {letter} is replayed; below is what becomes of it.")


def ask_to_discard(request: Request) -> Response:
    """Ask for it to be discarded; another person approves."""
    letter = _allowed(request, "discard")
    desk, visitor, change = desk_of(request), visitor_of(request), change_of(request)
    with desk.reading() as connection:
        letter_of(request, connection, letter)

    @repeatable
    def ask() -> None:
        with runtime_of(desk.celery).engine.begin() as connection:
            discard.request(connection, visitor.person, letter, change.reason, request_id=change.request_id)

    ask()
    return done(request, f"/letters/{letter}", "Asked for: another person, an approver, has to approve.")


def reveal(request: Request) -> Response:
    """Its message, whose look is audited."""
    letter = _allowed(request, "reveal")
    desk = desk_of(request)
    with desk.reading() as connection:
        letter_of(request, connection, letter)
    return _shown(request, letter, revealed=reveal_letter(desk.celery, letter, change_of(request)))


def _allowed(request: Request, action: str) -> int:
    """The letter of the path, for someone who may change it. Raises `NotAllowed`."""
    visitor_of(request).require("operator", action)
    letter: int = request.path_params["letter"]
    return letter


routes = [
    Route("/letters", show_list),
    Route("/letters/{letter:int}", show),
    Route("/letters/{letter:int}/replay", replay_one, methods=["POST"]),
    Route("/letters/{letter:int}/discard", ask_to_discard, methods=["POST"]),
    Route("/letters/{letter:int}/reveal", reveal, methods=["POST"]),
]
