"""The result of a check: fine, a warning, or a reason not to start."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"  # slower, or harder to operate; the promise holds
    REFUSAL = "refusal"  # work would be lost, done twice or exposed


@dataclass(frozen=True, slots=True)
class Finding:
    """One line about the set-up: what was checked, what was found and, unless it is fine, what to do.

    Never contains an address, since a mistyped one can have its password anywhere.
    """

    level: Level
    subject: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.subject}: {self.found}" + (f"; {self.advice}" if self.advice else "")


def ok(subject: str, found: str) -> Finding:
    return Finding(Level.OK, subject, found)


def warning(subject: str, found: str, advice: str) -> Finding:
    return Finding(Level.WARNING, subject, found, advice)


def refusal(subject: str, found: str, advice: str) -> Finding:
    return Finding(Level.REFUSAL, subject, found, advice)
