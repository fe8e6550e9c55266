"""What a scenario left, row by row, and the first difference from the plain run. No input or output.

Everything is rows under a heading: of tables, of messages, of calls. What differs between two plain runs (serial ids,
clock times) cannot be compared; it is left out, and reported.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .recording import REPEATABLE, SAFE, Call

Row = Mapping[str, Any]
# Columns that are not compared: (heading, column).
Masked = frozenset[tuple[str, str]]

# Characters of a row or value that a message shows.
SHOWN = 160

# The headings that are not tables, in the order in which a difference is closest to its cause.
OUTCOME, SENT, EFFECTS, CALLS, ENQUEUED, RESULT = "outcome", "sent", "effects", "calls", "enqueued", "result"
HEADINGS = (OUTCOME, SENT, EFFECTS, CALLS, ENQUEUED, RESULT)

HINTS = {
    OUTCOME: (
        "the next attempt stumbles over what an interrupted one left: a row written outside self.session, or an "
        "effect that says something else, or whose name is not the same in every attempt (a time, a random value: "
        "record it in a step first)."
    ),
    SENT: (
        "delay() or apply_async() in the body. It leaves at once, in every attempt, also in one that is rolled back. "
        "Use other_task.enqueue(self.session, ...): it leaves with the commit."
    ),
    EFFECTS: (
        "an effect or a step whose name is not the same in every attempt. Its name is what an attempt finds the "
        "earlier result by: no time, no random value, no attempt number in it."
    ),
    ENQUEUED: (
        "enqueue() or publish() with another session, which commits whether or not the task does. Give it self.session."
    ),
    RESULT: "the result depends on how often the body ran. Make it from the arguments, effects and rows alone.",
}
TABLE_HINT = (
    "a write that is not in self.session's transaction (another session or connection, autocommit): it stays when "
    "its attempt is rolled back, and the next attempt makes it again. Write through self.session, or in self.step."
)
SKIPPED_HINT = (
    "work that is skipped because of what an interrupted attempt left outside its transaction: a flag in the process's "
    "memory, a cache, a file, a row. Only the record knows whether the operation has ended."
)
NO_KEY_HINT = (
    "a call outside self.effect, or one that does not pass on the idempotency_key that effect gives to its function."
)
OTHER_KEY_HINT = (
    "a key made anew for each call (random, clock, attempt number), or an effect whose name is not the same in every "
    "attempt. Use the idempotency_key that self.effect gives to its function."
)
REPEATED_HINT = (
    "a call outside self.effect. It is made again although its outcome was known, and doubles as soon as the provider "
    "has forgotten its key. self.effect records the result and does not call again."
)
OTHER_BODY_HINT = (
    "a time or random value in what the call says. Providers refuse a key that comes back with other content; "
    "pass what changes as an argument that is recorded in a step."
)
KEY_HINT = (
    "a key made from the clock, a random value or a counter. It has to name the operation, not the call: make it from "
    "the arguments."
)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a scenario and the plain run differ."""

    where: str
    expected: str
    seen: str
    hint: str


@dataclass(frozen=True, slots=True)
class Left:
    """What a scenario left: rows by heading, and every call."""

    rows: Mapping[str, Sequence[Row]]
    calls: Sequence[Call]


def acts(calls: Iterable[Call]) -> list[Row]:
    """The calls that change something, each key once: what a provider that honours keys has done."""
    rows: list[Row] = []
    seen = set()
    for call in calls:
        identity = (call.method, call.path, call.key)
        if call.method in SAFE or (identity in seen if call.key is not None or call.method in REPEATABLE else False):
            continue
        seen.add(identity)
        rows.append({"method": call.method, "path": call.path, "key": call.key, "body": call.content})
    return rows


def masked(one: Left, other: Left) -> Masked:
    """The columns in which two plain runs differ, although nothing happened to either."""
    return frozenset(
        (heading, column)
        for heading in one.rows
        for column in {name for row in (*one.rows[heading], *other.rows[heading]) for name in row}
        if len(one.rows[heading]) == len(other.rows[heading])
        and _values(one.rows[heading], column) != _values(other.rows[heading], column)
    )


def first_difference(plain: Left, seen: Left, ignored: Masked, *, in_doubt: bool) -> Difference | None:
    """Where they part. `in_doubt`: a call was interrupted before its result was recorded, and may be made again."""
    if conflict := _conflict(seen.calls):
        return conflict
    tables = [heading for heading in plain.rows if heading not in HEADINGS]
    for heading in (OUTCOME, SENT, EFFECTS, CALLS):
        if difference := _compared(heading, plain.rows[heading], seen.rows[heading], ignored):
            return difference
    if not in_doubt and (repeated := _repeated(plain.calls, seen.calls, ignored)):
        return repeated
    for heading in (*tables, ENQUEUED, RESULT):
        if difference := _compared(heading, plain.rows[heading], seen.rows[heading], ignored):
            return difference
    return None


def _compared(heading: str, expected: Sequence[Row], seen: Sequence[Row], ignored: Masked) -> Difference | None:
    if (heading, "*") in ignored:
        return None
    expected = [_visible(heading, row, ignored) for row in expected]
    seen = [_visible(heading, row, ignored) for row in seen]
    wanted, found = _count(expected), _count(seen)
    missing, extra = list((wanted - found).elements()), list((found - wanted).elements())
    if not missing and not extra:
        return None
    where = heading if heading in HEADINGS else f"table {heading}"
    hint = _hint(heading, extra)
    if len(missing) == len(extra):
        before, after = _nearest(missing, extra)
        columns = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        same = {name: value for name, value in after.items() if name not in columns}
        if heading == RESULT or same or len(columns) == 1:
            return Difference(
                f"{where}, {', '.join(columns)}" + (f" of {_shown(same)}" if same else ""),
                _shown(before[columns[0]] if len(columns) == 1 and columns[0] in before else _only(before, columns)),
                _shown(after[columns[0]] if len(columns) == 1 and columns[0] in after else _only(after, columns)),
                hint,
            )
        return Difference(where, _shown(before), _shown(after), hint)
    text = (extra or missing)[0]
    row = json.loads(text)
    what = f"{where}: {_shown(row)}" if row else f"{where}: how many"
    return Difference(what, _times(wanted[text]), _times(found[text]), hint)


def _hint(heading: str, extra: Sequence[str]) -> str:
    if not extra and heading not in (OUTCOME, RESULT):
        return SKIPPED_HINT
    if heading != CALLS:
        return HINTS.get(heading, TABLE_HINT)
    call = json.loads(extra[0])
    return NO_KEY_HINT if call.get("key", "") is None else OTHER_KEY_HINT


def _conflict(calls: Sequence[Call]) -> Difference | None:
    """Two calls under one key with different content."""
    first: dict[tuple[str, str, str], Call] = {}
    for call in calls:
        if call.key is None or call.method in SAFE:
            continue
        former = first.setdefault((call.method, call.path, call.key), call)
        if former.content != call.content:
            where = f"two calls of {call.method} {call.path} under the key {call.key}"
            return Difference(where, _shown(former.content), _shown(call.content), OTHER_BODY_HINT)
    return None


def _repeated(plain: Sequence[Call], seen: Sequence[Call], ignored: Masked) -> Difference | None:
    """A call made more often than by the plain run, although no outcome was in doubt."""

    def count(calls: Sequence[Call]) -> Counter[str]:
        return Counter(
            _text(_visible(CALLS, {"method": call.method, "path": call.path, "key": call.key}, ignored))
            for call in calls
            if call.method not in SAFE | REPEATABLE
        )

    expected, found = count(plain), count(seen)
    if (CALLS, "*") in ignored or not (more := found - expected):
        return None
    call = next(iter(more))
    return Difference(f"calls: {_shown(json.loads(call))}", _times(expected[call]), _times(found[call]), REPEATED_HINT)


# ---------------------------------------------------------------- rows


def _visible(heading: str, row: Row, ignored: Masked) -> Row:
    return {name: value for name, value in row.items() if (heading, name) not in ignored}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _count(rows: Iterable[Row]) -> Counter[str]:
    return Counter(_text(row) for row in rows)


def _values(rows: Iterable[Row], column: str) -> Counter[str]:
    return Counter(_text(row.get(column)) for row in rows)


def _nearest(missing: Sequence[str], extra: Sequence[str]) -> tuple[Row, Row]:
    """The row that should be there and the one in its place: the pair that differs least."""
    pairs = [(json.loads(one), json.loads(other)) for one in missing for other in extra]
    return min(pairs, key=lambda pair: sum(pair[0].get(name) != pair[1].get(name) for name in {**pair[0], **pair[1]}))


def _only(row: Row, columns: Sequence[str]) -> Row:
    return {name: row[name] for name in columns if name in row}


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _times(number: int) -> str:
    return "not at all" if number == 0 else "once" if number == 1 else f"{number} times"
