"""Ends: what may fail, what it leaves for a person, and what a person has changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.chaos.books import FAILING, Books, becomes, code_of, deliveries_in, id_of, letters_in, name_of
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
            if event.verb not in FAILING:
                continue
            letters = letters_in(books, event.change, "INSERT")
            # a letter from before its operation was known becomes the operation's
            letters += [c for c in letters_in(books, event.change, "UPDATE") if (c.old or {})["generation"] is None]
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


def every_failure_waits_for_a_person(books: Books) -> Iterator[Violation]:
    """I13: every failed operation has an open dead letter, or one that a person has discarded."""
    for id, changes in books.records.items():
        record = changes[-1].new
        if record is None or record["status"] != "failed":
            continue
        found = {
            letter["status"] for letter in books.letters_of(id) if letter["generation"] in (None, record["generation"])
        }
        if not found & {"open", "discarded"}:
            yield Violation("I13", name_of(id), f"failed as {code_of(record)}, and no dead letter says so to a person")


def a_copy_ends_nothing_that_lives(books: Books) -> Iterator[Violation]:
    """I29: a message that the broker gave up ends nothing that another delivery will bring."""
    for id, events in books.events.items():
        for event in events:
            if event.verb != "give_up" or event.old.get("status") == "started":
                continue
            letters = [*letters_in(books, event.change, "INSERT"), *letters_in(books, event.change, "UPDATE")]
            own = {letter.row["outbox_id"] for letter in letters}
            for lines in books.deliveries(id):
                seen = [c for c in lines if c.seq < event.change.seq and c.txid != event.change.txid]
                row = seen[-1].new if seen else None
                if row is None or row["settled_at"] is not None or row["id"] in own:
                    continue
                # of the message's own rows an older one has been delivered, as a rule; a copy has none
                if row["status"] == "pending" or own == {None}:
                    yield Violation("I29", name_of(id), f"given up as {code_of(event.new)}, and outbox row {row['id']} was to deliver it")  # fmt: skip


def commands_count_once(books: Books) -> Iterator[Violation]:
    """I14: a command of a person changes nothing twice, however often it is given."""
    given: Counter[tuple[Any, ...]] = Counter()
    for change in books.changes:
        if change.book == "audit" and change.row["action"] != "refused":
            columns = ("actor", "action", "tenant", "task", "key", "reason")
            # a release and the next one of the same operation find it under another fence
            given[*(change.row[name] for name in columns), change.row["fence_before"]] += 1
    for (actor, action, tenant, task, key, reason, _), times in given.items():
        if times > 1:
            yield Violation("I14", f"{tenant}/{task}/{key}", f"{action} by {actor} ({reason}) took place {times} times")  # fmt: skip


def attempts_are_used_before_they_are_exhausted(books: Books) -> Iterator[Violation]:
    """I13: nothing ends as attempts_exhausted before its attempts are used."""
    for id, accepted in books.accepted.items():
        for event in books.events.get(id, []):
            exhausted = event.verb in FAILING and code_of(event.new) == "attempts_exhausted"
            if exhausted and accepted.max_attempts is not None and event.new["attempts"] < accepted.max_attempts:
                yield Violation("I13", name_of(id), f"attempts_exhausted after {event.new['attempts']} of {accepted.max_attempts}")  # fmt: skip
