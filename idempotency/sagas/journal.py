"""What a saga has recorded, as its code runs through it again: by name and in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from ..store.saga_steps import Recorded
from .arguments import are_same


class Mismatch(Exception):
    """The code asks for something else than it has recorded; the message names both sides."""


class Journal:
    """The recorded steps of a saga, and how far its code has come in them."""

    def __init__(self, rows: Sequence[Recorded]) -> None:
        self._rows = [row for row in rows if row.kind not in ("undo", "seen")]
        self._cursor = 0
        self._asked: Counter[str] = Counter()
        self._taken: set[str] = set()
        self._versions: dict[str, bool] = {}
        self.undos = {row.undoes: row for row in rows if row.kind == "undo"}
        self.last = max((row.position for row in rows), default=0)
        # when the last thing ended that this attempt has read, by the database's clock
        self.seen = max((row.ended_at for row in rows if row.ended_at is not None), default=None)

    @property
    def rows(self) -> Sequence[Recorded]:
        return self._rows

    def __reversed__(self) -> Iterator[Recorded]:
        return reversed(self._rows)

    def name(self, given: str) -> str:
        """The name under which the next use of `given` is recorded: the second one is `given#2`."""
        name = given
        while name in self._taken:
            self._asked[given] += 1
            name = f"{given}#{self._asked[given] + 1}"
        self._taken.add(name)
        return name

    def next(self, kind: str, name: str, args: str | None) -> Recorded | None:
        """What is recorded where the code has come to; None: nothing yet. Raises `Mismatch`."""
        self._skip_versions()
        row = self.unread
        if row is None:
            return None
        if (row.kind, row.name) != (kind, name):
            raise Mismatch(
                f"recorded as number {row.position} is {_said(row.kind, row.name)}; the code has {_said(kind, name)}"
            )
        if not are_same(row.args, args):
            raise Mismatch(
                f"recorded as number {row.position} is {_said(kind, name)}; the code has it with other arguments"
            )
        self._cursor += 1
        return row

    def version(self, name: str) -> bool | None:
        """Whether the saga goes by the code that `name` introduced; None: it has not been recorded, and can be."""
        if name in self._versions:
            return self._versions[name]
        if self.unread is None:
            return None
        asked_here = takewhile(lambda row: row.kind == "version", self._rows[self._cursor :])
        self._versions[name] = any(row.name == name for row in asked_here)
        self._skip_versions()
        return self._versions[name]

    def add(self, row: Recorded) -> None:
        """Note what was recorded just now."""
        self._rows.append(row)
        self._cursor = len(self._rows)
        self.last = max(self.last, row.position)
        if row.kind == "version":
            self._versions[row.name] = True

    def change(self, position: int, change: dict[str, Any]) -> None:
        """Note what was recorded of an effect just now."""
        row = next(row for row in self._rows if row.position == position)
        row.entry = {**(row.entry or {}), **change}
        row.state = row.entry["state"]

    @property
    def unread(self) -> Recorded | None:
        """What is recorded next, and the code has not come to."""
        return self._rows[self._cursor] if self._cursor < len(self._rows) else None

    def check_read(self, what: str) -> None:
        """Raise `Mismatch` if the code has ended before it came to all that is recorded. `what` it does then, in words."""
        self._skip_versions()
        if (row := self.unread) is not None:
            raise Mismatch(
                f"recorded as number {row.position} is {_said(row.kind, row.name)}; the code {what} before it"
            )

    def effects(self) -> dict[str, dict[str, Any]]:
        """The effects, as the record of another operation has them."""
        return {
            row.name: {"begun_at": row.begun_at, **row.entry, "position": row.position}
            for row in self._rows
            if row.kind == "effect" and row.entry is not None
        }

    def _skip_versions(self) -> None:
        """Read the versions that the code has asked about. It has to ask: code that does not may be older than them."""
        while (row := self.unread) is not None and row.kind == "version" and self._versions.get(row.name):
            self._cursor += 1


def _said(kind: str, name: str) -> str:
    return f"the {kind} {name!r}"
