"""A saga's timeline, as rows for a table and as a Mermaid sequence diagram."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..text import attempts_made
from .terminal import plain

# How a row of each kind is called; the others by their kind and name.
_CALLED = {"wait": "wait for", "timer": "sleep", "undo": "", "seen": "seen:"}
# Recorded when it is done, so its duration is unknown.
_AT_ONCE = ("step", "value", "version", "seen")
# What may stand in a label as it is. Everything else is written as an entity, because Mermaid has a meaning for some of it.
_PLAIN = frozenset(" _-./=,()'!?")


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that has happened."""

    at: datetime
    what: str
    state: str = ""
    took: str = ""
    details: str = ""
    result: Any = None


def entries(shown: dict[str, Any]) -> list[Entry]:
    """All that has happened in a saga, in order."""
    return sorted(_entries(shown), key=lambda entry: entry.at)


def summary(shown: dict[str, Any]) -> Iterator[str]:
    """What a saga is and how it stands, in a few words each."""
    saga, record = shown["saga"], shown["record"]
    yield f"entity {saga['entity_id']}"
    yield str(saga["status"])
    if saga["generation"] > 1:
        yield f"generation {saga['generation']}"
    if saga["error"] is not None:
        yield f"undone because of {_error(saga['error'])}"
    if saga["stopped"] is not None:
        yield f"stopped: {saga['stopped']}"
    open_now = [row for row in shown["steps"] if row["state"] == "begun" and row["generation"] == saga["generation"]]
    if open_now:
        yield f"waits for {'; '.join(map(waited_for, open_now))}"
    for below in shown["called"]["stopped"]:
        yield f"{below['task']} {below['key']} has stopped: {below['stopped']}"
    if record is None:
        yield "not an operation"
    elif record["attempts"] and record["status"] in ("started", "released"):
        yield attempts_made(record["attempts"], record["spent_at"])


def waited_for(row: dict[str, Any]) -> str:
    """What is waited for by a row that has begun: `picked r1 until 2026-01-05 10:00:00`, `make`, `undo make`."""
    until = row["due_at"] and f"until {plain(row['due_at'])[:19].replace('T', ' ')}"
    match row["kind"]:
        case "wait":
            return f"{row['name']} {row['match']} {until}"
        case "timer":
            return str(until)
        case "effect":
            return f"effect {row['name']}"
    return str(row["name"])


def _entries(shown: dict[str, Any]) -> Iterator[Entry]:
    saga, record = shown["saga"], shown["record"]
    yield Entry(saga["created_at"], "begun")
    generations = {row["generation"] for row in shown["steps"]}
    for row in shown["steps"]:
        again = f"generation {row['generation']}" if len(generations) > 1 else ""
        details = "; ".join(filter(None, [*_details(row), again]))
        took = "" if row["ended_at"] is None or row["kind"] in _AT_ONCE else _took(row["ended_at"] - row["begun_at"])
        yield Entry(row["begun_at"], _what(row), row["state"], took, details, row.get("result"))
    for event in shown["events"]:
        yield _received(event)
    for letter in [*shown["dead_letters"], *shown["called"]["dead_letters"]]:
        details = f"{letter['task']} {letter['key']}: {_error(letter['last_error'])}"
        yield Entry(letter["failed_at"], f"dead letter {letter['id']}", letter["status"], "", details)
    for row in [*shown["audit"], *shown["called"]["audit"]]:
        of = f"{row['task']} {row['key']}: " if "task" in row else ""
        yield Entry(row["at"], f"{row['actor']}: {row['action']}", "", "", f"{of}{row['reason']}")
    if record is not None and record["completed_at"] is not None:
        details = "" if record["status"] == "completed" else _error(record["error"])
        yield Entry(record["completed_at"], "ended", str(record["status"]), "", details)


def _received(event: dict[str, Any]) -> Entry:
    if event["used_by"] is not None:
        state = "used" if event["used_by"] == event["event_type"] else f"used by {event['used_by']}"
    else:
        when = "early, " if event["is_early"] else "late, " if event["is_late"] else ""
        state = f"{when}unused"
    who = "" if event["person"] is None else f"signalled by {event['person']}"
    repeats = f"came {event['repeats'] + 1} times" if event["repeats"] else ""
    details = "; ".join(filter(None, [f"match {event['match']}", f"id {event['event_id']}", who, repeats]))
    return Entry(event["received_at"], f"event {event['event_type']}", state, "", details, event.get("data"))


def _what(row: dict[str, Any]) -> str:
    if row["kind"] == "timer":
        return str(row["name"])
    return f"{_CALLED.get(row['kind'], row['kind'])} {row['name']}".strip()


def _details(row: dict[str, Any]) -> Iterator[str]:
    if row["kind"] == "wait":
        yield f"match {row['match']}"
    if row["due_at"] is not None:
        yield f"until {plain(row['due_at'])}"
    if row["event_id"] is not None:
        yield f"event {row['event_id']}"
    if row["idempotency_key"] is not None:
        yield f"key {row['idempotency_key']}"
    if _by_hand(row):
        yield "by hand"
    elif row["call_key"] is not None:
        made = row["call_attempts"]
        attempts = "" if made is None else f", {attempts_made(made, row['call_spent_at'])}"
        yield f"{row['call_task']} {row['call_key']}: {row['call_status'] or 'accepted'}{attempts}"
    if row["error"] is not None:
        yield _error(row["error"])


def _by_hand(row: dict[str, Any]) -> bool:
    """Whether a person has said that this is undone: its own operation has not done it."""
    return row["kind"] == "undo" and row["state"] == "done" and row["call_status"] in (None, "failed")


def _error(error: Any) -> str:
    return f"{error['code']}: {error['message']}" if isinstance(error, dict) else str(error or "")


def _took(duration: Any) -> str:
    seconds = duration.total_seconds()
    return f"{seconds:.3f} s" if seconds < 60 else str(duration).partition(".")[0]


# ---------------------------------------------------------------- Mermaid


def mermaid(shown: dict[str, Any]) -> str:
    """A sequence diagram of a saga: itself, the tasks that it has called, the events, and people."""
    saga = shown["saga"]
    lines = ["sequenceDiagram", f"    participant S as {_label(shown['task'], shown['key'])}"]
    if saga is None:
        return "\n".join([*lines, "    Note over S: accepted"])
    tasks = dict.fromkeys(row["call_task"] for row in shown["steps"] if row["call_task"] is not None)
    names = {task: f"T{number}" for number, task in enumerate(tasks, 1)}
    lines += [f"    participant {name} as {_label(task)}" for task, name in names.items()]
    if shown["events"]:
        lines.append("    participant E as events")
    drawn = [line for row in shown["steps"] for line in _drawn(row, names)]
    for event in shown["events"]:
        drawn.append((event["received_at"], f"    E-->>S: {_label(event['event_type'], _received(event).state)}"))
    drawn += [(row["at"], f"    Note over S: {_label(row['actor'], row['action'])}") for row in shown["audit"]]
    lines += [line for _, line in sorted(drawn, key=lambda each: each[0])]
    return "\n".join([*lines, f"    Note over S: {_label(', '.join(summary(shown)))}"])


def _drawn(row: dict[str, Any], names: dict[str, str]) -> Iterator[tuple[datetime, str]]:
    what, state = _what(row), row["state"]
    if row["call_task"] is None:
        how = "Note over S" if row["kind"] in ("wait", "timer") else "S->>S"
        yield row["begun_at"], f"    {how}: {_label(what, state)}"
        return
    task = names[row["call_task"]]
    yield row["begun_at"], f"    S->>{task}: {_label(what)}"
    if row["ended_at"] is not None:
        arrow = "-->>" if state == "done" else "--x"
        said = "by hand" if _by_hand(row) else state
        yield row["ended_at"], f"    {task}{arrow}S: {_label(said)}"


def _label(*words: str) -> str:
    """Text as Mermaid shows it, whatever it contains."""
    text = plain(" ".join(words))
    return "".join(each if each.isalnum() or each in _PLAIN else f"#{ord(each)};" for each in text)
