"""A row that several callers submit is inserted once; the others find it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import literal, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from idempotency import OperationId
from idempotency.application import settings_of
from idempotency.store import operations

from . import app
from .models import Base
from .validation import Taken


def insert_once(
    session: Session,
    model: type[Base],
    key: Mapping[str, str],
    values: Mapping[str, Any],
    *,
    taken: str,
    generated: Mapping[str, Any] | None = None,
) -> bool:
    """Insert a row in the caller's transaction, unless its primary key has one. Returns whether it was inserted.

    Waits for the commit of another caller that is inserting it. `generated`: columns in which a repeat may differ. Raises
    `Taken` with the text `taken` if the row that is there has other `values`.
    """
    if insert_unless_there(session, model, {**key, **values, **(generated or {})}):
        return True
    before = session.get_one(model, dict(key))
    if any(getattr(before, name) != value for name, value in values.items()):
        raise Taken(taken)
    return False


def insert_unless_there(session: Session, model: type[Base], values: Mapping[str, Any]) -> bool:
    """Insert a row, unless one of its unique columns is taken, whatever by. Returns whether it was inserted."""
    row = insert(Base.metadata.tables[model.__tablename__]).values(**values)
    return session.execute(row.on_conflict_do_nothing().returning(literal(1))).one_or_none() is not None


def check_not_carried_out(session: Session, id: OperationId, taken: str) -> None:
    """Raise `Taken` with the text `taken` if the operation of a row that is only now being inserted has a record.

    Its task was called before there was a row, by its name alone. What has failed then would not be done again for the row.
    """
    if operations.lookup(session.connection(), id, settings_of(app).service) is not None:
        raise Taken(taken)


def wait_at_most(session: Session, seconds: float) -> None:
    """Let the statements that follow in this transaction wait for a lock for so long, unless less was set before."""
    session.execute(
        text(
            "SELECT set_config('lock_timeout', least(nullif(milliseconds, 0), :limit)::text, true) "
            "FROM (SELECT extract(epoch FROM current_setting('lock_timeout')::interval) * 1000 AS milliseconds) set"
        ),
        {"limit": int(seconds * 1000)},
    )
