"""How much CPU it takes to import the library and to show its help, beside what Celery takes itself.

baseline    Celery, and SQLAlchemy with its Postgres driver, as any application with both has them
library     the same, and every public name
celery      `celery --help`
idempotency `idempotency --help`
"""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import dataclass, field

from rich.progress import track

BASELINE = "from celery import Celery, Task; import sqlalchemy.orm; sqlalchemy.create_engine('postgresql+psycopg://')"
COMMANDS = {
    "baseline": ["-c", BASELINE],
    "library": ["-c", f"{BASELINE}\nfrom idempotency import *"],
    "celery": ["-m", "celery", "--help"],
    "idempotency": ["-m", "idempotency.cli", "--help"],
}


@dataclass(frozen=True, slots=True)
class Start:
    """CPU milliseconds of each command, a figure a round."""

    milliseconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in COMMANDS})

    def least(self, name: str) -> float:
        """The undisturbed figure: other processes only add to it."""
        return min(self.milliseconds[name])

    @property
    def added_by_import(self) -> float:
        return self.least("library") - self.least("baseline")

    @property
    def help_ratio(self) -> float:
        return self.least("idempotency") / self.least("celery")


def measure(*, rounds: int) -> Start:
    """Run each command `rounds` times, in turn."""
    found = Start()
    for _ in track(range(rounds), description="start"):
        for name, command in COMMANDS.items():
            found.milliseconds[name].append(_cpu(command))
    return found


def _cpu(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
