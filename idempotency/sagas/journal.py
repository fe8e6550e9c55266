"""What a saga has recorded, as its code runs through it again: by name and in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ..store.saga_steps import Recorded


class Mismatch(Exception):
    """The code asks for something else than it has recorded; the message names both sides."""


class Journal:
    """The recorded steps of a saga, and how far its code has come in them."""

    def __init__(self, rows: Sequence[Recorded]) -> None:
        self._rows = [row for row in rows if row.kind != "undo"]
        self._cursor = 0
        self._asked: Counter[str] = Counter()
        self._taken: set[str] = set()
        self._versions: dict[str, bool] = {}
        self.undos = {row.undoes: row for row in rows if row.kind == "undo"}
        self.last = max((row.position for row in rows), default=0)

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
        if row.args != args:
            raise Mismatch(
                f"recorded as number {row.position} is {_said(kind, name)}; the code has it with other arguments"
            )
        self._cursor += 1
        return row

    def version(self, name: str) -> bool | None:
        """Whether the saga goes by the code that `name` introduced; None: it has not been recorded, and can be."""
        if name in self._versions:
            return self._versions[name]
        row = self.unread
        if row is None:
            return None
        at = self._cursor
        while at < len(self._rows) and self._rows[at].kind == "version":
            if self._rows[at].name == name:
                self._cursor = at + 1
                self._versions[name] = True
                return True
            at += 1
        self._versions[name] = False
        return False

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

    def check_read(self) -> None:
        """Raise `Mismatch` if the code has ended before it came to all that is recorded."""
        self._skip_versions()
        if (row := self.unread) is not None:
            raise Mismatch(f"recorded as number {row.position} is {_said(row.kind, row.name)}; the code ends before it")

    def effects(self) -> dict[str, dict[str, Any]]:
        """The effects, as the record of another operation has them."""
        return {
            row.name: {**row.entry, "position": row.position, "begun_at": row.begun_at}
            for row in self._rows
            if row.kind == "effect" and row.entry is not None
        }

    def _skip_versions(self) -> None:
        """A version that the code no longer asks about has done its work."""
        while (row := self.unread) is not None and row.kind == "version":
            self._versions[row.name] = True
            self._cursor += 1


def _said(kind: str, name: str) -> str:
    return f"the {kind} {name!r}"
