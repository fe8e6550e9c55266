"""Release: take an operation from its holder and deliver it again."""

from __future__ import annotations

from celery import Celery

from ..application import runtime_of
from ..store import ends
from ..store.answers import claim_of
from ..store.statements import repeatable
from .change import Change, Shown, audit, locked, repeated
from .money import check_verified


@repeatable
def release(app: Celery, shown: Shown, change: Change) -> None:
    """Take an operation from its holder and deliver it again now. Raises `ChangeRefused`.

    For a holder that is alive but does not finish: its lease is lost and its writes match nothing. The next attempt
    finds the calls that it has begun outside. The attempt counts as used.
    """
    with runtime_of(app).engine.begin() as connection:
        if repeated(connection, change, "release", shown.id) is not None:
            return
        check_verified(app, connection, shown.id, change)
        row = locked(connection, shown, "release", "started")
        released = ends.release(connection, claim_of(shown.id, row), delay=0.0, error=None)
        assert released  # the row is locked, and it is the one that was shown
        audit(connection, change, "release", shown.id, row, details={"holder": row.locked_by})
