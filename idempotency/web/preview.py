"""What a replay of a dead letter would do, as far as the store knows: said before anybody replays it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from ..attempt.effects import provider_key
from ..errors import ReplayRefused
from ..store import dead_letters, edits, letter_messages, letter_operations, operations, webhooks
from ..store.archive import said
from ..store.letter_messages import NEVER
from ..streams.declaring import stream_of
from ..text import attempts_made
from ..wire.keys import HTTP_TASK, OperationId
from .desk import Desk
from .shown import error_of


@dataclass(slots=True)
class Preview:
    """`refused`: why it cannot be replayed. `calls`: what becomes of each call outside, and under which key.

    `undos`: of a saga that has stopped, the undos that are replayed with it.
    """

    refused: str | None = None
    runs: str = ""
    last: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    undos: list[str] = field(default_factory=list)


def preview(desk: Desk, connection: Connection, letter: Any, operation: Mapping[str, Any] | None) -> Preview:
    """Look at a letter and its operation."""
    found = Preview()
    if letter.status != "open":
        found.refused = f"it is {letter.status}"
        return found
    if letter.archived_at is not None:
        found.refused = said(letter.archived_at, letter.archived_by)
        return found
    record = None if operation is None else operation["record"]
    found.refused = _unreadable(desk, letter) or _never(letter, record) or _refused(letter, record)
    id = None if operation is None else OperationId(operation["tenant"], operation["task"], operation["key"])
    has_begun = id is not None and record is not None and not edits.is_waiting_for_person(connection, id)
    found.runs, found.last = _runs(desk, letter, record if has_begun else None), _last(letter, record)
    if id is not None and operation is not None:
        found.calls = _calls(operation)
        found.heard = list(_heard(desk, connection, id, record))
    for undo in letter_operations.letters_of_undos(connection, [letter.id]):
        row = dead_letters.show(connection, undo)
        undone = operations.operation(connection, OperationId(row.tenant, row.task, row.key))
        found.undos.append(f"{row.task} (dead letter {undo})")
        found.calls += [call | {"name": f"{row.task}: {call['name']}"} for call in _calls(undone)]
    return found


def _unreadable(desk: Desk, letter: Any) -> str | None:
    """Why its message cannot be sent, as the replay itself would say."""
    try:
        letter_messages.sent_for(desk.celery, letter.id, letter)
    except ReplayRefused as refusal:
        return str(refusal).partition(": ")[2]
    return None


def _never(letter: Any, record: Mapping[str, Any] | None) -> str | None:
    """Why a message of its reason never runs. Of an operation that has ended, the reason may be the code of its own error."""
    own = (record or {}).get("error_code"), (record or {}).get("fingerprint")
    return None if own == (letter.reason, letter.fingerprint) else NEVER.get(letter.reason)


def _refused(letter: Any, record: Mapping[str, Any] | None) -> str | None:
    """Why the operation is not reopened for this letter: the condition of `store/dead_letters.py`."""
    if record is None or record["status"] == "released":
        return None
    if record["status"] == "failed" and record["generation"] == letter.generation:
        return None
    return (
        f"its operation is {record['status']} in generation {record['generation']}; only one that failed in the letter's "
        "generation can be replayed"
    )


def _calls(operation: Mapping[str, Any]) -> list[dict[str, str]]:
    id = OperationId(operation["tenant"], operation["task"], operation["key"])
    if (operation["record"] or {}).get("status") == "completed":
        return []  # whatever they are, its body never runs again
    return [_call(id, name, effect) for name, effect in operation["effects"].items() if effect["kind"] == "effect"]


def _runs(desk: Desk, letter: Any, record: Mapping[str, Any] | None) -> str:
    name = letter.task or letter.header_task
    if name is not None and stream_of(name) is not None:
        return "A process of its stream runs it, beside the order of its partition."
    if name not in desk.celery.tasks:
        return f"The application has no task {name!r} now: it would be refused, or end again."
    if record is None:
        return "Its body has not begun yet; a replay runs it for the first time."
    if record["status"] == "failed":
        return f"Its body runs again, as generation {record['generation'] + 1}, under the same key."
    return f"Its operation is {record['status']}; a replay only delivers its message again."


def _last(letter: Any, record: Mapping[str, Any] | None) -> str:
    error = error_of(letter.last_error if record is None or record["error"] is None else record["error"])
    attempts = letter.attempts if record is None else record["attempts"]
    text = ": ".join(part for part in error.values() if part) or "nothing is recorded"
    return f"after {attempts_made(attempts, spent_at(letter, record))}: {text}" if attempts else text


def spent_at(letter: Any, record: Mapping[str, Any] | None) -> int | None:
    """The claim that has found all attempts used up in the letter's generation, if it is known."""
    return None if record is None or record["generation"] != letter.generation else record["spent_at"]


def _call(id: OperationId, name: str, effect: Mapping[str, Any]) -> dict[str, str]:
    """What a replay makes of a call that is recorded."""
    key, number = effect.get("key", ""), int(effect.get("number", 0))
    match effect["state"]:
        case "done":
            what = "has happened: its result is used, nothing is called"
        case "begun":
            what = "in doubt: the provider is asked if the call has `reconcile`; else it is called again under this key"
        case state:
            if effect.get("sent", True):
                key = provider_key(id, name, number + 1)
            what = f"{state.replace('_', ' ')}: it is called, under this next key"
    return {"name": name, "state": effect["state"], "key": key, "what": what}


def _heard(desk: Desk, connection: Connection, id: OperationId, record: Mapping[str, Any] | None) -> Any:
    """What the customer has been told, where the store has it."""
    if id.task == HTTP_TASK and record is not None and record["response_code"] is not None:
        yield f"the HTTP answer {record['response_code']}"
    delivery = webhooks.delivery(connection, desk.service, id.key.partition(":")[0])
    if delivery is not None and (delivery.tenant, delivery.task) == (id.tenant, id.task):
        yield f"the webhook {delivery.event_type}: {delivery.status}"
