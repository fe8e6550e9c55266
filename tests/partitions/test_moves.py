"""Who changes a record that moves to another partition at this moment looks again, and does not take it for none."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from idempotency.application import runtime_of
from idempotency.operate.rename import rename_service
from idempotency.store import claims, partitions, waking
from idempotency.store.answers import Claimed
from idempotency.store.statements import MOVED, TRIES, repeatable
from idempotency.worker.deliveries import delivery_of
from idempotency.worker.revocation import revoke_terminated
from tests.support import operations as op
from tests.support.deliveries import request_of
from tests.support.operations import completed, due, early, record
from tests.support.operators import ANN
from tests.support.partitions import into_the_past, while_it_moves
from tests.support.tasks import make_task, transactional


def test_an_application_s_wake_waits_and_finds_it(engine: Engine, connection: Connection) -> None:
    id = early(connection).id  # for ten minutes

    def wake() -> None:
        with transactional(engine).begin() as own:
            waking.wake(own, id, op.SERVICE)

    while_it_moves(engine, connection, id, wake)
    assert op.seconds_from_now(connection, id, "available_at") <= 0


def test_an_application_s_wake_at_repeatable_read_is_refused_and_has_to_be_made_again(
    engine: Engine, connection: Connection
) -> None:
    """As the page says: its snapshot is of before the move."""
    id = early(connection).id
    into_the_past(connection)
    with create_engine(engine.url, isolation_level="REPEATABLE READ", poolclass=NullPool).connect() as own:
        own.exec_driver_sql("SELECT 1")
        own.exec_driver_sql("SELECT count(*) FROM pg_class")
        fields = {"partition": "records_before", "tenants": [id.tenant], "tasks": [id.task], "keys": [id.key]}
        assert connection.exec_driver_sql(partitions._MOVE, fields).scalar_one() == 1
        with pytest.raises(OperationalError) as refused:
            waking.wake(own, id, op.SERVICE)
        assert refused.value.orig.sqlstate == MOVED  # type: ignore[union-attr]
        own.rollback()
        waking.wake(own, id, op.SERVICE)
        own.commit()
    assert op.seconds_from_now(connection, id, "available_at") <= 0


def test_what_an_application_has_woken_stays_until_it_commits(engine: Engine, connection: Connection) -> None:
    id = early(connection).id
    into_the_past(connection)
    fields = {"partition": "records_before", "tenants": [id.tenant], "tasks": [id.task], "keys": [id.key]}
    with transactional(engine).begin() as own:
        own.exec_driver_sql(waking._ABOUT, {"tenant": id.tenant, "task": id.task, "key": id.key})
        assert connection.exec_driver_sql(partitions._MOVE, fields).scalar_one() == 0
    assert connection.exec_driver_sql(partitions._MOVE, fields).scalar_one() == 1


def test_a_revocation_is_recorded(bank: Celery, engine: Engine, connection: Connection) -> None:
    id = early(connection).id

    def revoke() -> bool:
        with runtime_of(bank).autocommit() as own:
            return claims.revoke(own, id, op.FINGERPRINT, service=op.SERVICE, remembered=False)

    assert while_it_moves(engine, connection, id, revoke)
    assert record(connection, id).revoked_generation == 1


def test_a_revocation_that_ends_its_process_is_recorded(bank: Celery, engine: Engine, connection: Connection) -> None:
    """In a transaction of its own, which is not made again: its claim waits for the mover's lock, not for the row."""

    def body(self: Any, account: str) -> None: ...

    task = make_task(bank, body, key="{account}")
    context = Context(request_of(bank, task, "m1"), args=["a"], kwargs={}, is_eager=False, called_directly=False)
    delivery = delivery_of(task, context)
    early(connection, delivery.id, fingerprint=delivery.fingerprint)
    while_it_moves(engine, connection, delivery.id, lambda: revoke_terminated(task, context))
    assert record(connection, delivery.id).revoked_generation == 1
    assert op.status(connection, delivery.id) == "released"


def test_a_claim_gets_it_once(bank: Celery, engine: Engine, connection: Connection) -> None:
    id = due(connection).id

    def claim() -> object:
        with runtime_of(bank).autocommit() as own:
            return op.claim(own, id)

    answer = while_it_moves(engine, connection, id, claim)
    assert isinstance(answer, Claimed)
    row = record(connection, id)
    assert (row.status, row.fence, row.attempts) == ("started", answer.fence, answer.attempts)


def test_a_rename_leaves_nothing(bank: Celery, engine: Engine, connection: Connection) -> None:
    id = early(connection).id
    connection.exec_driver_sql("UPDATE idempotency.records SET service = 'before'")
    renamed = while_it_moves(engine, connection, id, lambda: rename_service(bank, "before", op.SERVICE, ANN))
    assert renamed["records"] == 1
    assert record(connection, id).service == op.SERVICE


def test_a_longer_transaction_is_refused_and_made_again(engine: Engine, connection: Connection) -> None:
    id = completed(connection).id
    tries = []

    def change() -> None:
        with transactional(engine).begin() as own:
            tries.append(id)
            own.exec_driver_sql("UPDATE idempotency.records SET duplicates = duplicates + 1")

    while_it_moves(engine, connection, id, repeatable(change))
    assert len(tries) == 2
    assert record(connection, id).duplicates == 1
    with pytest.raises(OperationalError, match="moved to another partition"):
        while_it_moves(engine, connection, id, change)
    assert record(connection, id).duplicates == 1


def test_a_change_is_made_again_a_few_times(connection: Connection) -> None:
    tries = []

    @repeatable
    def change() -> None:
        tries.append(1)
        connection.exec_driver_sql("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$")

    with pytest.raises(OperationalError):
        change()
    assert len(tries) == TRIES
