"""Delivery: everything accepted is delivered until it ends, and nothing else is delivered."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from tests.chaos.books import TERMINAL, Books, becomes, deliveries_in, id_of, name_of, sha256, time_of, whereabouts
from tests.chaos.evidence import Id, Violation
from tests.chaos.ledgers import Change


def everything_ends(books: Books) -> Iterator[Violation]:
    """I2: once faults have stopped every accepted operation ends, and until then its outbox row is kept."""
    if books.evidence.drained:
        letters = books.open_letters()
        for id in books.accepted:
            status = books.status(id)
            if status in ("started", "released"):
                yield Violation("I2", name_of(id), f"still {status}")
            elif books.ended(id) is None and id not in letters and status is None and _owed(books, id):
                yield Violation("I2", name_of(id), "accepted and in the outbox, but never begun")
    for lines in books.outbox.values():
        for change in lines:
            if change.old is None or change.new is None or change.old["settled_at"] == change.new["settled_at"]:
                continue
            id = id_of(change.new)
            ends = [
                c
                for c in books.records.get(id, [])
                if c.seq < change.seq
                and c.row["status"] in TERMINAL
                and c.row["fingerprint"] == change.new["fingerprint"]
            ]
            given_up = [
                c for c in books.letters_about(id, change.new["id"]) if c.seq < change.seq or c.txid == change.txid
            ]
            if not ends and not given_up and not _is_delivered_by_another(books, change):
                yield Violation(
                    "I2", name_of(id), f"outbox row {change.new['id']} was settled before its operation ended"
                )


def _is_delivered_by_another(books: Books, settled: Change) -> bool:
    """Whether resend looked after another row of the operation when this one was settled: its message was a second call's copy."""
    for lines in books.deliveries(id_of(settled.row)):
        before = [change.new for change in lines if change.seq < settled.seq]
        other = before[-1] if before else None
        if other is None or other["id"] == settled.row["id"] or other["fingerprint"] != settled.row["fingerprint"]:
            continue
        if other["settled_at"] is None and other["status"] == "published" and not other["taken"]:
            return True
    return False


def _owed(books: Books, id: Id) -> bool:
    return any(id_of(row) == id and row["settled_at"] is None for row in books.rows_left())


def acknowledged_is_held_elsewhere(books: Books) -> Iterator[Violation]:
    """I7: a message may go only if its record is ended, or holds the message, and its next delivery is on its way."""
    sent = {id_of(row) for row in books.rows_left() if row["settled_at"] is None}
    for id, changes in books.records.items():
        record = changes[-1].new
        if record is None or id.is_request:
            continue  # no message is acknowledged on the strength of a request's record
        if record["status"] in ("started", "released") and record["message"] in (None, "", sha256("")):
            yield Violation("I7", name_of(id), f"{record['status']}, and its message is not kept")
        if record["status"] == "released" and id not in sent:
            yield Violation("I7", name_of(id), "released, and no outbox row will deliver it again")
    for id, events in books.events.items():
        for event in events:
            counted = event.verb == "count"
            if counted and id.is_request:
                yield Violation("I7", name_of(id), "a duplicate of a request was counted, and no message may go for it")
            elif counted and event.old["status"] not in ("started", "released"):
                yield Violation("I7", name_of(id), f"a duplicate in flight was counted on a record that is {event.old['status']}")  # fmt: skip


def every_row_is_published(books: Books) -> Iterator[Violation]:
    """I8: every committed outbox row was published, and what is marked so did reach the broker."""
    lettered = {lines[-1].row["outbox_id"] for lines in books.letters.values()}
    letters = {id_of(lines[-1].row) for lines in books.letters.values()}
    unseen = []
    for row in books.rows_left():
        id = id_of(row)
        if row["status"] == "pending" and books.evidence.drained and time_of(row["available_at"]) <= books.now:
            yield Violation("I8", name_of(id), f"outbox row {row['id']} was never published")
        elif row["status"] == "failed" and row["id"] not in lettered:
            yield Violation("I8", name_of(id), f"outbox row {row['id']} was given up without a dead letter")
        elif row["status"] == "published":
            if not any(c.old is not None and becomes(c, "published") for c in books.outbox[row["id"]]):
                yield Violation("I8", name_of(id), f"outbox row {row['id']} is published, and was not marked")
            if row["settled_at"] is None and id not in books.records and id not in letters:
                unseen.append(row)
    held = Counter[str]() if books.evidence.drained else Counter(books.evidence.queues)
    for row in unseen:
        if held[row["queue"]] > 0:
            held[row["queue"]] -= 1
            continue
        yield Violation(
            "I8", name_of(id_of(row)), f"outbox row {row['id']} is marked as published, and the broker does not hold it"
        )


def nothing_rolled_back_is_sent(books: Books) -> Iterator[Violation]:
    """I9: nothing of a transaction that rolled back is ever published; every record was accepted once."""
    rolled_back = set(books.evidence.rolled_back)
    for id in books.records:
        if id in rolled_back:
            yield Violation("I9", name_of(id), "rolled back, and has a record")
        elif id not in books.accepted:
            yield Violation("I9", name_of(id), "has a record, and was never accepted")
    for id in {id_of(c.row) for lines in books.outbox.values() for c in lines} & rolled_back:
        yield Violation("I9", name_of(id), "rolled back, and has an outbox row")


def ordered_by_commit(books: Books) -> Iterator[Violation]:
    """I10: rows of one operation and ordering key are first published in the order in which they were committed."""
    published: dict[tuple[str, str], list[tuple[int, int, dict[str, Any]]]] = defaultdict(list)
    for row_id, lines in books.outbox.items():
        first = next((c for c in lines if becomes(c, "published")), None)
        if first is not None and first.row["ordering_key"] is not None:
            name = (first.row["task"], first.row["ordering_key"])
            published[name].append((first.seq, row_id, first.row))
    for (_, ordering_key), found in published.items():
        latest = (0, 0)
        for _, row_id, row in sorted(found, key=lambda each: each[0]):
            place = (row["place"] or 0, row_id)  # given at the commit
            if place < latest:
                yield Violation(
                    "I10", name_of(id_of(row)), f"row {row_id} of {ordering_key!r} was published after row {latest[1]}"
                )
            latest = max(latest, place)


def nothing_disappears(books: Books) -> Iterator[Violation]:
    """I15: accepted = completed + failed + dead + still queued; what is in none of them is lost."""
    _, lost = whereabouts(books)
    for id in lost:
        yield Violation(
            "I15", name_of(id), "lost: no record, no outbox row, no dead letter, and no message left for it"
        )


# What any number of relays, sweepers and resenders may do to an outbox row.
_SENDING = {
    ("pending", "pending"),
    ("pending", "published"),
    ("pending", "failed"),
    ("published", "pending"),
    ("published", "published"),
    ("failed", "failed"),
}


def sweepers_do_not_add_up(books: Books) -> Iterator[Violation]:
    """I22: however many relays and sweepers there are, each release has one delivery and each row one way forward."""
    for id, events in books.events.items():
        for event in events:
            if event.verb in ("release", "recover", "operator_release", "unknown_release"):
                number = len(deliveries_in(books, event.change))
                # nothing is sent for a request: its client asks again
                if number != (0 if id.is_request else 1):
                    yield Violation("I22", name_of(id), f"{event.verb} with {number} next deliveries")
    for row_id, lines in books.outbox.items():
        for change in lines:
            if change.old is None or change.new is None:
                continue
            step = (change.old["status"], change.new["status"])
            if step == ("failed", "pending") and change.new["origin"] == "replay":
                continue  # by a person, in its old place
            if step not in _SENDING:
                yield Violation("I22", name_of(id_of(change.row)), f"outbox row {row_id}: {step[0]} became {step[1]}")
            elif step == ("published", "pending") and change.old["settled_at"] is not None:
                yield Violation("I22", name_of(id_of(change.row)), f"outbox row {row_id}: settled, and sent again")
