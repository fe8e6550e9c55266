"""All that has happened in one operation, in order, as far as it is recorded.

Of attempts, the record keeps the number and the first and last error, not each one. Rows of the application are those that its
function says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ..text import attempts_made, masked, number_of, one_line
from .business import BusinessRow
from .shown import error_of

# Characters of a title and of a field's name.
LONGEST = 80


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that has happened. `kind`: what it is about, for its colour."""

    at: datetime | None
    kind: str
    what: str
    state: str = ""
    details: str = ""
    letter: int | None = None


def entries(
    shown: Mapping[str, Any],
    saga: Mapping[str, Any] | None = None,
    business: Iterable[BusinessRow] = (),
    *,
    with_values: bool = False,
) -> list[Entry]:
    """The timeline of an operation, of what its saga has recorded, and of the application's rows: those without a time come last."""
    found = [*_record(shown["record"]), *_effects(shown["effects"]), *_deliveries(shown["outbox"])]
    found += [*_letters(shown["dead_letters"]), *_audit(shown["audit"])]
    if saga is not None and saga.get("saga") is not None:
        found += [*_steps(saga["steps"]), *_events(saga["events"])]
    found = [entry for entry in found if entry.at is not None] + [_business(row, with_values) for row in business]
    return sorted(found, key=lambda entry: entry.at or _LAST)


# After all that has happened.
_LAST = datetime.max.replace(tzinfo=UTC)


def _business(row: BusinessRow, with_values: bool) -> Entry:
    fields = {one_line(str(name))[:LONGEST]: value for name, value in row.fields.items()}
    said = {name: one_line(str(value)) if with_values else masked(value) for name, value in fields.items()}
    return Entry(
        row.at,
        "business",
        one_line(str(row.title))[:LONGEST],
        "",
        "; ".join(f"{name} {value}" for name, value in said.items()),
    )


def _record(record: Mapping[str, Any] | None) -> Iterator[Entry]:
    if record is None:
        return
    yield Entry(record["created_at"], "record", "first claimed")
    if record["generation"] > 1:
        yield Entry(
            record["opened_at"], "record", f"generation {record['generation']} opened", "", "replayed by a person"
        )
    fence, holder = f"fence {record['fence']}", record["locked_by"]
    if record["status"] == "started":
        taken = ", taken over" if record["taken_over"] else ""
        is_ending = record["spent_at"] is not None and record["attempts"] >= record["spent_at"]
        yield Entry(
            record["updated_at"],
            "attempt",
            "a claim that is to end it holds it" if is_ending else f"attempt {record['attempts']} holds it",
            "started",
            f"{fence}{taken}, {holder}",
        )
    elif record["status"] == "released":
        details = "; ".join(filter(None, [fence, _said(record["error"])]))
        made = attempts_made(record["attempts"], record["spent_at"])
        yield Entry(record["updated_at"], "attempt", f"let go after {made}", "released", details)
        yield Entry(record["available_at"], "attempt", "next attempt is due", "", "")
    else:
        details = fence if record["status"] == "completed" else f"{fence}; {_said(record['error'])}"
        yield Entry(
            record["completed_at"],
            "record",
            f"ended after {attempts_made(record['attempts'], record['spent_at'])}",
            record["status"],
            details,
        )


def _said(error: Any) -> str:
    return ": ".join(part for part in error_of(error).values() if part)


def _effects(effects: Mapping[str, Any]) -> Iterator[Entry]:
    for name, effect in effects.items():
        if effect.get("begun_at") is not None:
            at, key = datetime.fromtimestamp(effect["begun_at"], UTC), effect.get("key", "")
            state = f"{effect['state']}, said by a person" if effect.get("resolved") else effect["state"]
            yield Entry(at, effect["kind"], f"{effect['kind']} {name} begun", state, f"key {key}" if key else "")


def _deliveries(rows: list[Mapping[str, Any]]) -> Iterator[Entry]:
    for row in rows:
        name = f"message {row['id']}"
        details = f"{row['origin']}, generation {row['generation']}, queue {row['queue'] or '-'}"
        yield Entry(row["created_at"], "delivery", f"{name} accepted", row["status"], details)
        if row["published_at"] is not None:
            resent = f"sent again {number_of(row['resends'], 'time')}" if row["resends"] else ""
            yield Entry(row["published_at"], "delivery", f"{name} published", "", resent)
        if row["refusals"] and row["first_refused_at"] is not None:
            refused = f"refused {number_of(row['refusals'], 'time')} since: {_said(row['last_error'])}"
            yield Entry(row["first_refused_at"], "delivery", f"{name} refused by workers", "", refused)


def _letters(rows: list[Mapping[str, Any]]) -> Iterator[Entry]:
    for row in rows:
        details = f"generation {row['generation']}: {row['reason']}: {_said(row['last_error'])}"
        yield Entry(row["failed_at"], "letter", f"dead letter {row['id']}", row["status"], details, row["id"])
        if row["closed_at"] is not None:
            yield Entry(row["closed_at"], "letter", f"dead letter {row['id']} closed", row["status"], "", row["id"])


def _audit(rows: list[Mapping[str, Any]]) -> Iterator[Entry]:
    for row in rows:
        fences = "" if row["fence_before"] is None else f" (fence {row['fence_before']} to {row['fence_after']})"
        yield Entry(row["at"], "person", f"{row['actor']}: {row['action']}", "", f"{row['reason']}{fences}")


def _steps(rows: list[Mapping[str, Any]]) -> Iterator[Entry]:
    for row in rows:
        called = (
            ""
            if row["call_key"] is None
            else f"{row['call_task']} {row['call_key']}: {row['call_status'] or 'accepted'}"
        )
        details = "; ".join(filter(None, [called, _said(row["error"])]))
        yield Entry(row["begun_at"], "saga", f"{row['kind']} {row['name']}", row["state"], details)


def _events(rows: list[Mapping[str, Any]]) -> Iterator[Entry]:
    for row in rows:
        state = "unused" if row["used_by"] is None else "used"
        yield Entry(
            row["received_at"],
            "event",
            f"event {row['event_type']}",
            state,
            f"match {row['match']}, id {row['event_id']}",
        )
