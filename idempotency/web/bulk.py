"""Replaying many letters in stages: one, then ten, then the rest, and no further once one fails.

The list of letters is in the page's address, signed, so any process shows how far it is, also after a restart. Not promised: that
it goes on by itself when nobody has the page open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

from sqlalchemy.exc import DBAPIError
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from ..errors import ChangeRefused, IdempotencyError, OperationNotFound
from ..operate.change import Change
from ..operate.replay import replay, to_confirm
from ..store import letter_pages
from ..store.letter_pages import Letters
from ..store.statements import describe
from ..store.sweeps import is_row_error
from .confirming import digest, read_of
from .desk import Desk, change_of, desk_of, form_of, visitor_of
from .letters import chosen
from .shown import done, page

# The most letters of one; and how many of them its first stages have.
MOST, STAGES = 500, (1, 10)
# How the fields of a form begin that choose letters.
FILTER = "only_"
# Seconds for which its address is good.
KEPT = 7 * 86400.0
# Seconds for reading the warnings before it is begun.
CHOSEN = 3600.0
# Seconds after a stage was sent within which its page sends the next one by itself.
GOES_ON = 600.0
# Characters of its address: with our other headers, a proxy's buffer of 4 KiB has room for it.
LONGEST = 2_800


@dataclass(frozen=True, slots=True)
class Bulk:
    """What was chosen. `read`: the warnings that its person has read, as `confirming.digest` has them."""

    id: str
    ids: list[int]
    person: str
    reason: str
    read: frozenset[str]
    goes_on: bool

    @property
    def requests(self) -> str:
        """How the ids of its replays' requests begin; a letter's number follows."""
        return f"web:{self.id}:"

    def signed(self, desk: Desk) -> str:
        """Its place in an address: ids as steps from one to the next, so that hundreds fit."""
        steps = [each - before for before, each in pairwise([0, *self.ids])]
        fields = [self.id, steps, self.person, self.reason, " ".join(sorted(self.read)), self.goes_on]
        return desk.sessions.sign("bulk", fields)

    @classmethod
    def of(cls, desk: Desk, text: str) -> Bulk:
        """What was signed. Raises `ChangeRefused`."""
        found = desk.sessions.read("bulk", text, age=KEPT)
        if found is None:
            raise ChangeRefused("no bulk replay of this page, or older than a week")
        id, steps, person, reason, read, goes_on = found
        return cls(id, list(accumulate(steps)), person, reason, frozenset(read.split()), goes_on)


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
    """Choose the letters that match now, or those whose warnings a person has just read. Later ones are not among them."""
    visitor_of(request).require("operator", "replay")
    desk, visitor, form = desk_of(request), visitor_of(request), form_of(request)
    name, change = visitor.person.name, change_of(request)
    if (text := form.get("chosen")) is not None:
        shown = desk.sessions.read("chosen", text, age=CHOSEN)
        if shown is None or shown[0] != name:
            raise ChangeRefused("what was chosen is not known any more: choose again")
        _, ids, read = shown
    else:
        ids, read = matching(request), []
        with desk.reading() as connection:
            warnings = to_confirm(connection, ids)
        if warnings:
            read = [digest(each) for each in warnings]
            signed = desk.sessions.sign("chosen", [name, ids, read])
            return page(
                request, "confirm.html", title="Some were declined or cancelled", warnings=warnings, chosen=len(ids), form=form,
                read=signed,
            )  # fmt: skip
    of = Bulk(uuid4().hex, ids, name, change.reason, frozenset(read), bool(form.get("goes_on"))).signed(desk)
    if len(of) > LONGEST:
        raise ChangeRefused("too many of these were declined or cancelled for one bulk replay: choose fewer")
    return RedirectResponse(f"/bulk?{urlencode({'of': of})}", 303)


def matching(request: Request, *, archived: bool = False) -> list[int]:
    """The open letters that a form's filter matches. Raises `ChangeRefused` for none, and for more than `MOST`."""
    desk, visitor = desk_of(request), visitor_of(request)
    # apart from the other fields: a filter is called `reason`, as is why a person does it
    filters = {name.removeprefix(FILTER): value for name, value in form_of(request).items() if name.startswith(FILTER)}
    only = replace(chosen(filters), before=None, status="open", is_archived=archived)
    if only == Letters(is_archived=archived):
        raise ChangeRefused("choose by reason, task, tenant, code version or age: not all open letters at once")
    with desk.reading() as connection:
        ids = letter_pages.ids(connection, desk.service, visitor.tenants, only, limit=MOST + 1)
    if not ids:
        raise ChangeRefused("no open letter matches")
    if len(ids) > MOST:
        raise ChangeRefused(f"more than {MOST} letters match: choose fewer")
    return ids


def progress(desk: Desk, bulk: Bulk, tenants: Sequence[str] | None) -> Progress:
    """How far it is, by what the store says now. Raises `OperationNotFound` unless all its letters are of these tenants."""
    with desk.reading() as connection:
        found = [row._asdict() for row in letter_pages.followed(connection, bulk.ids, bulk.requests)]
    rows = [row | {"outcome": _outcome(row)} for row in found]
    counts = Counter(row["outcome"] for row in rows)
    if len(rows) < len(bulk.ids):
        counts["gone"] = len(bulk.ids) - len(rows)
    if tenants is not None and (counts["gone"] or any(row["tenant"] not in tenants for row in rows)):
        # nor how many others have; a letter that is gone does not say whose it was
        raise OperationNotFound("bulk replay: it has letters that you may not see")
    waiting = {row["id"] for row in rows if row["outcome"] == "waiting"}
    stages, begin = [], 0
    for size in (*STAGES, len(bulk.ids)):
        stages.append(bulk.ids[begin : begin + size])
        begin += size
    following = next((stage for stage in stages if waiting & {*stage}), [])
    stopped = f"{counts['failed']} failed again" if counts["failed"] else None
    if counts["gone"] and following:
        stopped = stopped or f"{counts['gone']} are gone, and nobody knows any more how they have ended"
    return Progress(rows, counts, [letter for letter in following if letter in waiting], stopped)


def _outcome(row: dict[str, Any]) -> str:
    match row["status"], row["operation"]:
        case "open", _:
            return "waiting"
        case "discarded", _:
            return "discarded"
        case _, "completed" | "failed" as status:
            return str(status)
        case _ if row["next_letter"] is not None:
            return "failed"
        case _, None if not row["is_under_way"]:
            return "purged"  # it has ended, and has left no letter
    return "running"


def show(request: Request) -> Response:
    """How far it is."""
    desk, text = desk_of(request), request.query_params.get("of", "")
    bulk = Bulk.of(desk, text)
    visitor = visitor_of(request)
    found = progress(desk, bulk, visitor.tenants)
    goes_on = desk.sessions.read("goes_on", request.query_params.get("goes_on", ""), age=GOES_ON)
    return page(
        request, "bulk.html", title="Bulk replay", bulk=bulk, of=text, progress=found, stages=STAGES,
        goes_on=goes_on == [bulk.id, visitor.csrf],
    )  # fmt: skip


def send(request: Request) -> Response:
    """Replay the next stage, if all before it have completed."""
    visitor_of(request).require("operator", "replay")
    desk, visitor, text = desk_of(request), visitor_of(request), form_of(request).get("of", "")
    bulk = Bulk.of(desk, text)
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
            f"{bulk.requests}{letter}",
            is_verified=visitor.is_verified,
            check_person=person.check,
        )
        try:
            with desk.reading() as connection:
                read = read_of(to_confirm(connection, [letter]), bulk.read)
            replay(desk.celery, letter, change, confirmed=read)
        except (IdempotencyError, DBAPIError) as error:
            if isinstance(error, DBAPIError) and not is_row_error(error):
                raise
            why = describe(error) if isinstance(error, DBAPIError) else str(error)
            return done(
                request, f"/bulk?{urlencode({'of': text})}", f"Stopped after {sent}: letter {letter} was refused: {why}"
            )
        sent += 1
    # for this session alone, and only for a while: a link that somebody opens later sends nothing by itself
    signed = {"goes_on": desk.sessions.sign("goes_on", [bulk.id, visitor.csrf])} if bulk.goes_on else {}
    return done(request, f"/bulk?{urlencode({'of': text} | signed)}", f"{sent} replayed.")


routes = [
    Route("/bulk", show, methods=["GET"]),
    Route("/bulk/begin", begin, methods=["POST"]),
    Route("/bulk/next", send, methods=["POST"]),
]
