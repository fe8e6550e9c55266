"""Code of schema 0011 beside newer code, on the tables of 0012: its statements run, and their rows are handled."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from alembic import command
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency.application import runtime_of
from idempotency.relay.relay import Relay
from idempotency.store import schema
from idempotency.upkeep import maintenance
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from tests.support import bank as b
from tests.support import code_of_0011 as old
from tests.support import operations as op
from tests.support.bank import enqueue_deposit
from tests.support.queues import drained, keys

ID = op.operation(b.deposit, "a1")
NAMED = {"tenant": ID.tenant, "task": ID.task, "key": ID.key}
FINGERPRINT = b.fingerprint_of("a1")
RESERVE = {"batch": 200, "seconds": 30.0}


def row_fields(message: str, lane: str | None = None) -> dict[str, Any]:
    return NAMED | {
        "message_id": str(uuid4()),
        "fingerprint": FINGERPRINT,
        "message": message,
        "queue": b.app.conf.task_default_queue,
        "ordering_key": lane,
        "origin": "enqueue",
        "eta": None,
        "countdown": 0.0,
        "settled": False,
        "generation": 1,
    }


def claim_fields() -> dict[str, Any]:
    return NAMED | {
        "token": "old",
        "fingerprint": FINGERPRINT,
        "fingerprints": [FINGERPRINT],
        "message": message_text(),
        "queue": b.app.conf.task_default_queue,
        "holder": op.HOLDER,
        "lease": 60.0,
        "synchronous": True,
    }


def message_text() -> str:
    message = Message.composed(b.app, ID.task, ("a1",), {}, task_id=str(uuid4()), headers={"idempotency-key": "a1"})
    return message.to_text()


def relay_once(app: Celery) -> int:
    relay = Relay(app)
    try:
        return relay.run_once().published
    finally:
        relay.close()


# ---------------------------------------------------------------- its statements, and what they write


@pytest.mark.parametrize("lane", [None, "lane"], ids=["without order", "ordered"])
def test_a_row_of_older_code_is_published_by_a_newer_relay(
    bank: Celery, connection: Connection, lane: str | None
) -> None:
    connection.exec_driver_sql(old.INSERT, row_fields(message_text(), lane))
    assert relay_once(bank) == 1
    assert keys(drained(bank)) == ["a1"]
    assert [(row.status, row.service) for row in op.outbox(connection)] == [("published", "bank")]


@pytest.mark.parametrize(
    ("lane", "reserve"), [(None, old.RESERVE_ROWS), ("lane", old.RESERVE_LANES)], ids=["without order", "ordered"]
)
def test_a_row_of_newer_code_is_published_by_an_older_relay(
    bank: Celery, connection: Connection, lane: str | None, reserve: str
) -> None:
    enqueue_deposit(ordering_key=lane)
    (row,) = connection.exec_driver_sql(reserve, RESERVE).all()
    sent = {"ids": [row.message_id], "generations": [1], "refusals": [0], "resends": [0], "attempts": [0]}
    connection.exec_driver_sql(old.MARK_PUBLISHED, sent)
    if lane is not None:
        connection.exec_driver_sql(f"SELECT idempotency.refresh_lane('{ID.task}', 'lane')")
        assert connection.exec_driver_sql("SELECT count(*) FROM idempotency.lanes").scalar_one() == 0
    assert [(each.status, each.service) for each in op.outbox(connection)] == [("published", "bank")]


@pytest.mark.plain  # older code is turned away from partitions
def test_an_operation_passes_from_older_code_to_newer_and_back(
    bank: Celery, connection: Connection, record: op.Record
) -> None:
    first = connection.exec_driver_sql(old.CLAIM, claim_fields()).one()
    assert (first.answer, record("a1").service) == ("claimed", None)
    release = {"delay": 0.0, "error": None, "given_back": 0, "deliver": True, "after_due": 0.0}
    connection.exec_driver_sql(old.RELEASE, NAMED | {"fence": first.fence, "token": "old"} | release)
    assert [row.service for row in op.outbox(connection)] == [None]
    newer = op.started(connection, ID, fingerprint=FINGERPRINT, message=message_text())
    assert (newer.attempts, record("a1").service) == (2, "bank")
    op.age(connection, ID, locked_until=-1)
    assert connection.exec_driver_sql(old.CLAIM, claim_fields()).one().answer == "claimed"
    complete = {"result": "1", "retention": 60.0, "idle_ms": "1000", "fence": record("a1").fence, "token": "old"}
    with runtime_of(bank).engine.begin() as transaction:
        transaction.exec_driver_sql(old.COMPLETE, NAMED | complete)
    assert (record("a1").status, record("a1").service) == ("completed", "bank")


def test_what_older_code_recovers_is_delivered_by_newer_code(
    bank: Celery, connection: Connection, record: op.Record
) -> None:
    op.expired(connection, ID, fingerprint=FINGERPRINT, message=message_text())
    bounds = {"dead": [], "known": [], "tasks": [], "attempts": [], "otherwise": 5, "spare": 10, "batch": 500}
    assert connection.exec_driver_sql(old.RECOVER, bounds).one()[0] == 1
    assert (record("a1").status, record("a1").service) == ("released", "bank")
    assert relay_once(bank) == 1


def test_either_purges_what_the_other_has_ended(bank: Celery, connection: Connection, record: op.Record) -> None:
    past = text("UPDATE idempotency.records SET expires_at = clock_timestamp() - interval '1 s'")
    op.completed(connection, ID)
    connection.execute(past)
    assert connection.exec_driver_sql(old.PURGE, {"keep": 60.0, "horizon": 60.0, "batch": 500}).one()[0] == 1
    op.completed(connection, ID)
    connection.execute(past)
    connection.execute(text("UPDATE idempotency.records SET service = NULL"))
    assert maintenance.purge(bank) == 1


# ---------------------------------------------------------------- the migration


def migrate_back(engine: Engine) -> None:
    config = schema._config()
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0011")


def test_code_of_0011_may_run_on_the_tables_of_0012(empty: Engine) -> None:
    schema.migrate(empty)
    with empty.connect() as connection:
        assert schema._compatible_from(connection) == "0011"


@pytest.mark.long
def test_rows_of_before_survive_the_migration_and_the_way_back(bank: Celery, empty: Engine) -> None:
    schema.migrate(empty, "0011")

    def works() -> list[str]:
        """Older code enqueues, relays and claims."""
        with empty.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for lane in (None, "lane"):
                connection.exec_driver_sql(old.INSERT, row_fields(message_text(), lane))
            for reserve in (old.RESERVE_ROWS, old.RESERVE_LANES):
                assert connection.exec_driver_sql(reserve, RESERVE).all()
            connection.exec_driver_sql(f"SELECT idempotency.refresh_lane('{ID.task}', 'lane')")
            connection.exec_driver_sql("UPDATE idempotency.outbox SET relayed_until = NULL")
            connection.exec_driver_sql(old.CLAIM, claim_fields())
            return [row.message_id for row in op.outbox(connection)]

    before = works()
    schema.migrate(empty)
    during = works()
    assert during[: len(before)] == before
    with empty.begin() as connection:
        for service in ("one", "two"):  # two refusals of one request, which 0011 could not tell apart
            connection.exec_driver_sql(
                "INSERT INTO idempotency.dead_letters (source, tenant, task, key, generation, reason, fingerprint, "
                f"payload, consumer_service) VALUES ('operation', 't', 'o', 'k', 1, 'r', 'f', '', '{service}')"
            )
    migrate_back(empty)
    assert works()[: len(during)] == during
    schema.migrate(empty)
    with empty.connect() as connection:
        assert op.record(connection, OperationId(*NAMED.values())).service is None
