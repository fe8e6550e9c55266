"""The books: the provider's ledger, our ledger of effects and steps, and the business rows agree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.chaos.books import ENDING, UNFINISHED, UNKNOWN, Books, Event, code_of, in_state, name_of, rows_of
from tests.chaos.evidence import Accepted, Id, Violation


def one_act_outside(books: Books) -> Iterator[Violation]:
    """I12: per key and effect at most one act of the provider, under a key that nothing else uses, and begun before."""
    owners: dict[str, set[tuple[Id, str]]] = defaultdict(set)
    acted: Counter[tuple[Id, str]] = Counter()
    for id, changes in books.records.items():
        for change in changes:
            for name, effect in (change.row["effects"] or {}).items():
                if effect.get("key"):
                    owners[effect["key"]].add((id, name))
    for gateway_key, acts in books.evidence.acts.items():
        if acts > 1:
            names = [f"{name_of(id)} {name}" for id, name in owners.get(gateway_key, ())]
            key = name_of(next(iter(owners[gateway_key]))[0]) if gateway_key in owners else gateway_key
            yield Violation("I12", key, f"{acts} acts under {gateway_key} ({', '.join(names) or 'no operation'})")
        if acts and gateway_key not in owners:
            yield Violation("I12", gateway_key, "an act under a key that no effect was begun with")
        for owner in owners.get(gateway_key, ()):
            acted[owner] += bool(acts)
    for gateway_key, found in owners.items():
        if len(found) > 1:
            names = sorted(f"{name_of(id)} {name}" for id, name in found)
            yield Violation("I12", names[0].split(" ")[0], f"{gateway_key} is shared by {', '.join(names)}")
    for (id, name), keys in acted.items():
        if keys - len(_compensated(books, id, name)) > 1:
            yield Violation("I12", name_of(id), f"effect {name!r} acted under {keys} keys")
    for id, accepted in books.accepted.items():
        if accepted.acts is not None and books.ended(id) == "completed":
            found_acts = sum(keys for (owner, _), keys in acted.items() if owner == id)
            if found_acts != accepted.acts:
                yield Violation(
                    "I12", name_of(id), f"completed with {found_acts} acts outside, expected {accepted.acts}"
                )


def nothing_fails_over_an_effect(books: Books) -> Iterator[Violation]:
    """I27: no operation ends plainly failed over an effect that is open or happened: it is unknown, or unfinished."""
    for id, events in books.events.items():
        for event in events:
            if event.verb not in ENDING:
                continue
            code, effects = code_of(event.new), event.new["effects"]
            begun, done = in_state(effects, "begun"), in_state(effects, "done")
            if code == UNKNOWN:
                if not begun:
                    yield Violation("I27", name_of(id), f"failed as {code}, and no effect is open")
                continue
            for name in begun:
                yield Violation("I27", name_of(id), f"failed as {code} ({event.verb}) over {name!r}, which is open")
            if code != UNFINISHED:
                for name in done:
                    yield Violation("I27", name_of(id), f"failed as {code} ({event.verb}) after {name!r} happened")
            elif not any(name in event.new["error"] for name in done):
                yield Violation("I27", name_of(id), f"failed as {code}, and its error names no effect that happened")


def the_books_agree(books: Books) -> Iterator[Violation]:
    """I27: the provider's ledger, our ledger of effects and the business rows say the same."""
    for id, changes in books.records.items():
        accepted, last = books.accepted.get(id), changes[-1].row["effects"] or {}
        # the last that was said of each key; an effect that moved on to its next key has left the others behind
        said: dict[str, tuple[str, str]] = {}
        for change in changes:
            for name, effect in (change.row["effects"] or {}).items():
                if effect.get("key"):
                    said[effect["key"]] = (name, effect["state"])
        for key, (name, state) in said.items():
            acts = books.evidence.acts.get(key, 0)
            if state in ("done", "compensated") and not acts:
                yield Violation("I27", name_of(id), f"{name!r} is recorded as {state}, and the provider has no act")
            elif state == "not_happened" and acts:
                yield Violation("I27", name_of(id), f"{name!r} is recorded as not happened, and the provider acted")
            elif state == "begun" and acts and last.get(name, {}).get("key") != key:
                yield Violation("I27", name_of(id), f"{name!r} has its next key, and the provider acted under {key}")
            amount, worth = books.evidence.amounts.get(key), accepted and accepted.amount
            if acts and worth is not None and amount is not None and amount != worth:
                yield Violation("I27", name_of(id), f"{name!r}: {amount} at the provider, {worth} in our books")
        if books.status(id) == "completed":
            for name in in_state(last, "begun"):
                yield Violation("I27", name_of(id), f"completed over {name!r}, which is open")


def undone_steps_are_forgotten(books: Books) -> Iterator[Violation]:
    """I31: a step's rows are there exactly when it is recorded; a permanent end undoes in reverse order, if it may."""
    for id, accepted in books.accepted.items():
        if not accepted.steps or id not in books.records:
            continue
        effects = books.records[id][-1].row["effects"] or {}
        rows, undone = rows_of(books, id, "entries"), rows_of(books, id, "reversals")
        for step in accepted.steps:
            recorded = effects.get(step.name, {}).get("state") == "done"
            there = rows[step.account, step.amount] - undone[step.account, step.amount]
            if there != recorded:
                was = "recorded" if recorded else "not recorded"
                yield Violation("I31", name_of(id), f"step {step.name!r} is {was}, and its row is there {there} times")
        for refund in accepted.refunds:
            compensated = len(_compensated(books, id, refund.name))
            if (times := undone[refund.account, refund.amount]) != compensated:
                yield Violation(
                    "I31", name_of(id), f"refunded {refund.name!r} {times} times, recorded are {compensated}"
                )
        for event in books.events[id]:
            if event.verb in ENDING:
                yield from _undone_rightly(books, accepted, event)


def _compensated(books: Books, id: Id, name: str) -> set[str]:
    """The provider's keys of an effect for which an undo has answered."""
    entries = [(change.row["effects"] or {}).get(name, {}) for change in books.records[id]]
    return {entry["key"] for entry in entries if entry.get("state") == "compensated"}


def _undone_rightly(books: Books, accepted: Accepted, event: Event) -> Iterator[Violation]:
    id, code = accepted.id, code_of(event.new)
    before, after = event.old.get("effects") or {}, event.new["effects"]
    names = {(step.account, step.amount): step.name for step in accepted.steps}
    reversals = books.written_with(id, event, "reversals")
    written = [(c.row["account"], c.row["amount"]) for c in reversals]
    refunds = {refund[1:] for refund in accepted.refunds}
    undone = [names.get(row, "?") for row in written if row not in refunds]
    if undone and code == UNKNOWN:
        yield Violation("I31", name_of(id), f"undid {', '.join(undone)} while an effect is unknown")
    happened = [after[name]["begun_at"] for name in in_state(after, "done")]
    begun_at = {name: before.get(name, {}).get("begun_at", 0.0) for name in undone}
    for name in undone:
        if any(later > begun_at[name] for later in happened):
            yield Violation("I31", name_of(id), f"undid {name!r}, and an effect after it happened")
    if undone != sorted(undone, key=lambda name: -begun_at[name]):
        yield Violation("I31", name_of(id), f"undid {', '.join(undone)}: not in reverse order")
    if code not in (UNKNOWN, UNFINISHED):
        for step in accepted.steps:
            if after.get(step.name, {}).get("state") == "done":
                yield Violation("I31", name_of(id), f"failed as {code}, and step {step.name!r} was not undone")
