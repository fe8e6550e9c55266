"""Flow: how much work is where, what is oldest there, and which processes and versions there are."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..framework import framework
from ..store import alarms, flow, schema, sharers
from ..store.overview import Snapshot
from ..upkeep.started import start_of
from .desk import desk_of, visitor_of
from .runbooks import about
from .shown import page

# The most rows that are counted of each other application in the database.
OTHERS = 1_000


def seen(request: Request) -> dict[str, Any]:
    """What the page shows, at most a few seconds old, the same for all who see the same tenants."""
    desk, tenants = desk_of(request), visitor_of(request).tenants
    named = None if tenants is None else tuple(tenants)

    def look() -> dict[str, Any]:
        settings = desk.settings
        with desk.reading() as connection:
            found = flow.flow(connection, desk.service, tenants)
            # what belongs to no tenant is for those who see all
            alive = [] if tenants is not None else flow.processes(connection, desk.service)
            active = [] if tenants is not None else alarms.active(connection, desk.service)
            others = [] if tenants is not None else sharers.sharers(connection, settings, bound=OTHERS)
            revision = schema.current_revision(connection)
        broker = desk.broker() if tenants is None else Snapshot()
        named = {name for name, stages in found.queues.items() if stages.has_work} | {*broker.queues}
        queues = {
            name: asdict(stages)
            | {"ended": stages.ended}
            | {
                part: getattr(broker.queues[name], part, None) if name in broker.queues else None
                for part in ("ready", "consumers")
            }
            for name, stages in (
                (name, found.queues.get(name) or flow.Stages(stopped=found.stopped)) for name in sorted(named)
            )
        }
        return {
            "queues": queues,
            "not_all": any(stages.stopped for stages in found.queues.values()),
            "bound": flow.BOUND,
            "broker_answered": broker.broker_answered,
            "processes": [
                row._asdict() | {"is_silent": row.silent_seconds > settings.alarm_silence, "start": start_of(row)}
                for row in sorted(
                    alive, key=lambda row: (row.silent_seconds <= settings.alarm_silence, row.kind, row.name)
                )
            ],
            "kinds": {
                kind: sum(row.kind == kind and row.silent_seconds <= settings.alarm_silence for row in alive)
                for kind in ("worker", "relay", "beat", "stream")
            },
            "alarms": [
                {"name": row.name, "since": row.since, "page": about(row.name, settings.own_runbooks)} for row in active
            ],
            "others": others,
            "others_bound": OTHERS,
            "forget": f"{framework().command} forget",
            "schema": revision,
            "newest_schema": schema.newest_revision(),
        }

    return desk.recent(("flow", named), look)


def show(request: Request) -> Response:
    """The page."""
    return page(request, "flow.html", title="Flow", **seen(request))


routes = [Route("/", show)]
