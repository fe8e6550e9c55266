"""Ends: what may fail, what it leaves for a person, and what a person has changed."""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.books import Books, becomes, deliveries_in, id_of, letters_in, name_of
from tests.chaos.evidence import Violation


def failures_are_bounded_and_lettered(books: Books) -> Iterator[Violation]:
    """I13: an operation fails at most so many times, then there is exactly one dead letter, which says how and why."""
    for id, events in books.events.items():
        own = books.accepted[id].max_attempts if id in books.accepted else None
        limit = (own or books.evidence.max_attempts) + books.evidence.spare_attempts
        most = max((e.new["attempts"] for e in events if e.change.new is not None), default=0)
        if most > limit:
            yield Violation("I13", name_of(id), f"{most} attempts, allowed are {limit}")
        for event in events:
            if event.verb not in ("fail", "give_up", "cancel"):
                continue
            letters = letters_in(books, event.change, "INSERT")
            if len(letters) != 1:
                yield Violation("I13", name_of(id), f"failed ({event.verb}) with {len(letters)} dead letters")
            for letter in letters:
                wanted = ("reason", "attempts", "first_error", "last_error", "headers", "payload")
                if without := [name for name in wanted if letter.row[name] is None]:
                    yield Violation("I13", name_of(id), f"a dead letter without {', '.join(without)}")


def replays_are_one(books: Books) -> Iterator[Violation]:
    """I14: a dead letter is replayed at most once: one new generation, one delivery, in one transaction."""
    for letter, lines in books.letters.items():
        replays = [c for c in lines if c.old is not None and becomes(c, "replayed")]
        if len(replays) > 1:
            yield Violation(
                "I14", name_of(id_of(lines[-1].row)), f"dead letter {letter} was replayed {len(replays)} times"
            )
    for id, events in books.events.items():
        for event in events:
            if event.verb != "replay":
                continue
            if len(letters_in(books, event.change, "UPDATE")) != 1:
                yield Violation("I14", name_of(id), "reopened without its dead letter")
            if len(deliveries_in(books, event.change)) != 1:
                yield Violation(
                    "I14", name_of(id), f"reopened with {len(deliveries_in(books, event.change))} deliveries"
                )
            if event.new["generation"] != event.old["generation"] + 1:
                yield Violation("I14", name_of(id), "reopened without a new generation")
