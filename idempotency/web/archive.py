"""Archiving dead letters and restoring them: one, or all that a filter matches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from celery import Celery
from sqlalchemy.exc import DBAPIError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import IdempotencyError
from ..operate.archive import archive, restore
from ..operate.change import Change
from ..text import number_of
from .bulk import matching
from .desk import change_of, desk_of, letter_of, refusal_of, visitor_of
from .shown import done

Work = Callable[[Celery, int, Change], None]


def archive_one(request: Request) -> Response:
    """Archive one, as `dead-letters archive` does."""
    return _one(request, archive, "archived: it is open, and on the list of archived ones alone")


def restore_one(request: Request) -> Response:
    """Restore one, as `dead-letters restore` does."""
    return _one(request, restore, "restored")


def archive_many(request: Request) -> Response:
    """Archive what matches."""
    return _many(request, archive, "archived")


def restore_many(request: Request) -> Response:
    """Restore what matches."""
    return _many(request, restore, "restored")


def _one(request: Request, work: Work, what: str) -> Response:
    visitor_of(request).require("operator", work.__name__)
    desk, letter = desk_of(request), request.path_params["letter"]
    with desk.reading() as connection:
        letter_of(request, connection, letter)
    work(desk.celery, letter, change_of(request))
    return done(request, f"/letters/{letter}", f"Dead letter {letter} is {what}.")


def _many(request: Request, work: Work, what: str) -> Response:
    """Each in its own transaction; one that is refused stops no other."""
    visitor_of(request).require("operator", work.__name__)
    desk, change = desk_of(request), change_of(request)
    refused: list[str] = []
    letters = matching(request, archived=work is restore)
    for place, letter in enumerate(letters):
        done_before = place - len(refused)
        try:
            work(desk.celery, letter, replace(change, request_id=f"{change.request_id}:{letter}"))
        except (IdempotencyError, DBAPIError) as error:
            why = refusal_of(error, letter, f"{done_before} {what}")
            refused.append(why if str(letter) in why else f"dead letter {letter}: {why}")
    said = f"{number_of(len(letters) - len(refused), 'dead letter is', 'dead letters are')} {what}"
    if refused:
        said += f"; {len(refused)} refused, the first: {refused[0]}"
    return done(request, f"/letters{'' if work is archive else '?status=archived'}", f"{said}.")


routes = [
    Route("/letters/archive", archive_many, methods=["POST"]),
    Route("/letters/restore", restore_many, methods=["POST"]),
    Route("/letters/{letter:int}/archive", archive_one, methods=["POST"]),
    Route("/letters/{letter:int}/restore", restore_one, methods=["POST"]),
]
