"""Upkeep: recovery, purge and tenants."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tests.chaos.books import LATE, TERMINAL, Books, becomes, id_of, name_of, process_of, time_of
from tests.chaos.evidence import Id, Violation
from tests.chaos.ledgers import Change


def takeovers_are_justified(books: Books) -> Iterator[Violation]:
    """I20: a holder is replaced only when its lease is over or it is dead, and a dead one is replaced."""
    last_signs: dict[str, Change] = {}
    for change in books.changes:
        if change.writer:
            last_signs[change.writer] = change
    for id, events in books.events.items():
        for event in events:
            old, change = event.old, event.change
            if old.get("status") == "started" and event.taken:
                if time_of(old["locked_until"]) < change.at:
                    continue
                sign = last_signs.get(process_of(old["locked_by"]) or "")
                # recovery may know that a holder is dead before its lease is over; a later line of it says otherwise
                if event.verb != "recover" or (sign is not None and sign.began > change.at + LATE):
                    yield Violation("I20", name_of(id), f"{event.verb} from a holder whose lease was not over")
            early = event.verb == "claim" and time_of(old.get("available_at")) > change.at
            if early:
                yield Violation("I20", name_of(id), "claimed before it was due")
        last = books.records[id][-1].new or {}
        over = last.get("status") == "started" and time_of(last["locked_until"]) < books.now
        if over and books.evidence.drained:
            yield Violation("I20", name_of(id), "its lease is over, and it was not recovered")


def purged_is_past_its_time(books: Books) -> Iterator[Violation]:
    """I21: the purge deletes no record that has not ended or is younger than its retention, and nothing unsent."""
    for id, events in books.events.items():
        for event in events:
            if event.verb != "purge":
                continue
            if event.old["status"] not in TERMINAL:
                yield Violation("I21", name_of(id), f"deleted while {event.old['status']}")
            elif max(time_of(event.old["expires_at"]), time_of(event.old["kept_until"])) >= event.change.at:
                yield Violation("I21", name_of(id), "deleted before its retention was over")
            if id in books.open_letters(before=event.change):
                yield Violation("I21", name_of(id), "deleted with an open dead letter")
    for lines in books.outbox.values():
        for change in lines:
            if change.new is None and change.row["settled_at"] is None and change.row["status"] != "published":
                yield Violation("I21", name_of(id_of(change.row)), f"outbox row {change.row['id']} was deleted unsent")
    for letter, lines in books.letters.items():
        if lines[-1].new is None and lines[-1].row["status"] == "open":
            yield Violation("I21", name_of(id_of(lines[-1].row)), f"dead letter {letter} was deleted while open")


def tenants_are_apart(books: Books) -> Iterator[Violation]:
    """I23: no tenant has another tenant's rows, and every row has a tenant."""
    tenants = books.evidence.tenants
    if tenants is not None:
        for id in {id_of(c.row) for c in books.changes if c.book in ("records", "outbox")}:
            if id.tenant not in tenants:
                yield Violation("I23", name_of(id), f"a row of {id.tenant!r}, who is no tenant")
    owners: dict[tuple[str, int], set[str]] = defaultdict(set)
    for id, accepted in books.accepted.items():
        for each in accepted.rows or ():
            owners[each].add(id.tenant)
    for id in books.accepted:
        for change in books.written_by(id):
            if change.book != "entries":
                continue
            others = owners.get((change.row["account"], change.row["amount"]))
            if others and id.tenant not in others:
                yield Violation("I23", name_of(id), f"wrote the row {change.row['account']!r} of {', '.join(others)}")
    # one statement about one operation never ends another tenant's of the same name
    for changes in books.by_transaction.values():
        ended: dict[tuple[str, str], set[str]] = defaultdict(set)
        for change in changes:
            if change.book == "records" and (becomes(change, "completed") or becomes(change, "failed")):
                id = id_of(change.row)
                ended[id.task, id.key].add(id.tenant)
        for (task, key), found in ended.items():
            if len(found) > 1:
                name = name_of(Id(min(found), task, key))
                yield Violation("I23", name, f"ended in one transaction for {', '.join(sorted(found))}")
