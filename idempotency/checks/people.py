"""Checks of who may operate: where people are known, and whether that could be read."""

from __future__ import annotations

from ..errors import SettingsError
from ..identities import are_outside, known_people, source
from ..settings import Settings
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
