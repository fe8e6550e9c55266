"""The two input files: which lines can be submitted, in which order, and which were refused.

All lines are staged in a temporary SQLite file, so that ordering them, finding a refund's purchase and finding duplicate
ids take no memory, however long the files are.
"""

from __future__ import annotations

import csv
import random
import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PURCHASE_COLUMNS = ("purchase_id", "customer_id", "purchased_on", "quantity", "amount_cents", "currency")
REFUND_COLUMNS = ("refund_id", "purchase_id", "amount_cents", "reason")
# Characters; the reason is stored with the refund and shown to people.
MAX_REASON = 200
# Stricter than int(), which also accepts "1_000" and digits of other scripts.
_INTEGER = re.compile(r"-?[0-9]{1,18}")

_SCHEMA = """
CREATE TABLE lines (
    seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, number INTEGER NOT NULL, id TEXT NOT NULL, purchase_id TEXT NOT NULL,
    customer_id TEXT NOT NULL, amount INTEGER NOT NULL, currency TEXT NOT NULL, reason TEXT NOT NULL,
    quantity TEXT NOT NULL, refused TEXT, after REAL
);
CREATE INDEX lines_id ON lines (kind, id);
"""
_LINE = "seq, kind, number, id, purchase_id, customer_id, amount, currency, reason, quantity"

Kind = Literal["purchase", "refund"]


class InputError(Exception):
    """A file cannot be used at all; the message is one line with its path."""


@dataclass(frozen=True, slots=True)
class Line:
    """One purchase or refund from a file. `amount` is in the currency's minor unit; `quantity` as in the file."""

    seq: int
    kind: Kind
    number: int
    id: str
    purchase_id: str
    customer_id: str
    amount: int
    currency: str
    reason: str
    quantity: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """A line that was not accepted, and why."""

    file: str
    line: int
    id: str
    reason: str


class Intake:
    """All lines of both files, and which were refused. `seed` determines where among the purchases the refunds go.

    Raises `InputError` for a file that cannot be read, lacks a column, or contains no purchase.
    """

    def __init__(self, purchases: Path, refunds: Path | None, *, seed: int) -> None:
        self._files = {"purchase": purchases.name, "refund": "" if refunds is None else refunds.name}
        self._seed = seed
        self.refused_lines = 0
        # An empty name makes it a temporary file, deleted with the connection.
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.executescript(_SCHEMA)
        self._db.execute("BEGIN")
        self.purchases = sum(self._stage("purchase", row) for row in _rows(purchases, PURCHASE_COLUMNS))
        if not self.purchases:
            raise InputError(f"{purchases}: contains no purchases")
        given = () if refunds is None else _rows(refunds, REFUND_COLUMNS)
        self.refunds = sum(self._stage("refund", row) for row in given)
        self._db.execute("COMMIT")

    def batches(self, size: int) -> Iterator[list[Line]]:
        """The valid lines in order: purchases as in the file, each refund somewhere after its purchase."""
        cursor = self._db.execute(f"SELECT {_LINE} FROM lines WHERE refused IS NULL ORDER BY coalesce(after, seq), seq")
        while rows := cursor.fetchmany(size):
            yield [Line(*row) for row in rows]

    def refuse(self, line: Line, reason: str) -> None:
        """Record that a line was refused."""
        self._db.execute("UPDATE lines SET refused = ? WHERE seq = ?", (reason, line.seq))
        self.refused_lines += 1

    def accepted(self, kind: Kind) -> Iterator[Line]:
        """The lines that were not refused."""
        rows = self._db.execute(f"SELECT {_LINE} FROM lines WHERE kind = ? AND refused IS NULL ORDER BY seq", (kind,))
        return (Line(*row) for row in rows)

    def refused(self, kind: Kind) -> list[Refused]:
        """The refused lines with their reasons."""
        rows = self._db.execute(
            "SELECT number, id, refused FROM lines WHERE kind = ? AND refused IS NOT NULL ORDER BY seq", (kind,)
        )
        return [Refused(self._files[kind], *row) for row in rows]

    def _stage(self, kind: Kind, row: _Row) -> int:
        value = row.fields
        id, purchase_id = value[f"{kind}_id"], value["purchase_id"]
        refused = (
            row.problem
            or self._used(kind, id)
            or _not_an_integer(value["amount_cents"])
            or _not_a_sentence(value.get("reason", ""))
        )
        self._db.execute(
            f"INSERT INTO lines ({_LINE}, refused, after) VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                kind,
                row.number,
                id,
                purchase_id,
                value.get("customer_id", ""),
                0 if refused else int(value["amount_cents"]),
                value.get("currency", ""),
                value.get("reason", ""),
                value.get("quantity", ""),
                refused,
                self._after(purchase_id) if kind == "refund" else None,
            ),
        )
        self.refused_lines += refused is not None
        return 1

    def _after(self, purchase_id: str) -> float:
        """The position of a refund: anywhere between its purchase and the last one, or anywhere if that is unknown."""
        query = "SELECT min(seq) FROM lines WHERE kind = 'purchase' AND id = ?"
        first = self._db.execute(query, (purchase_id,)).fetchone()[0] or 0
        # Seeded by purchase, so that refunds of one purchase are submitted together and race.
        share = random.Random(f"{self._seed}:{purchase_id}").random()
        return float(first + (self.purchases - first) * share)

    def _used(self, kind: Kind, id: str) -> str | None:
        query = "SELECT number FROM lines WHERE kind = ? AND id = ? LIMIT 1"
        row = self._db.execute(query, (kind, id)).fetchone()
        return f"{kind}_id: must be unique, already used in line {row[0]}" if row and id.strip() else None


@dataclass(frozen=True, slots=True)
class _Row:
    number: int
    fields: dict[str, str]
    problem: str | None


def _rows(path: Path, columns: Sequence[str]) -> Iterator[_Row]:
    """Parse each line separately, so that an unclosed quotation mark does not swallow the lines after it."""
    try:
        # utf-8-sig strips a byte-order mark; with "replace", invalid UTF-8 spoils only its own field.
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            header = next(csv.reader([file.readline()]), [])
            if missing := [column for column in columns if column not in header]:
                raise InputError(f"{path}: column missing: {', '.join(missing)}")
            for number, text in enumerate(file, start=2):
                if text.strip():
                    yield _row(number, text, header)
    except (OSError, csv.Error) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _row(number: int, text: str, header: list[str]) -> _Row:
    problem = None
    try:
        values = next(csv.reader([text], strict=True))
    except csv.Error as error:
        values, problem = [], f"line: {error}"
    if problem is None and len(values) != len(header):
        problem = f"line: must have {len(header)} fields, got {len(values)}"
    return _Row(number, dict.fromkeys(header, "") | dict(zip(header, values, strict=False)), problem)


def _not_an_integer(text: str) -> str | None:
    return (
        None if _INTEGER.fullmatch(text) else f"amount_cents: must be an integer in the minor unit, got {text[:40]!r}"
    )


def _not_a_sentence(text: str) -> str | None:
    if len(text) <= MAX_REASON and text.isprintable():
        return None
    return f"reason: must be one line of at most {MAX_REASON} printable characters"
