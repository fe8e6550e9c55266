"""Recording effects and steps in the record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection

from .answers import Claimed
from .record import FINISH, MINE, idle_ms, mine
from .statements import execute

Parameters = Mapping[str, Any]

_BEGIN_EFFECT = f"""
UPDATE idempotency.records
SET effects = effects || pg_catalog.jsonb_build_object(%(name)s::text, %(effect)s::jsonb
        || pg_catalog.jsonb_build_object('begun_at', extract(epoch FROM clock_timestamp())::float8)),
    updated_at = clock_timestamp()
WHERE {MINE} AND (NOT effects ? %(name)s OR effects -> %(name)s ->> 'state' IN ('not_happened', 'compensated'))
RETURNING effects -> %(name)s ->> 'begun_at'
"""

_CHANGED = "effects = jsonb_set(effects, ARRAY[%(name)s], (effects -> %(name)s) || %(change)s::jsonb)"
_IS_BEGUN = f"{MINE} AND effects -> %(name)s ->> 'state' = 'begun'"

_CHANGE_EFFECT = f"""
UPDATE idempotency.records SET {_CHANGED}, updated_at = clock_timestamp() WHERE {_IS_BEGUN} RETURNING 1
"""

_CHANGE_EFFECT_WITH = FINISH.format(changes=_CHANGED, condition=_IS_BEGUN)

_RECORD_STEP = FINISH.format(
    changes="""effects = effects || pg_catalog.jsonb_build_object(%(name)s::text, %(effect)s::jsonb
        || pg_catalog.jsonb_build_object('begun_at', extract(epoch FROM clock_timestamp())::float8))""",
    condition=f"{MINE} AND NOT effects ? %(name)s",
)


def begin_effect(connection: Connection, claim: Claimed, name: str, effect: Parameters) -> float | None:
    """Record that an effect is about to be called. Returns the database's time in seconds; None: not the holder."""
    row = execute(connection, _BEGIN_EFFECT, mine(claim) | {"name": name, "effect": json.dumps(effect)}).fetchone()
    return None if row is None else float(row[0])


def change_effect(connection: Connection, claim: Claimed, name: str, change: Parameters) -> bool:
    """Record the outcome of an effect that was begun. False: not the holder, or the effect is no longer open."""
    row = execute(connection, _CHANGE_EFFECT, mine(claim) | {"name": name, "change": json.dumps(change)}).fetchone()
    return row is not None


def change_effect_with(connection: Connection, claim: Claimed, name: str, change: Parameters, *, lease: float) -> None:
    """`change_effect` in the transaction of what the effect's function wrote. Raises `DivisionByZero` if not the holder."""
    parameters = {"name": name, "change": json.dumps(change), "idle_ms": idle_ms(lease)}
    execute(connection, _CHANGE_EFFECT_WITH, mine(claim) | parameters)


def record_step(connection: Connection, claim: Claimed, name: str, effect: Parameters, *, lease: float) -> None:
    """Record a step's result, in the step's transaction. Raises `DivisionByZero` if not the holder."""
    parameters = {"name": name, "effect": json.dumps(effect), "idle_ms": idle_ms(lease)}
    execute(connection, _RECORD_STEP, mine(claim) | parameters)
