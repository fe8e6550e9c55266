"""Migration 0013: API keys and waiters, beside code of 0012, and the way back."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import pytest
from alembic import command
from celery import Celery
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.pool import NullPool

from idempotency.application import runtime_of
from idempotency.store import schema
from tests.support import bank as b
from tests.support import operations as op

ID = op.operation(b.deposit, "a1")
WAITS = text(
    "INSERT INTO idempotency.waiters VALUES (:tenant, :task, :key, clock_timestamp() + make_interval(secs => :seconds))"
)
WAITER = {"tenant": ID.tenant, "task": ID.task, "key": ID.key}


@pytest.fixture
def empty(empty_database: str) -> Iterator[Engine]:
    engine = create_engine(empty_database, poolclass=NullPool)
    yield engine
    engine.dispose()


def migrate_back(engine: Engine, revision: str) -> None:
    config = schema._config()
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)


def objects(engine: Engine) -> set[str]:
    """The tables, functions, indexes and triggers of the schema."""
    with engine.connect() as connection:
        return set(
            connection.execute(
                text(
                    "SELECT 'table ' || relname FROM pg_class WHERE relnamespace = 'idempotency'::regnamespace "
                    "UNION SELECT 'function ' || proname FROM pg_proc WHERE pronamespace = 'idempotency'::regnamespace "
                    "UNION SELECT 'trigger ' || tgname FROM pg_trigger WHERE NOT tgisinternal"
                )
            ).scalars()
        )


def test_the_way_back_leaves_the_tables_of_0012(empty: Engine) -> None:
    schema.migrate(empty, "0012")
    before = objects(empty)
    schema.migrate(empty)
    assert {"table api_keys", "table waiters", "function tenants", "trigger announce_end"} <= objects(empty) - before
    with empty.begin() as connection:  # as `migrate --roles` leaves it
        connection.execute(text("ALTER TABLE idempotency.records ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY"))
        policy = "CREATE POLICY one ON idempotency.records USING (tenant = ANY (idempotency.tenants()))"
        connection.execute(text(policy))
        # and `protect`, on a table of the application that has a policy of its own, too
        connection.execute(text("CREATE TABLE payments (tenant text NOT NULL)"))
        for each in (
            "of_tenant ON payments USING (tenant = ANY (idempotency.tenants()))",
            "all_tenants ON payments",
        ):
            connection.execute(text(f"CREATE POLICY {each}"))
        connection.execute(text("CREATE POLICY own ON payments USING (true)"))
        connection.execute(text("ALTER TABLE payments ENABLE ROW LEVEL SECURITY"))
    migrate_back(empty, "0012")
    assert objects(empty) == before
    with empty.connect() as connection:
        assert list(connection.execute(text("SELECT policyname FROM pg_policies")).scalars()) == ["own"]
    with empty.connect() as connection:
        query = "SELECT relrowsecurity OR relforcerowsecurity FROM pg_class WHERE oid = 'idempotency.records'::regclass"
        assert connection.execute(text(query)).scalar_one() is False


def test_code_of_0012_may_run_on_the_tables_of_0013(empty: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    schema.migrate(empty)
    monkeypatch.setattr(schema, "_known", lambda: ["0012", "0011", "0010"])
    monkeypatch.setattr(schema, "OLDEST_SCHEMA", "0012")
    with empty.connect() as connection:
        schema.require_compatible(connection)


@pytest.mark.parametrize("seconds", [60.0, -1.0, None], ids=["someone waits", "someone waited", "nobody waits"])
@pytest.mark.parametrize("end", [op.completed, op.failed], ids=["completed", "failed"])
def test_an_end_is_announced_to_who_waits_for_it(
    bank: Celery, connection: Connection, end: Any, seconds: float | None
) -> None:
    if seconds is not None:
        connection.execute(WAITS, WAITER | {"seconds": seconds})
    listener = runtime_of(bank).listen("idempotency_ended")
    if listener is None:
        pytest.skip("behind a pooler nobody listens")
    end(connection, ID)
    connection.execute(text("NOTIFY idempotency_ended, 'last'"))
    heard = [notice.payload for notice in listener.notifies(timeout=5, stop_after=2 if seconds == 60.0 else 1)]
    listener.close()
    name = sha256("\n".join((ID.tenant, ID.task, ID.key)).encode()).hexdigest()
    assert heard == ([name] if seconds == 60.0 else []) + ["last"]
