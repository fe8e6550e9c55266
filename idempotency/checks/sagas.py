"""Checks of what sagas wait for: whether this application keeps the events that they need."""

from __future__ import annotations

from celery import Celery

from ..events import keeps
from ..settings import Settings
from ..store import saga_reading
from ..store.overview import monitoring_connection
from ..store.rights import row_security
from .findings import Finding, warning


def check_sagas(app: Celery, given: Settings) -> list[Finding]:
    """Events that a saga waits for and that no module imported here declares: published here, they would be dropped."""
    with monitoring_connection(given) as connection:
        wall = row_security(connection)
        if wall is not None and not (wall.passes or wall.of_all):
            return []  # `check_processes` says what this role cannot see
        dropped = [each for each in saga_reading.awaited(connection) if not keeps(app, each.event_type, each.match)]
        waiting = [(each, saga_reading.waiting_for(connection, each, given.service)) for each in dropped]
    advice = (
        "add the saga's module to `include` wherever such events are published; what is published there is not kept"
    )
    return [
        warning(
            f"event {each.event_type}",
            f"{type} waits for it by {each.match}, and no module that is imported here declares that",
            advice,
        )
        for each, type in waiting
        if type is not None
    ]
