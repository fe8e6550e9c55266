"""Proofs of a reader: each passes while the defect exists."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text

from idempotency.operate.erase import erase
from idempotency.upkeep import maintenance
from tests.integration.test_erasure import ASKED, CANARY, carry_out, greet
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.dump import holding

__all__ = ["greet"]

# An application's own trigger: it keeps a number of each message that goes. That of one customer is no number.
ARCHIVE = """
CREATE FUNCTION archive() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM (((OLD.message::json ->> 'body')::json -> 0) ->> 1)::int;
    RETURN OLD;
END $$;
CREATE TRIGGER archive BEFORE DELETE ON idempotency.outbox FOR EACH ROW EXECUTE FUNCTION archive();
"""


def test_what_a_row_was_set_aside_for_quotes_data_and_is_left_by_an_erasure(
    bank: Celery, deliveries: Deliveries, connection: Connection, greet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The sweep stores and logs Postgres' message with the value that it quotes, which `describe` cuts out everywhere else; and the
    erasure finds it only under the id of a record, not under that of an outbox row or a letter."""
    carry_out(connection, deliveries, greet, "p1")
    connection.execute(
        text("UPDATE idempotency.outbox SET status = 'published', published_at = now() - interval '99 d', settled_at = now() - interval '99 d'")
    )
    connection.exec_driver_sql(ARCHIVE)
    try:
        maintenance.purge_once(bank, limit=1000)
    finally:
        connection.exec_driver_sql("DROP TRIGGER archive ON idempotency.outbox; DROP FUNCTION archive()")
    rows = connection.execute(text("SELECT sweep, error FROM idempotency.set_aside")).all()
    assert f'type integer: "{CANARY}"' in rows[0].error
    assert CANARY in caplog.text
    assert "set_aside" in holding(connection.engine, CANARY)
    erase(bank, op.operation(greet, "p1"), ASKED)
    assert holding(connection.engine, CANARY) == {"set_aside"}
