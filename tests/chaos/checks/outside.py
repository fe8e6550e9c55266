"""The books: the provider's ledger, our ledger of effects and steps, and the business rows agree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.chaos.books import Books, name_of
from tests.chaos.evidence import Id, Violation


def one_act_outside(books: Books) -> Iterator[Violation]:
    """I12: per key and effect at most one act of the provider, under a key of nobody else, and begun before."""
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
            yield Violation("I12", key, f"{acts} acts under {gateway_key} ({', '.join(names) or 'nobody'})")
        if acts and gateway_key not in owners:
            yield Violation("I12", gateway_key, "an act under a key that no effect was begun with")
        for owner in owners.get(gateway_key, ()):
            acted[owner] += bool(acts)
    for gateway_key, found in owners.items():
        if len(found) > 1:
            names = sorted(f"{name_of(id)} {name}" for id, name in found)
            yield Violation("I12", names[0].split(" ")[0], f"{gateway_key} is shared by {', '.join(names)}")
    for (id, name), keys in acted.items():
        if keys > 1:
            yield Violation("I12", name_of(id), f"effect {name!r} acted under {keys} keys")
    for id, accepted in books.accepted.items():
        if accepted.acts is not None and books.ended(id) == "completed":
            found_acts = sum(keys for (owner, _), keys in acted.items() if owner == id)
            if found_acts != accepted.acts:
                yield Violation(
                    "I12", name_of(id), f"completed with {found_acts} acts outside, expected {accepted.acts}"
                )
