"""Checks of who may operate: where people are known, and whether that could be read."""

from __future__ import annotations

from celery import Celery

from ..errors import SettingsError
from ..framework import framework
from ..identities import are_outside, known_people, source
from ..settings import Settings
from ..store import people
from ..store.overview import monitoring_connection
from ..text import number_of
from ..worker.task import idempotent_tasks
from .findings import Finding, ok, warning


def check_people(given: Settings) -> list[Finding]:
    """Where operators are known. Their file is read where their commands run, so a worker may lack it."""
    if not are_outside(given):
        return [ok("operators", "are known by the database, where only the owner of the tables adds them")]
    if given.people_file is None:
        return [ok("operators", f"are known by {source(given)}")]
    try:
        return [ok("operators", f"{len(known_people(given.people_file))} are known by {source(given)}")]
    except SettingsError as error:
        subject, _, found = str(error).partition(": ")
        return [warning(subject, found, "no person can prove who they are here")]


def check_operators(app: Celery, given: Settings) -> list[Finding]:
    """Tasks that move money while no one can prove who they are: people could change none of their operations."""
    if are_outside(given) or not (moving := [task.name for task in idempotent_tasks(app) if task.moves_money]):
        return []
    with monitoring_connection(given) as connection:
        is_one_known = people.has_any(connection)
    if is_one_known is None:
        return [ok("tokens", "only the role idempotency_operator can see whether anyone has a valid token")]
    if is_one_known:
        return []
    found = (
        f"none has a valid token, and {number_of(len(moving), 'task moves', 'tasks move')} money ({moving[0]}, for one)"
    )
    advice = f"add one with `{framework().command} operators add`: only they can change what such a task does"
    return [warning("tokens", found, advice)]
