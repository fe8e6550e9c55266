"""The application's tables: made by its migrations in an empty_database database, and as its models say."""

from __future__ import annotations

import os
import subprocess
import sys
from uuid import uuid4

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.pool import NullPool

import services
from tasks.migrate import VERSION_TABLE, migrate
from tasks.models import Base
from tests.support.operations import at_once

CONSTRAINTS = text("""
    SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE connamespace = 'public'::regnamespace AND conrelid <> 0 AND conrelid::regclass::text <> :version_table
    ORDER BY 1, 2
""")
COLUMNS = text("""
    SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns
    WHERE table_schema = 'public' AND table_name NOT IN (:version_table, 'ledger_entries') ORDER BY 1, 2
""")
# In a separate process: a payment is submitted as the application does it.
SUBMIT = """
from celeryconfig import environment
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from tasks.payments import submit_payment
with sessionmaker(create_engine(environment.database_url.get_secret_value())).begin() as session:
    submit_payment(session, payment_id="p1", customer_id="c1", amount=1000, currency="EUR")
"""


@pytest.fixture
def engine(empty_database: str) -> Engine:
    return create_engine(empty_database, poolclass=NullPool)


def test_in_an_empty_database_make_migrate_makes_what_a_payment_needs(
    servers: services.Services, empty_database: str, engine: Engine
) -> None:
    environment = {**os.environ, "DATABASE_URL": empty_database, "BROKER_URL": servers.broker_url}
    for command in (["-m", "idempotency.cli", "migrate"], ["-m", "tasks.migrate"], ["-c", SUBMIT]):
        subprocess.run([sys.executable, *command], env=environment, check=True, timeout=60, capture_output=True)
    with engine.connect() as connection:
        accepted = connection.execute(text("SELECT p.status, o.key FROM payments p, idempotency.outbox o")).all()
        assert accepted == [("pending", "p1")]
        assert connection.execute(text("SELECT count(*) FROM ledger_entries")).scalar_one() == 0


def test_the_migrations_agree_with_the_models(servers: services.Services, engine: Engine) -> None:
    migrate(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE, "compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    # Alembic compares neither checks nor defaults.
    name = f"models_{uuid4().hex[:8]}"
    of_models = create_engine(servers.create_database(name), poolclass=NullPool)
    try:
        Base.metadata.create_all(of_models)
        for query in (CONSTRAINTS, COLUMNS):
            with engine.connect() as migrated, of_models.connect() as made:
                parameters = {"version_table": VERSION_TABLE}
                assert migrated.execute(query, parameters).all() == made.execute(query, parameters).all()
    finally:
        servers.drop_database(name)


def test_four_callers_at_once_make_the_tables_once(engine: Engine) -> None:
    at_once(4, lambda _: migrate(engine))
    migrate(engine)
    with engine.connect() as connection:
        assert connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one() == "0001"
