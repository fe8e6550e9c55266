"""Checks of the running processes: whether any is missing or silent, whether work has consumers, and who else is here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from celery import Celery
from sqlalchemy import Row

from ..framework import framework
from ..settings import Settings
from ..store.overview import Snapshot, monitoring_connection
from ..store.processes import processes
from ..store.rights import row_security
from ..streams.declaring import TASK_PREFIX, declared_streams
from ..text import number_of
from ..upkeep import alarms, overview
from .findings import Finding, ok, refusal, warning


def check_processes(app: Celery, given: Settings) -> list[Finding]:
    with monitoring_connection(given) as connection:
        wall = row_security(connection)
        if wall is not None and not (wall.passes or wall.of_all):
            advice = "run the doctor with the role idempotency_operator"
            return [warning("processes", f"not looked at: {wall.name!r} does not see all tenants", advice)]
        found = overview.take_snapshot(connection, app, given)
    wrong = [warning(alarm.subject, alarm.found, alarm.advice) for alarm in alarms.lasting(found, given)]
    if declared_streams() and not found.has_relay(given.alarm_silence):
        advice = f"start `{framework().command} relay`: it publishes what handlers enqueue, frees claims of processes that have died, and purges"
        wrong.append(warning("relay", "none is running, and this application has streams", advice))
    return (
        _archived(found)
        + _sharing(app, found, given)
        + (wrong or [ok("processes", f"{len(found.processes)} seen, none silent; no work without consumers")])
    )


def _archived(found: Snapshot) -> list[Finding]:
    """Dead letters that no list has, so that none is forgotten for ever."""
    oldest = found.archived.oldest
    if oldest is None:
        return []
    letters = number_of(found.archived.letters, "dead letter is", "dead letters are")
    command = f"`{framework().command} dead-letters list --archived`"
    return [ok("archive", f"{letters} archived and open, the oldest for {oldest / 86400:.1f} days: {command}")]


def _sharing(app: Celery, found: Snapshot, given: Settings) -> list[Finding]:
    """Who else uses this database, and whether queues are kept apart."""
    findings = [
        ok(f"application {row.service}", "on the same database; each publishes, recovers and purges its own")
        for row in found.sharers
        if row.service is not None
    ]
    own = set(app.amqp.queues)
    findings += _consumed_by_others(found.others, own, given)
    for process in _alive(found.processes, given):
        # a process that handles streams names those as its queues
        if unknown := sorted(each for each in set(process.queues) - own if not each.startswith(TASK_PREFIX)):
            who = f"{process.name} has this name, and consumes {', '.join(unknown)}, which this application does not declare"
            advice = "if it is another application, give each its own idempotency_service; it may be another version"
            findings.append(warning(f"idempotency_service {given.service}", who, advice))
    return findings


def check_consumed(given: Settings, queues: Iterable[str]) -> list[Finding]:
    """Whether a worker of another application on this database takes messages from one of these queues."""
    if not (own := set(queues)):
        return []
    with monitoring_connection(given) as connection:
        found = processes(connection)
    return _consumed_by_others((process for process in found if process.service != given.service), own, given)


def _consumed_by_others(others: Iterable[Row[Any]], own: set[str], given: Settings) -> list[Finding]:
    advice = "give each application its own queues; if one was renamed, stop the processes of its old name"
    return [
        refusal(f"queue {queue}", f"also consumed by {other.name} of the application {other.service}", advice)
        for other in _alive(others, given)
        for queue in sorted(own & set(other.queues))
    ]


def _alive(processes: Iterable[Row[Any]], given: Settings) -> list[Row[Any]]:
    return [process for process in processes if process.silent_seconds <= given.alarm_silence]
