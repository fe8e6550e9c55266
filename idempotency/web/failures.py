"""Failures: open dead letters by what they have in common, whether they get more, what is at stake, and what to do."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..store import alarms, letter_pages
from ..store.letter_pages import Letters
from ..upkeep.notices import at_stake
from . import runbooks
from .desk import Desk, desk_of, visitor_of
from .shown import page

# Groups of the page, and letters of each whose amounts are added up.
GROUPS, COUNTED = 50, 20
# Seconds for which what is at stake in a group is kept: each letter's message is read for it.
KEPT = 30.0


def show(request: Request) -> Response:
    """The page."""
    desk, tenants = desk_of(request), visitor_of(request).tenants
    named = None if tenants is None else tuple(tenants)
    with desk.reading() as connection:
        groups = letter_pages.groups(connection, desk.service, tenants, limit=GROUPS)
        found = [
            row._asdict()
            | {
                "stake": _stake(desk, connection, named, row),
                "page": runbooks.about(row.reason, desk.settings.own_runbooks),
            }
            for row in groups
        ]
    books = {row["page"]: runbooks.html(row["page"]) for row in found}
    return page(request, "failures.html", title="Failures", groups=found, books=books, most=GROUPS, counted=COUNTED,
        stopped=bool(groups) and groups[0].counted >= letter_pages.BOUND, bound=letter_pages.BOUND,
    )  # fmt: skip


def _stake(desk: Desk, connection: Connection, tenants: tuple[str, ...] | None, row: Any) -> list[str]:
    """What the newest letters of a group are about, added up by currency."""
    if getattr(desk.celery.tasks.get(row.task), "amount", None) is None:
        return []
    only = Letters(reason=row.reason, task=row.task, code_version=row.code_version)

    def add_up() -> list[str]:
        newest = letter_pages.page(connection, desk.service, tenants, only, limit=COUNTED)
        return at_stake(desk.celery, alarms.payloads(connection, [each.id for each in newest]))

    return desk.recent(("stake", tenants, row.reason, row.task, row.code_version), add_up, fresh=KEPT)


def runbook(request: Request) -> Response:
    """One runbook."""
    name = request.path_params["name"]
    found = runbooks.html(name)
    if found is None:
        return page(request, "error.html", status=404, title="Not found", why="there is no runbook of this name")
    return page(request, "runbook.html", title=name, book=found)


routes = [Route("/failures", show), Route("/runbooks/{name}", runbook)]
