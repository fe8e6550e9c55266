"""What stops or delays everybody: each test passes while the bug is there."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from idempotency import OperationId
from idempotency.message import Message
from idempotency.relay import BATCH, Relay
from tests import bank as b
from tests import operations as op

COPY = """
INSERT INTO idempotency.outbox (event_id, tenant, operation, key, fingerprint, message, queue, origin, available_at, attempts)
SELECT 'gone-' || n, tenant, operation, 'gone-' || n, fingerprint, cast(:message AS text), 'gone', 'enqueue',
       clock_timestamp() - interval '1 minute', 6
FROM idempotency.outbox, generate_series(1, cast(:rows AS int)) n
"""


@pytest.fixture
def connection(engine: Engine) -> Any:
    with engine.connect() as connection:
        yield connection


def test_rows_of_a_queue_that_is_gone_come_before_everybody_elses(
    bank: Celery, engine: Engine, connection: Connection
) -> None:
    """A queue is gone (a deploy), 2,000 rows for it are tried again every 60 s each. When they are due they are older than any
    new row, so the relay refuses them first, one UPDATE and one log line each: ten passes publish nothing. With more of them
    than a relay can refuse in 60 s, they are always due first, and a healthy row waits for them all, in each round. Breaks:
    what cannot be published costs the others nothing.
    """
    with Session(engine) as session, session.begin():
        b.deposit.enqueue(session, "template")
    (row,) = op.outbox(connection)
    message = json.dumps(json.loads(row.message) | {"route": {"queue": "gone"}})
    connection.execute(text(COPY), {"message": message, "rows": 10 * BATCH})
    connection.execute(text("DELETE FROM idempotency.outbox WHERE key = 'template'"))
    with Session(engine) as session, session.begin():
        b.deposit.enqueue(session, "healthy")
    relay = Relay(bank)
    began = time.monotonic()
    for _ in range(10):
        relayed = relay.run_once()
        assert (relayed.published, relayed.failed) == (0, BATCH)
    rate = 10 * BATCH / (time.monotonic() - began)
    assert op.outbox(connection, OperationId("default", b.deposit.name, "healthy"))[0].status == "pending"
    print(f"RESULT refused_per_second={rate:.0f} starved_from_rows={60 * rate:.0f}")  # noqa: T201
    assert relay.run_once().published == 1
    relay.close()
    assert Message.from_text(message).route == {"queue": "gone"}
