"""Edits of a dead letter's message: the form, the history, and approving one that another person has asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import OperationNotFound
from ..letters.editing import arguments_of, difference_shown
from ..operate.edit import approve_edit, digest, edit, why_not
from ..store import edits
from ..wire import encoding
from ..wire.message import Message
from .approvals import approver_of
from .desk import Desk, change_of, desk_of, form_of, letter_of, number, visitor_of
from .shown import done


@dataclass(frozen=True, slots=True)
class Edits:
    """What the page of a letter says of edits. `refused`: why there is no form; `text`: what its form begins with, of the message `shown`."""

    history: Sequence[Mapping[str, Any]]
    refused: str | None
    text: str
    shown: str

    @property
    def waits(self) -> Mapping[str, Any] | None:
        """The edit that another person has to approve."""
        return next((each for each in self.history if each["applied_at"] is None), None)

    @property
    def made(self) -> Sequence[Mapping[str, Any]]:
        """Those that a replay sends the message with."""
        return [each for each in self.history if each["applied_at"] is not None]


def edits_of(desk: Desk, connection: Connection, row: Any, revealed: Mapping[str, Any] | None) -> Edits:
    """Look at the edits of a letter; values only of one that was revealed."""
    is_revealed = revealed is not None
    history = [
        each._asdict() | {"changed": difference_shown(each.before, each.after, with_values=is_revealed)}
        for each in edits.history(connection, row.id)
    ]
    refused = why_not(desk.celery, connection, row.id)
    return Edits(history, refused, _text(row.payload) if is_revealed else "", digest(row.payload))


def _text(payload: str) -> str:
    """The arguments of a message, as the form takes them; empty if they cannot be read."""
    try:
        found = arguments_of(Message.from_text(payload))
    except ValueError:
        return ""
    if found is None:
        return ""
    return json.dumps(json.loads(encoding.dumps({"args": found[0], "kwargs": found[1]})), indent=2, ensure_ascii=False)


def edit_one(request: Request) -> Response:
    """Edit its message, or ask for it, as `dead-letters edit` does."""
    visitor, desk = visitor_of(request), desk_of(request)
    visitor.require("operator", "edit")
    letter = request.path_params["letter"]
    with desk.reading() as connection:
        letter_of(request, connection, letter)
    form = form_of(request)
    person = visitor.person if visitor.is_verified else None
    if edit(desk.celery, letter, form.get("payload", ""), change_of(request), person=person, shown=form.get("shown")):
        return done(request, f"/letters/{letter}", "Its message is edited; a replay sends it as it is now.")
    return done(
        request, f"/letters/{letter}", "Asked for: it moves money, so another person, an approver, has to approve."
    )


def approve(request: Request) -> Response:
    """Approve one, as `dead-letters approve-edit` does."""
    visitor, letter = approver_of(request, "approve-edit")
    asked_for = number(form_of(request).get("edit"), what="edit")
    if asked_for is None:
        raise OperationNotFound("edit: which one")
    approve_edit(desk_of(request).celery, visitor.person, letter, asked_for)
    return done(request, f"/letters/{letter}", "Its message is edited; a replay sends it as it is now.")


routes = [
    Route("/letters/{letter:int}/edit", edit_one, methods=["POST"]),
    Route("/approvals/approve-edit", approve, methods=["POST"]),
]
