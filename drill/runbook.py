"""The runbooks as a person reads them: their commands, with what has to be filled in."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path(__file__).parent.parent / "docs" / "runbooks"
COMMANDS = "Commands"
# A word in capitals that is to be filled in, and no option, variable or SQL.
PLACEHOLDERS = (
    "DEAD_LETTER", "KEY", "TASK", "EFFECT_KEY", "EFFECT", "OUTCOME", "QUEUE", "NAME", "KIND", "HOST", "PID", "ENDPOINT",
    "START", "WHY", "yourapp",
)  # fmt: skip
_PLACEHOLDER = re.compile(rf"(?<![\w-])(?:{'|'.join(PLACEHOLDERS)})(?![\w-])")


@dataclass(frozen=True, slots=True)
class Line:
    """A command of a page. `in_background`: it goes on running; `by_another`: another person types it."""

    command: str
    comment: str

    @property
    def in_background(self) -> bool:
        return self.command.endswith("&")

    @property
    def by_another(self) -> bool:
        return self.comment.startswith("another person")

    @property
    def placeholders(self) -> list[str]:
        return _PLACEHOLDER.findall(self.command)

    def filled(self, values: dict[str, str]) -> str:
        """The command with its placeholders replaced, ready for a shell. Raises `KeyError` for one without a value."""
        return _PLACEHOLDER.sub(lambda found: _quoted(found[0], values[found[0]]), self.command)


def _quoted(name: str, value: str) -> str:
    """A value as a shell takes it as one word: queues and processes are named elsewhere. These two stand for several words."""
    return value if name in ("START", "OUTCOME") else shlex.quote(value)


def section(text: str, name: str) -> str:
    """What stands below a heading of a page."""
    _, _, after = text.partition(f"\n## {name}\n")
    return after.partition("\n## ")[0]


def commands(text: str) -> list[Line]:
    """The commands of a page, in order."""
    lines = re.findall(r"^    (\S.*)$", section(text, COMMANDS), re.MULTILINE)
    return [Line(*(part.strip() for part in (f"{line}    # ").split("    # ", 2)[:2])) for line in lines]
