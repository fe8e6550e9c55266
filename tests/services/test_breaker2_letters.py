"""A second breaker: letters that the relay could not handle, and what a person can do with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency import OperationId, dead_letter_queue, operators
from idempotency.dead_letter_queue import ON_FAILED_TRIES, DeadLetterConsumer
from idempotency.dead_letters import ReplayRefused
from idempotency.message import KEY_HEADER
from idempotency.operators import Change
from idempotency.reconcile import reconcile
from tests import bank as b
from tests import operations as op
from tests.dead_messages import die, headers
from tests.services.test_stuck_letters import body

ANN = Change("ann", "ticket 42")


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection


def test_the_letter_of_what_the_relay_could_not_handle_cannot_be_replayed(
    bank: Celery, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the last delivery of a released operation out of reconcile's sight, and a replay of it is refused."""
    monkeypatch.setattr(dead_letter_queue, "HELD_PAUSE", 0.0)
    id = OperationId("default", b.deposit.name, "stuck")
    op.due(connection, id)
    marks = op.sent(connection, id)
    connection.execute(
        text("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON idempotency.dead_letters FOR EACH ROW
        WHEN (NEW.reason <> 'unhandled') EXECUTE FUNCTION refuse()""")
    )
    consumer = DeadLetterConsumer(bank)
    die(
        bank,
        consumer,
        body("stuck"),
        headers=headers(expires="2001-01-01T00:00:00+00:00", **{KEY_HEADER: "stuck"}) | marks,
    )
    for _ in range(ON_FAILED_TRIES + 2):
        consumer.run_once()
    consumer.close()
    connection.execute(text("DROP FUNCTION refuse() CASCADE"))
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.operation, letter.key) == ("unhandled", id.operation, "stuck")
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '2 days'"))
    assert reconcile(bank).resent + reconcile(bank).resent == 0
    with pytest.raises(ReplayRefused, match="is released, not failed"):
        operators.replay(bank, letter.id, ANN)
    assert op.record(connection, id).status == "released"  # type: ignore[union-attr]
