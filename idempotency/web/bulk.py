"""Replaying many letters in stages: one, then ten, then the rest, and no further once one fails.

The list of letters is in the page's address, signed, so any process shows how far it is, also after a restart. Not promised: that
it goes on by itself when nobody has the page open.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

from sqlalchemy.exc import DBAPIError
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from ..errors import ChangeRefused, IdempotencyError
from ..operate.change import Change
from ..operate.replay import ToConfirm, replay, to_confirm
from ..store import letter_pages
from ..store.letter_pages import Letters
from ..store.statements import describe
from ..store.sweeps import is_row_error
from .desk import Desk, change_of, desk_of, form_of, visitor_of
from .letters import chosen
from .shown import done, page

# The most letters of one; and how many of them its first stages have.
MOST, STAGES = 500, (1, 10)
# How the fields of a form begin that choose letters.
FILTER = "only_"
# Seconds for which its address is good.
KEPT = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Bulk:
    """What was chosen. `confirmed`: by letter, the hash of the warning that its person has read."""

    id: str
    ids: list[int]
    person: str
    reason: str
    confirmed: dict[str, str]
    goes_on: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is: rows with their outcome, the letters of the next stage, and why it goes no further."""

    rows: list[dict[str, Any]]
    counts: Counter[str]
    next: list[int]
    stopped: str | None

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left to send or to wait for."""
        return not self.next and not self.counts["running"]


def begin(request: Request) -> Response:
    """Choose the letters that match now. Those that come later are not among them."""
    visitor_of(request).require("operator", "replay")
    desk, visitor, form = desk_of(request), visitor_of(request), form_of(request)
    # apart from the other fields: a filter is called `reason`, as is why a person does it
    filters = {name.removeprefix(FILTER): value for name, value in form.items() if name.startswith(FILTER)}
    only = replace(chosen(filters), before=None, status="open")
    if only == Letters():
        raise ChangeRefused("choose by reason, task, tenant, code version or age: not all open letters at once")
    change = change_of(request)
    with desk.reading() as connection:
        ids = letter_pages.ids(connection, desk.service, visitor.tenants, only, limit=MOST + 1)
        warnings = to_confirm(connection, ids)
    if not ids:
        raise ChangeRefused("no open letter matches")
    if len(ids) > MOST:
        raise ChangeRefused(f"more than {MOST} letters match: choose fewer")
    if warnings and not form.get("confirmed"):
        return page(
            request,
            "confirm.html",
            title="Some were declined or cancelled",
            warnings=warnings,
            chosen=len(ids),
            form=form,
        )
    read = {str(each.letter): _hash(each) for each in warnings}
    bulk = Bulk(uuid4().hex, ids, visitor.person.name, change.reason, read, bool(form.get("goes_on")))
    fields = [bulk.id, bulk.ids, bulk.person, bulk.reason, bulk.confirmed, bulk.goes_on]
    return RedirectResponse(f"/bulk?{urlencode({'of': desk.sessions.sign('bulk', fields)})}", 303)


def _hash(warning: ToConfirm) -> str:
    return hashlib.sha256(repr(warning).encode()).hexdigest()[:16]


def _bulk(desk: Desk, text: str) -> Bulk:
    found = desk.sessions.read("bulk", text, age=KEPT)
    if found is None:
        raise ChangeRefused("no bulk replay of this page, or older than a week")
    return Bulk(*found)


def progress(desk: Desk, bulk: Bulk, tenants: Sequence[str] | None) -> Progress:
    """How far it is, by what the store says now."""
    with desk.reading() as connection:
        rows = [row._asdict() for row in letter_pages.followed(connection, bulk.ids)]
    rows = [row | {"outcome": _outcome(row)} for row in rows if tenants is None or row["tenant"] in tenants]
    counts = Counter(row["outcome"] for row in rows)
    waiting = {row["id"] for row in rows if row["outcome"] == "waiting"}
    stages, begin = [], 0
    for size in (*STAGES, len(bulk.ids)):
        stages.append(bulk.ids[begin : begin + size])
        begin += size
    following = next((stage for stage in stages if waiting & {*stage}), [])
    stopped = f"{counts['failed']} failed again" if counts["failed"] else None
    return Progress(rows, counts, [letter for letter in following if letter in waiting], stopped)


def _outcome(row: dict[str, Any]) -> str:
    match row["status"], row["operation"]:
        case "open", _:
            return "waiting"
        case "discarded", _:
            return "discarded"
        case _ if row["next_letter"] is not None:
            return "failed"
        case _, "completed" | "failed" as status:
            return str(status)
    return "running"


def show(request: Request) -> Response:
    """How far it is."""
    desk, text = desk_of(request), request.query_params.get("of", "")
    bulk = _bulk(desk, text)
    found = progress(desk, bulk, visitor_of(request).tenants)
    return page(request, "bulk.html", title="Bulk replay", bulk=bulk, of=text, progress=found, stages=STAGES)


def send(request: Request) -> Response:
    """Replay the next stage, if all before it have completed."""
    visitor_of(request).require("operator", "replay")
    desk, visitor, text = desk_of(request), visitor_of(request), form_of(request).get("of", "")
    bulk = _bulk(desk, text)
    if bulk.person != visitor.person.name:
        raise ChangeRefused(f"{bulk.person!r} has begun this; begin one of your own")
    found = progress(desk, bulk, visitor.tenants)
    if found.stopped is not None:
        raise ChangeRefused(f"{found.stopped}: it goes no further; see to those first, and begin another one")
    if found.counts["running"]:
        raise ChangeRefused("those before have not ended yet")
    if not found.next:
        raise ChangeRefused("nothing of it is left")
    person = visitor.person
    sent = 0
    for letter in found.next:
        change = Change(
            person.name,
            bulk.reason,
            f"web:{bulk.id}:{letter}",
            is_verified=visitor.is_verified,
            check_person=person.check,
        )
        try:
            with desk.reading() as connection:
                read = [
                    each
                    for each in to_confirm(connection, [letter])
                    if bulk.confirmed.get(str(each.letter)) == _hash(each)
                ]
            replay(desk.celery, letter, change, confirmed=read)
        except (IdempotencyError, DBAPIError) as error:
            if isinstance(error, DBAPIError) and not is_row_error(error):
                raise
            why = describe(error) if isinstance(error, DBAPIError) else str(error)
            return done(
                request, f"/bulk?{urlencode({'of': text})}", f"Stopped after {sent}: letter {letter} was refused: {why}"
            )
        sent += 1
    return done(request, f"/bulk?{urlencode({'of': text})}", f"{sent} replayed.")


routes = [
    Route("/bulk", show, methods=["GET"]),
    Route("/bulk/begin", begin, methods=["POST"]),
    Route("/bulk/next", send, methods=["POST"]),
]
