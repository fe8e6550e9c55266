"""Requests that did not end and are not sent again do not stay for ever."""

from __future__ import annotations

import json

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency.application import settings_of
from idempotency.store import overview
from idempotency.upkeep.maintenance import purge
from idempotency.wire.keys import OperationId
from tests.support import operations as op
from tests.support.edge import new_key

DAY = 24 * 3600.0


@pytest.fixture
def connection(engine: Engine) -> Connection:
    return engine.connect()


def request_of(
    connection: Connection, *, state: object, task: str = "http", message: str = "", effect: str = ""
) -> OperationId:
    """A record that was written more than a day ago."""
    id = OperationId("default", task, new_key())
    state(connection, id, message=message)  # type: ignore[operator]
    entry = {"charge": {"kind": "effect", "state": effect}} if effect else {}
    connection.execute(
        text("UPDATE idempotency.records SET effects = CAST(:effects AS jsonb) WHERE key = :key"),
        {"effects": json.dumps(entry), "key": id.key},
    )
    op.age(connection, id, updated_at=-DAY - 60)
    return id


def test_a_request_that_no_client_repeats_is_deleted_unless_it_is_being_carried_out(
    bank: Celery, connection: Connection
) -> None:
    gone = [
        request_of(connection, state=op.due),
        request_of(connection, state=op.early),
        request_of(connection, state=op.expired),
        request_of(connection, state=op.due, effect="not_happened"),
    ]
    kept = [
        request_of(connection, state=op.started),
        request_of(connection, state=op.due, task="http.pay"),
        request_of(connection, state=op.due, message=op.MESSAGE),
    ]
    young = request_of(connection, state=op.due)
    op.age(connection, young, updated_at=-DAY + 60)
    assert purge(bank) == len(gone)
    assert [op.record(connection, id) for id in gone] == [None] * len(gone)
    assert None not in [op.record(connection, id) for id in [*kept, young]]
    connection.close()


def test_a_request_that_is_not_asked_for_again_is_no_overdue_operation(bank: Celery, connection: Connection) -> None:
    request_of(connection, state=op.due)
    assert overview.take_snapshot(connection, settings_of(bank)).queues == {}
    request_of(connection, state=op.due, task="pay", message=op.MESSAGE)
    assert overview.take_snapshot(connection, settings_of(bank)).queues[""].released == 1
    connection.close()
