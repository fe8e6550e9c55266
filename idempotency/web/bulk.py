"""Replaying many letters in stages: one, then ten, then the rest, and no further once one fails.

One that is refused is passed over. What can never be replayed, and what somebody has asked to edit, is no part of it.

The list of letters is in the page's address, signed, so any process shows how far it is, also after a restart. Not promised: that
it goes on by itself when nobody has the page open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from textwrap import shorten
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
from ..reasons import COMPENSATION_FAILED
from ..store import letter_operations, letter_pages
from ..store.letter_messages import NEVER
from ..store.letter_pages import Letters
from ..store.sagas import FAILED
from ..text import number_of
from .confirming import digest, read_of
from .desk import Desk, change_of, desk_of, form_of, refusal_of, visitor_of
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
# The most refusals whose reason is said after a stage, and the most characters of each, since they are in the address, too.
SAID, REASON = 2, 150
# What becomes of letters that were not sent: a stage counts those that were.
UNSENT = ("waiting", "refused", "discarded")


@dataclass(frozen=True, slots=True)
class Bulk:
    """What was chosen. `read`: the warnings that its person has read, as `confirming.digest` has them.

    `to_edit`, `never`: how many were left out, because somebody has asked for an edit, or because nothing sends them again.
    `refused`: those whose replay was refused when their turn came.
    """

    id: str
    ids: list[int]
    person: str
    reason: str
    read: frozenset[str]
    goes_on: bool
    to_edit: int = 0
    never: int = 0
    refused: frozenset[int] = frozenset()

    @property
    def requests(self) -> str:
        """How the ids of its replays' requests begin; a letter's number follows."""
        return f"web:{self.id}:"

    def signed(self, desk: Desk) -> str:
        """Its place in an address: ids as steps from one to the next, and a bit for each that was refused, so that hundreds fit."""
        steps = [each - before for before, each in pairwise([0, *self.ids])]
        bits = sum(1 << place for place, letter in enumerate(self.ids) if letter in self.refused)
        fields = [self.id, steps, self.person, self.reason, " ".join(sorted(self.read)), self.goes_on]
        return desk.sessions.sign("bulk", [*fields, self.to_edit, self.never, f"{bits:x}"])

    @classmethod
    def of(cls, desk: Desk, text: str) -> Bulk:
        """What was signed. Raises `ChangeRefused`."""
        found = desk.sessions.read("bulk", text, age=KEPT)
        if found is None:
            raise ChangeRefused("no bulk replay of this page, or older than a week")
        id, steps, person, reason, read, goes_on, *more = found
        to_edit, never, bits = more or (0, 0, "0")  # older code signs none
        ids = list(accumulate(steps))
        refused = frozenset(letter for place, letter in enumerate(ids) if int(bits, 16) >> place & 1)
        return cls(id, ids, person, reason, frozenset(read.split()), goes_on, to_edit, never, refused)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is: rows with their outcome, how many letters the next stage has, those that wait, and why it goes no further."""

    rows: list[dict[str, Any]]
    counts: Counter[str]
    size: int
    waiting: list[int]
    stopped: str | None

    @property
    def done(self) -> int:
        """How many have ended as they were to: of a saga that could not be undone, it has been by now."""
        return self.counts["completed"] + self.counts["undone"]


def begin(request: Request) -> Response:
    """Choose the letters that match now, or those whose warnings a person has just read. Later ones are not among them."""
    visitor_of(request).require("operator", "replay")
    desk, visitor, form = desk_of(request), visitor_of(request), form_of(request)
    name, change = visitor.person.name, change_of(request)
    if (text := form.get("chosen")) is not None:
        shown = desk.sessions.read("chosen", text, age=CHOSEN)
        if shown is None or shown[0] != name:
            raise ChangeRefused("what was chosen is not known any more: choose again")
        _, ids, read, *more = shown
        to_edit, never = more or (0, 0)  # older code signs none
    else:
        every, read = matching(request), []
        with desk.reading() as connection:
            found = to_confirm(connection, every)
            out = set(letter_operations.never_sent(connection, every, [*NEVER]))
        edited = {each.letter for each in found if each.was == "to_be_edited"}
        to_edit, never = len(edited), len(out)
        ids = [letter for letter in every if letter not in edited | out]
        if not ids:
            raise ChangeRefused(f"none of these is replayed with others: {left_out(to_edit, never)}")
        # of a saga that has stopped, its undos are warned of
        warnings = [each for each in found if each.letter not in edited | out]
        if warnings:
            read = [digest(each) for each in warnings]
            signed = desk.sessions.sign("chosen", [name, ids, read, to_edit, never])
            return page(
                request, "confirm.html", title="Some were declined or cancelled", warnings=warnings, chosen=len(ids), form=form,
                read=signed, left_out=left_out(to_edit, never),
            )  # fmt: skip
    bulk = Bulk(uuid4().hex, ids, name, change.reason, frozenset(read), bool(form.get("goes_on")), to_edit, never)
    if len(replace(bulk, refused=frozenset(ids)).signed(desk)) > LONGEST:
        raise ChangeRefused("too many of these were declined or cancelled for one bulk replay: choose fewer")
    return RedirectResponse(f"/bulk?{urlencode({'of': bulk.signed(desk)})}", 303)


def left_out(to_edit: int, never: int) -> str:
    """What a bulk leaves out, and what becomes of it; empty: nothing."""
    edited = number_of(to_edit, "letter that somebody has asked to edit", "letters that somebody has asked to edit")
    lost = number_of(never, "letter that can never be replayed", "letters that can never be replayed")
    said = [f"{edited}: approve the edit, or replay it alone"] if to_edit else []
    return "; ".join([*said, f"{lost}, only discarded"] if never else said)


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
    rows = [row | {"outcome": _outcome(row, bulk.refused)} for row in found]
    counts = Counter(row["outcome"] for row in rows)
    if len(rows) < len(bulk.ids):
        counts["gone"] = len(bulk.ids) - len(rows)
    if tenants is not None and (counts["gone"] or any(row["tenant"] not in tenants for row in rows)):
        # nor how many others have; a letter that is gone does not say whose it was
        raise OperationNotFound("bulk replay: it has letters that you may not see")
    waiting = [row["id"] for row in rows if row["outcome"] == "waiting"]
    sent = len(bulk.ids) - sum(counts[outcome] for outcome in UNSENT)
    # by how many were sent, and not by their places: a stage whose first ones are refused is as large as any
    size = next((upto - sent for upto in accumulate(STAGES) if upto > sent), len(waiting))
    stopped = f"{counts['failed']} failed again" if counts["failed"] else None
    if counts["gone"] and waiting:
        stopped = stopped or f"{counts['gone']} are gone, and nobody knows any more how they have ended"
    return Progress(rows, counts, min(size, len(waiting)), waiting, stopped)


def _outcome(row: dict[str, Any], refused: Collection[int]) -> str:
    if row["is_stopped"]:  # a saga that was replayed, whose letter is open until it goes on
        return "running" if row["is_tried"] else "failed"
    match row["status"], row["operation"]:
        case "open", _:
            return "refused" if row["id"] in refused else "waiting"
        case "discarded", _:
            return "discarded"
        case _, "failed" if row["reason"] == COMPENSATION_FAILED and row["saga"] == FAILED:
            return "undone"  # which is what it was replayed for; with it the saga has failed
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
        request, "bulk.html", title="Bulk replay", bulk=bulk, of=text, progress=found, stages=STAGES, left_out=left_out(bulk.to_edit, bulk.never),
        goes_on=goes_on == [bulk.id, visitor.csrf],
    )  # fmt: skip


def send(request: Request) -> Response:
    """Replay the next stage, if all before it have completed. One that is refused is passed over, and others take its place."""
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
    if not found.waiting:
        raise ChangeRefused("nothing of it is left")
    person = visitor.person
    sent, refused = 0, dict[int, str]()
    for letter in found.waiting:
        if sent == found.size:
            break
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
            why = refusal_of(error, letter, f"{sent} replayed")
            refused[letter] = shorten(why.removeprefix(f"dead letter {letter}: "), REASON, placeholder="…")
        else:
            sent += 1
    said = [f"{sent} replayed.", *(f"Letter {letter} was refused: {why}." for letter, why in [*refused.items()][:SAID])]
    if len(refused) > SAID:
        said.append(f"{number_of(len(refused) - SAID, 'other was', 'others were')} refused, too.")
    query = {"of": replace(bulk, refused=bulk.refused | refused.keys()).signed(desk)}
    if bulk.goes_on and not refused:
        # for this session alone, and only for a while: a link that somebody opens later sends nothing by itself
        query["goes_on"] = desk.sessions.sign("goes_on", [bulk.id, visitor.csrf])
    return done(request, f"/bulk?{urlencode(query)}", " ".join(said))


routes = [
    Route("/bulk", show, methods=["GET"]),
    Route("/bulk/begin", begin, methods=["POST"]),
    Route("/bulk/next", send, methods=["POST"]),
]
