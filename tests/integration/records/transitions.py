"""What a holder does to its record; each returns whether it was allowed."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection
from sqlalchemy.exc import DataError

from idempotency.store import claims, effects, ends
from idempotency.store.answers import Claimed, Renewal
from idempotency.store.ends import FailedEnd
from tests.support.operations import ERROR, LEASE, RETENTION


def finished(finish: Callable[[], None]) -> bool:
    """Whether a finishing statement matched; otherwise the statement itself raises division by zero."""
    try:
        finish()
    except DataError as error:
        if getattr(error.orig, "sqlstate", None) != "22012":
            raise
        return False
    return True


def step(connection: Connection, held: Claimed) -> bool:
    return finished(lambda: effects.record_step(connection, held, "reserve", {"state": "done"}, lease=LEASE))


def complete(connection: Connection, held: Claimed) -> bool:
    return finished(lambda: ends.complete(connection, held, "1", retention=RETENTION, lease=LEASE))


def fail(connection: Connection, held: Claimed) -> bool:
    # over the open effect of `with_a_begun_effect`, and where there is none
    end = FailedEnd("effect_unknown", ERROR)
    return finished(lambda: ends.fail(connection, held, end, retention=RETENTION, lease=LEASE))


def release(connection: Connection, held: Claimed) -> bool:
    return ends.release(connection, held, delay=1.0, error=ERROR)


def renew(connection: Connection, held: Claimed) -> bool:
    return claims.renew(connection, [held], LEASE)[held.token] is Renewal.HELD


def begin_effect(connection: Connection, held: Claimed) -> bool:
    return effects.begin_effect(connection, held, "notify", {"state": "begun"}) is not None


def change_effect(connection: Connection, held: Claimed) -> bool:
    return effects.change_effect(connection, held, "charge", {"state": "done"})
