"""Checks of the running processes: whether any is missing or silent, and whether work has consumers."""

from __future__ import annotations

from celery import Celery

from ..settings import Settings
from ..store.overview import monitoring_connection
from ..upkeep import alarms, overview
from .findings import Finding, ok, warning


def check_processes(app: Celery, given: Settings) -> list[Finding]:
    with monitoring_connection(given) as connection:
        found = overview.look(connection, app, given)
    wrong = [warning(alarm.subject, alarm.found, alarm.advice) for alarm in alarms.lasting(found, given)]
    return wrong or [ok("processes", f"{len(found.processes)} seen, none silent; no work without consumers")]
