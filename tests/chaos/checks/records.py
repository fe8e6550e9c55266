"""The record: one result per generation, a fence that only grows, and what its end has committed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.chaos.books import (
    ENDING,
    FAULTS,
    TERMINAL,
    UNFINISHED,
    UNKNOWN,
    Books,
    Event,
    cause_of,
    code_of,
    id_of,
    in_state,
    letters_in,
    name_of,
    process_of,
    rows_of,
    sha256,
    surplus_rows,
)
from tests.chaos.evidence import Accepted, Id, Violation
from tests.chaos.ledgers import Change


def one_result_per_generation(books: Books) -> Iterator[Violation]:
    """I1: for every key at most one committed result per generation, and no business row twice."""
    for id, events in books.events.items():
        results: Counter[int] = Counter()
        for event in events:
            if event.verb == "purge":
                results.clear()
            elif event.verb == "complete":
                results[event.new["generation"]] += 1
        for generation, number in results.items():
            if number > 1:
                yield Violation("I1", name_of(id), f"{number} committed results in generation {generation}")
        generation = 0
        for event in events:
            if event.verb == "purge":
                generation = 0
                continue
            now = event.new["generation"]
            if now != generation and now != (1 if generation == 0 else generation + 1):
                yield Violation("I1", name_of(id), f"generation {now} after {generation}")
            if now > max(generation, 1) and event.verb != "replay":
                yield Violation("I1", name_of(id), f"generation {now} was opened by {event.verb}, not by a replay")
            generation = now
    for id, each, found in surplus_rows(books):
        yield Violation("I1", name_of(id), f"the row {each} is there {found} times")


def rows_exactly_with_their_end(books: Books) -> Iterator[Violation]:
    """I3: business rows are visible exactly when their record is completed, their step recorded, or it has failed."""
    for change in books.business:
        key = str(change.row.get("account", ""))
        if change.verb != "INSERT":
            yield Violation("I3", key, f"a row of {change.book} was changed ({change.verb.lower()})")
            continue
        event = books.event_of(change)
        if event is None:
            yield Violation("I3", key, f"a row of {change.book} was committed without its record (tx {change.txid})")
            continue
        if (change.book in ("failures", "reversals")) != (event.verb in ENDING):
            yield Violation(
                "I3", name_of(id_of(event.change.row)), f"a row of {change.book} committed with {event.verb}"
            )
    for id, accepted in books.accepted.items():
        rows = rows_of(books, id, "entries") - rows_of(books, id, "reversals")
        ended = books.ended(id)
        if ended == "completed" and accepted.rows is not None:
            missing = Counter(accepted.rows) - rows
            strange = [each for each in rows if each not in accepted.rows]
            if missing:
                yield Violation("I3", name_of(id), f"completed, but not there: {sorted(missing)}")
            if strange:
                yield Violation("I3", name_of(id), f"completed, with rows that were not asked for: {sorted(strange)}")
        told = accepted.failure is not None if accepted.failure_row is None else accepted.failure_row
        for event in books.events.get(id, []):
            if event.verb in ENDING:
                yield from _told_of_its_end(books, id, event, told=told)


def _told_of_its_end(books: Books, id: Id, event: Event, *, told: bool) -> Iterator[Violation]:
    """The business row of a failure says what the record says; an open end may go without one, never with another."""
    code = code_of(event.new)
    rows = books.written_with(id, event, "failures")
    broken = any(letter.row["reason"] == "on_failed_error" for letter in letters_in(books, event.change, "INSERT"))
    least = 0 if broken or code in (UNKNOWN, UNFINISHED) else 1
    if told and not least <= len(rows) <= 1:
        yield Violation("I3", name_of(id), f"failed as {code}, with {len(rows)} rows of its failure")
    for row in rows:
        if row.row["code"] != code:
            yield Violation("I3", name_of(id), f"failed as {code}, and the business was told {row.row['code']}")


def the_fence_only_grows(books: Books) -> Iterator[Violation]:
    """I4: the fence of a key only grows, and no write of a former holder is ever visible."""
    for id, events in books.events.items():
        fence = 0
        for event in events:
            change = event.change
            if event.verb == "purge":
                continue
            now = event.new["fence"]
            if event.verb in ("claim", "takeover", "doubt", "give_up") and now <= fence:
                yield Violation("I4", name_of(id), f"the fence went from {fence} to {now} ({event.verb})")
            elif now < fence:
                yield Violation("I4", name_of(id), f"the fence went back from {fence} to {now} ({event.verb})")
            fence = max(fence, now)
            if event.verb in ("complete", "fail", "release", "effect", "renew"):
                yield from _written_by_its_holder(id, event, change)


def _written_by_its_holder(id: Id, event: Event, change: Change) -> Iterator[Violation]:
    claim = event.claim
    if event.old.get("status") == "released":
        yield Violation("I4", name_of(id), f"{event.verb} under an old fence: the record has no holder")
    if claim is None or event.old.get("status") != "started":
        return
    fence = event.old["fence"]
    if change.began < claim.at and change.txid != claim.txid:
        yield Violation(
            "I4", name_of(id), f"{event.verb} under an old fence: its transaction is older than the claim of {fence}"
        )
    holder = process_of(event.old.get("locked_by"))
    if change.writer.startswith("pid ") and holder is not None and change.writer != holder:
        yield Violation(
            "I4", name_of(id), f"{event.verb} under an old fence: by {change.writer}, but {fence} is of {holder}"
        )


def ended_is_ended(books: Books) -> Iterator[Violation]:
    """I5: an ended record changes only by a recorded replay, a person's word on an effect, or the purge."""
    for id, events in books.events.items():
        for event in events:
            if event.old.get("status") not in TERMINAL or event.verb == "purge":
                continue
            if event.verb == "replay" and letters_in(books, event.change, "UPDATE"):
                continue
            audited = any(c.book == "audit" for c in books.by_transaction[event.change.txid])
            if event.verb in ("resolve", "resolve_end", "replay") and audited:
                continue
            # looked at by the purge, which comes back later
            if {name for name in event.new if event.new[name] != event.old[name]} == {"kept_until"}:
                continue
            yield Violation(
                "I5", name_of(id), f"{event.old['status']} and changed again: {event.verb} to {event.new['status']}"
            )


def stored_results_are_the_expected(books: Books) -> Iterator[Violation]:
    """I6: the stored result is the expected one, byte for byte; one key has one fingerprint until it is purged."""
    for id, events in books.events.items():
        fingerprint = None
        for event in events:
            if event.verb == "purge":
                fingerprint = None
            elif fingerprint is None:
                fingerprint = event.new["fingerprint"]
            elif event.new["fingerprint"] != fingerprint:
                yield Violation("I6", name_of(id), f"{event.verb} changed the fingerprint")
                fingerprint = event.new["fingerprint"]
    for id, accepted in books.accepted.items():
        for event in books.events.get(id, []):
            if event.verb not in ENDING:
                continue
            codes, expected = _codes(books, accepted, event), accepted.failure or "a result"
            code, cause = code_of(event.new), cause_of(event.new)
            if code not in codes:
                yield Violation("I6", name_of(id), f"failed as {code} ({event.verb}), expected {expected}")
            if cause is not None and cause not in codes | accepted.may_stop:
                yield Violation("I6", name_of(id), f"failed by {cause} ({event.verb}), expected {expected}")
        if books.ended(id) == "completed":
            record = books.records[id][-1].row
            if accepted.failure is not None:
                yield Violation("I6", name_of(id), f"completed, but {accepted.failure} was to come")
            elif accepted.result is not None and record["result"] != sha256(accepted.result):
                yield Violation("I6", name_of(id), "another result is stored than was expected")


def _codes(books: Books, accepted: Accepted, event: Event) -> set[str | None]:
    """What an operation may fail as: as it is to, by faults, by a person, or over an effect."""
    codes = {accepted.failure, *accepted.may_fail}
    # a request has attempts without limit, and no message that the broker could give up
    codes |= set() if accepted.id.is_request else FAULTS
    # a person's word ends what only the unknown effect had ended
    by_a_person = event.verb == "cancel" or (event.verb == "resolve_end" and cause_of(event.old) in (None, "cancelled"))
    codes |= {"cancelled"} if by_a_person else set()
    codes |= {"revoked"} if accepted.id in books.evidence.revoked else set()
    codes |= {UNKNOWN} if in_state(event.new["effects"], "begun") else set()
    codes |= {UNFINISHED} if in_state(event.new["effects"], "done") else set()
    return codes


def events_apply_once(books: Books) -> Iterator[Violation]:
    """I11: a published event is applied at most once per consumer."""
    for id, accepted in books.accepted.items():
        if accepted.is_event:
            applied = sum(e.verb == "complete" for e in books.events.get(id, []))
            if applied > 1:
                yield Violation("I11", name_of(id), f"the event was applied {applied} times")
