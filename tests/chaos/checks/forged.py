"""Forgeries: what this application has not signed runs nothing, pays nothing, ends nothing and belongs to no operation."""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.books import Books, code_of, name_of
from tests.chaos.evidence import AMOUNT, Id, Violation, is_forged
from tests.chaos.ledgers import Change

# Why a message was not believed.
REASONS = ("unsigned", "altered")
# What a letter of a message says of an operation; the first three name one.
_SAYS = ("tenant", "task", "key", "generation", "fingerprint", "message_id")


def nothing_forged_took_effect(books: Books) -> Iterator[Violation]:
    """I32: nothing that was forged has a record, a row, an outbox row or an act outside."""
    for change in books.business:
        if is_forged(change.row["account"]) or change.row.get("amount", 0) >= AMOUNT:
            yield Violation("I32", str(change.row["account"]), f"a forged message has written into {change.book}")
    for id in {*books.records, *map(_named, books.outbox.values())}:
        if is_forged(id.key) or is_forged(id.tenant):
            yield Violation("I32", name_of(id), "a forged message has a record, or an outbox row")
    for key, amount in books.evidence.amounts.items():
        if amount >= AMOUNT:
            yield Violation("I32", key, f"a forged message has paid {amount}")


def letters_name_no_operation(books: Books) -> Iterator[Violation]:
    """I33: the dead letter of a forged message names no operation and is not replayed; it has ended none."""
    for lines in books.letters.values():
        letter = lines[-1].row
        if letter["reason"] not in REASONS:
            continue
        if said := [name for name in _SAYS if letter[name] is not None]:
            yield Violation(
                "I33", name_of(_named(lines)), f"letter {letter['id']}, {letter['reason']}, has a {said[0]}"
            )
        if letter["status"] == "replayed":
            yield Violation("I33", f"letter {letter['id']}", f"{letter['reason']}, and was replayed")
    for id, events in books.events.items():
        for event in events:
            if event.new and event.new["status"] == "failed" and code_of(event.new) in REASONS:
                yield Violation("I33", name_of(id), f"ended as {code_of(event.new)} by a message that is not believed")


def _named(lines: list[Change]) -> Id:
    row = lines[-1].row
    return Id(row["tenant"], row["task"], row["key"])
