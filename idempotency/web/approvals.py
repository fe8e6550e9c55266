"""Approvals: what one person has asked for, and another one approves, by the rules of `operate/discard.py`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..application import runtime_of
from ..errors import NotAuthenticated, OperationNotFound
from ..operate import discard
from ..store import approvals, edits
from ..store.statements import repeatable
from .access import Visitor
from .desk import ROWS, desk_of, form_of, letter_of, number, visitor_of
from .shown import done, page


def show(request: Request) -> Response:
    """The page."""
    desk = desk_of(request)
    before, edits_before = (number(request.query_params.get(name), what=name) for name in ("before", "edits_before"))
    service, tenants = desk.service, visitor_of(request).tenants
    with desk.reading() as connection:
        rows = approvals.open_requests(connection, service, tenants, before=before, limit=ROWS + 1)
        corrections = edits.open_requests(connection, service, tenants, before=edits_before, limit=ROWS + 1)
    return page(
        request,
        "approvals.html",
        title="Approvals",
        rows=rows[:ROWS],
        edits=corrections[:ROWS],
        # where both lists are, and go on
        places={"before": before, "edits_before": edits_before},
        more=rows[ROWS - 1].letter if len(rows) > ROWS else None,
        more_edits=corrections[ROWS - 1].id if len(corrections) > ROWS else None,
    )


def approver_of(request: Request, action: str) -> tuple[Visitor, int]:
    """Who approves something about which letter. Raises `NotAllowed`, `NotAuthenticated` and `OperationNotFound`."""
    visitor, desk = visitor_of(request), desk_of(request)
    visitor.require("approver", action)
    if not visitor.is_verified:
        raise NotAuthenticated(f"{action}: nobody has proved who they are")
    letter = number(form_of(request).get("letter"), what="letter")
    if letter is None:
        raise OperationNotFound("letter: which one")
    with desk.reading() as connection:
        letter_of(request, connection, letter)
    return visitor, letter


def approve(request: Request) -> Response:
    """Approve one, as `dead-letters approve` does."""
    desk = desk_of(request)
    visitor, letter = approver_of(request, "approve")

    @repeatable
    def discard_it() -> None:
        with runtime_of(desk.celery).engine.begin() as connection:
            discard.approve(connection, visitor.person, letter, app=desk.celery)

    discard_it()
    return done(request, "/approvals", f"Dead letter {letter} is discarded.")


routes = [Route("/approvals", show), Route("/approvals/approve", approve, methods=["POST"])]
