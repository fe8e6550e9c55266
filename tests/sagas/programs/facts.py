"""What is there once a program has ended: read from the tables, the application's and the library's, as they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from tests.sagas.programs.application import Script

_SAGAS = """
SELECT g.entity_id AS thing, g.status, g.error, g.stopped, i.context, r.status AS record, r.error_code, r.result,
       g.id, g.generation
FROM idempotency.sagas g
LEFT JOIN idempotency.saga_instances i ON i.saga_id = g.id
LEFT JOIN idempotency.records r ON (r.tenant, r.task, r.key) = (g.tenant, g.task, g.key)
"""
_STEPS = """
SELECT saga_id, position, kind, name, state, coalesce(result, entry ->> 'result') AS result, undoes
FROM idempotency.saga_steps ORDER BY saga_id, generation, position
"""
_OPEN = (
    "SELECT task, key, status FROM idempotency.records WHERE status NOT IN ('completed', 'failed') ORDER BY task, key"
)
_PENDING = "SELECT task, key, origin FROM idempotency.outbox WHERE status = 'pending' ORDER BY id"
_LETTERS = "SELECT task, reason, status FROM idempotency.dead_letters ORDER BY id"


@dataclass(slots=True)
class Row:
    """What a saga has recorded."""

    position: int
    kind: str
    name: str
    state: str
    result: Any = None
    undoes: int | None = None


@dataclass(slots=True)
class Ended:
    """A saga and its record."""

    thing: str
    status: str
    error: str | None  # its code
    record: str | None
    record_error: str | None
    result: Any
    context: dict[str, Any]
    rows: list[Row]

    @property
    def forward(self) -> list[Row]:
        return [row for row in self.rows if row.kind != "undo"]

    @property
    def undos(self) -> list[Row]:
        return [row for row in self.rows if row.kind == "undo"]

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)


@dataclass(slots=True)
class Facts:
    sagas: dict[str, Ended]
    entries: list[str]
    acts: list[tuple[str, str]]  # of the provider: thing and key
    letters: list[tuple[str, str, str]]  # task, reason, status
    open: list[Any]  # records that have not ended
    pending: list[Any]  # deliveries that have not left
    # of the runner: sagas that a person's cancel has met, with what they had recorded by then
    cancelled: dict[str, list[str]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)  # what was wrong while it ran


def read(admin: psycopg.Connection[Any], script: Script) -> Facts:
    steps: dict[Any, list[Row]] = {}
    for row in admin.execute(_STEPS):
        steps.setdefault(row.saga_id, []).append(
            Row(row.position, row.kind, row.name, row.state, _from_json(row.result), row.undoes)
        )
    sagas = {
        row.thing: Ended(
            row.thing,
            row.status,
            None if row.error is None else json.loads(row.error)["code"],
            row.record,
            row.error_code,
            _from_json(row.result),
            row.context,
            steps.get(row.id, []),
        )
        for row in admin.execute(_SAGAS)
    }
    entries = [row.account for row in admin.execute("SELECT account FROM entries ORDER BY id")]
    letters = [(row.task, row.reason, row.status) for row in admin.execute(_LETTERS)]
    return Facts(sagas, entries, list(script.provider.acts), letters, _all(admin, _OPEN), _all(admin, _PENDING))


def names_of(rows: Sequence[Row]) -> list[str]:
    """Rows for a comparison: what they are, and where they stand."""
    return [f"{row.position} {row.kind} {row.name}" for row in rows]


def _all(admin: psycopg.Connection[Any], query: str) -> list[Any]:
    return [tuple(row) for row in admin.execute(query)]


def _from_json(stored: str | None) -> Any:
    return None if stored is None else json.loads(stored)
