"""What an action has to do with what others do, so that two orders of the same are not both explored.

A footprint is a set of `mode:what`, `what` being a table, the broker's queues or the provider, and `mode` one of
    r   reads what is committed
    l   locks, or writes what is not committed: it is invisible, and who wants to lock or write the same waits
    w   changes what others see, or lets go of a lock
and `*` stands for what is not known, and depends on everything. A table is one thing, whichever of its rows is meant.
"""

from __future__ import annotations

import re
from collections.abc import Set
from functools import lru_cache

from tests.search.scheduler import EVERYTHING

# Tables that triggers and functions of one of them use are counted as that one.
TABLES = {
    "records": "records",
    "outbox": "outbox",
    "lanes": "outbox",
    "relay_sleep": "outbox",
    "markers": "outbox",
    "settled": "outbox",
    "take_places": "outbox",
    "refresh_lane": "outbox",
    "dead_letters": "dead_letters",
    "discards": "dead_letters",
    "dead_letter_tries": "dead_letters",
    "set_aside": "set_aside",
    "audit": "audit",
    "payments": "business",
    "refunds": "business",
    "failures": "business",
}
# Sequences: their numbers are compared for equality, and drawn by statements that change a table above.
SEQUENCES = ("fence", "place")
_QUALIFIED = re.compile(r"idempotency\.(\w+)")
_WORDS = re.compile(r"\w+")
_CHANGES = re.compile(r"\b(insert|update|delete|merge|truncate|lock|share)\b", re.IGNORECASE)
# Statements that only set up the session which they run in.
_LOCAL = re.compile(
    r"\s*(set|reset|show|discard|deallocate|listen|unlisten|savepoint|release savepoint)\b", re.IGNORECASE
)
_ADVISORY = re.compile(r"advisory", re.IGNORECASE)


@lru_cache(maxsize=1000)
def of_statement(query: str) -> frozenset[str]:
    """What a statement reads (r) and writes (l: until it is committed)."""
    if _LOCAL.match(query):
        return frozenset()
    if any(name not in TABLES and name not in SEQUENCES for name in _QUALIFIED.findall(query)):
        return frozenset({EVERYTHING})
    mode = "l" if _CHANGES.search(query) else "r"
    found = {f"{mode}:{TABLES[word]}" for word in _WORDS.findall(query.lower()) if word in TABLES}
    if _ADVISORY.search(query):
        found.add("l:advisory")
    return frozenset(found or {EVERYTHING})


def committed(footprint: Set[str]) -> set[str]:
    """What of it others see, or wait for no more, at the end of its transaction."""
    return {f"w{each[1:]}" for each in footprint if each[0] == "l"}


def is_lasting(footprint: Set[str]) -> bool:
    """Whether anything of it is left when its process dies behind it."""
    return any(each[0] in f"w{EVERYTHING}" for each in footprint)


def independent(one: Set[str], other: Set[str]) -> bool:
    """Whether the two may change places, and neither sees the difference."""
    if not one or not other:
        return True
    if EVERYTHING in one | other:
        return False
    shared = {each[2:] for each in one} & {each[2:] for each in other}
    return all(
        {each[0] for each in (one | other) if each[2:] == what} <= {"r", "l"}
        and not (f"l:{what}" in one and f"l:{what}" in other)
        for what in shared
    )
