"""What the rows and the append-only books of all sagas say, and what is wrong with them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, text

from tests.saga_deploy.application import GO, INNER_GO, NEW, OLD

_SAGAS = "SELECT key, task, status, stopped FROM idempotency.sagas"
_ROWS = """
SELECT g.key, s.kind, s.name, s.state FROM idempotency.saga_steps s JOIN idempotency.sagas g ON g.id = s.saga_id
ORDER BY s.saga_id, s.position
"""
_LETTERS = "SELECT key, task, last_error, status FROM idempotency.dead_letters WHERE reason = 'saga_mismatch'"


@dataclass
class Book:
    """One saga. `path`: what it has recorded, in order; `deeds`: what was done about its thing, and by which code."""

    kind: str
    status: str
    stopped: str | None
    path: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    deeds: list[tuple[str, str]] = field(default_factory=list)
    letters: list[tuple[str, bool]] = field(default_factory=list)

    def code_of(self, deed: str) -> str:
        """Which code has done this; "" if none has."""
        return next((code for what, code in self.deeds if what == deed), "")

    @property
    def ended_by(self) -> str:
        return self.deeds[-1][1] if self.deeds else ""


def read(connection: Connection) -> dict[str, Book]:
    """All sagas by their things. The inner ones, whose keys the sagas that call them have made, are left out."""
    inner = "deploys.inner"
    books = {
        row.key: Book(row.task.removeprefix("deploys."), row.status, row.stopped)
        for row in connection.execute(text(_SAGAS))
        if row.task != inner
    }
    for row in connection.execute(text(_ROWS)):
        if row.key in books:
            books[row.key].path.append(f"{row.kind} {row.name}")
            if row.state == "begun":
                books[row.key].open.append(f"{row.kind} {row.name}")
    for row in connection.execute(text("SELECT thing, deed, code FROM deeds ORDER BY id")):
        books[row.thing].deeds.append((row.deed, row.code))
    for row in connection.execute(text(_LETTERS)):
        if row.key in books:
            books[row.key].letters.append((row.last_error, row.status == "open"))
    return books


def wrong(books: dict[str, Book], begun_later: set[str]) -> list[str]:
    """What must not be, when all is over."""
    return [
        f"{thing}: {what}; recorded {book.path}, done {book.deeds}"
        for thing, book in books.items()
        for what in _wrong(book, thing in begun_later)
    ]


def _wrong(book: Book, is_later: bool) -> list[str]:
    found = []
    if book.status != ("FAILED" if book.kind == "undone" else "COMPLETED"):
        found.append(f"has ended as {book.status}")
    if book.open or book.stopped:
        found.append(f"is over, and not over: {book.open} {book.stopped}")
    path, deeds = _expected(book, is_later)
    if book.path != path:
        found.append(f"should have recorded {path}")
    if Counter(deed for deed, _ in book.deeds) != Counter(deeds):
        found.append(f"should have done {deeds}")
    if any(is_open for _, is_open in book.letters):
        found.append("goes on, and its letter is still open")
    if book.kind == "mismatched" and NEW in {code for _, code in book.deeds}:
        found.append("was gone on with by code that does not fit")
    return found


def _expected(book: Book, is_later: bool) -> tuple[list[str], list[str]]:
    """Which path a saga has to take, as the code goes that has done its deeds; and what it then does."""

    def is_new(deed: str) -> bool:
        return book.code_of(deed) not in (OLD, "")

    match book.kind:
        case "appended":
            told = is_new("close")
            path = ["step open", f"wait {GO}", "step close"] + ["call deploys.act"] * told
            return path, ["open", "close"] + ["tell"] * told
        case "reordered":
            first = ["version pack first", "step pack", "step label"]
            if not (is_later and is_new("pack")):
                first = ["step label", "step pack"]
            return [*first, f"wait {GO}", "step ship"], ["label", "pack", "ship"]
        case "inserted":
            checked = is_new("close")
            path = ["step open", "call deploys.inner", *["version check", "step check"] * checked, "step close"]
            return path, ["open", "in", *["check"] * checked, "close"]
        case "timed":
            return ["step open", "timer sleep", "step close"], ["open", "close"]
        case "undone":
            undos = ["undo undo deploys.act", "undo undo open"]
            path = ["step open", "call deploys.act", f"wait {GO}", *undos]
            # as the code has recorded it that has begun the saga, whichever does it
            said = "undo+" if is_new("open") else "undo"
            return path, ["open", "charge", f"{said} charge", f"{said} open"]
        case "mismatched":
            return ["step open", f"wait {GO}", "step close"], ["open", "close"]
    raise ValueError(book.kind)


def not_stopped_well(books: dict[str, Book]) -> list[str]:
    """Of the sagas that have stopped for good: those that were changed, or whose letter does not name both sides."""
    found = []
    for thing, book in books.items():
        if book.kind != "mismatched" or book.status == "COMPLETED":
            continue
        if (book.status, book.path, book.open) != ("RUNNING", ["step open", f"wait {GO}"], [f"wait {GO}"]):
            found.append(f"{thing}: was changed by code that does not fit: {book.status} {book.path}")
        if [deed for deed, _ in book.deeds] != ["open"]:
            found.append(f"{thing}: something was done by code that does not fit: {book.deeds}")
        letters = [said for said, is_open in book.letters if is_open]
        if len(letters) != 1 or not all(each in letters[0] for each in (GO, "approve")):
            found.append(f"{thing}: stopped, and its letters say {letters}")
    return found


def summary(books: dict[str, Book]) -> Counter[str]:
    """How many sagas were ended by which code."""
    counted: defaultdict[str, int] = defaultdict(int)
    for book in books.values():
        counted[book.ended_by] += 1
    return Counter(counted)


# for those who publish
EVENT_OF: dict[str, Any] = {
    "appended": GO,
    "reordered": GO,
    "inserted": INNER_GO,
    "timed": None,
    "undone": GO,
    "mismatched": GO,
}
