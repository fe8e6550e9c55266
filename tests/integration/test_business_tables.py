"""The application's tables: made by its migrations in an empty database, and matching its models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from uuid import uuid4

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

import services
from tasks.migrate import VERSION_TABLE, migrate
from tasks.models import Base
from tests.support.documents import ROOT
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


@pytest.mark.long
def test_in_an_empty_database_make_migrate_makes_what_a_payment_needs(
    servers: services.Services, empty_database: str, engine: Engine
) -> None:
    environment = {**os.environ, "DATABASE_URL": empty_database, "BROKER_URL": servers.broker_url}
    for arguments in (["-m", "idempotency.cli", "migrate", "-A", "tasks"], ["-m", "tasks.migrate"], ["-c", SUBMIT]):
        subprocess.run([sys.executable, *arguments], env=environment, check=True, timeout=60, capture_output=True)
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
        assert connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one() == "0007"


# ---------------------------------------------------------------- two keys for one payment


# In a separate process, because the application reads its addresses when it is imported.
TWO_KEYS = """
import json
import threading
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from celeryconfig import environment
engine = create_engine(environment.database_url.get_secret_value())
from idempotency.store import schema
from tasks.migrate import migrate
schema.migrate(engine); migrate(engine)
from tasks import payments
from idempotency import StoredRefusal
charges, answers, second = [], [], []

class Provider:
    def capture(self, *, payment_id, customer_id, amount, currency, idempotency_key):
        if payment_id == "declined":
            raise StoredRefusal("the card was declined", "card_declined")
        charges.append((payment_id, idempotency_key))
        number = len(charges)
        if number == 1:  # slow: meanwhile the other call is made
            other = threading.Thread(target=call, args=("p1", "p1-again"))
            other.start(); other.join(60)
        return {"id": f"ch_{number}", "amount": amount, "currency": currency, "status": "succeeded"}
    def find_capture(self, **_):
        raise AssertionError("not asked")

def call(payment_id, key):
    result = payments.capture_payment.apply(kwargs={"payment_id": payment_id}, idempotency_key=key)
    answers.append((key, result.state))

payments.gateway = Provider()
with sessionmaker(engine).begin() as session:
    for id in ("p1", "declined"):
        payments.submit_payment(session, payment_id=id, customer_id="c1", amount=1000, currency="EUR")
call("p1", "p1")
call("declined", "declined-again")
with engine.connect() as c:
    rows = c.exec_driver_sql("SELECT id, status FROM payments ORDER BY id").all()
    records = c.exec_driver_sql("SELECT key, status, error_code FROM idempotency.records WHERE task LIKE 'payments%%' ORDER BY key").all()
print(json.dumps({"charges": len(charges), "keys": len(set(charges)), "answers": answers, "payments": [list(r) for r in rows], "records": [list(r) for r in records]}))
"""


@pytest.mark.long
def test_a_payment_that_is_called_under_two_keys_is_not_completed_twice(
    servers: services.Services, environment: dict[str, str]
) -> None:
    """Two keys are two operations, and the provider is called for both. The second charge is found; a failure is told."""
    database = servers.create_database(f"shop_{uuid4().hex[:8]}")
    done = subprocess.run(
        [sys.executable, "-c", TWO_KEYS],
        env=environment | {"DATABASE_URL": database},
        capture_output=True, check=False, timeout=120, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    servers.drop_database(str(make_url(database).database))
    assert (found["charges"], found["keys"]) == (2, 2)
    # the payment has the other one's charge
    assert sorted(record[2] or record[1] for record in found["records"] if record[0] != "declined-again") == [
        "completed",
        "unfinished",
    ]
    assert found["payments"] == [["declined", "failed"], ["p1", "captured"]]


# ---------------------------------------------------------------- rows and code from before orders were placed by events


OF_0002 = """
INSERT INTO payments (id, tenant, customer_id, amount, currency, status, charge_id, refunded, failure) VALUES
    ('order-1', 'acme', 'c1', 900, 'EUR', 'captured', 'ch_1', 0, NULL),
    ('order-2', 'acme', 'c1', 900, 'EUR', 'failed', NULL, 0, 'card_declined'),
    ('order-3', 'acme', 'c1', 900, 'EUR', 'pending', NULL, 0, NULL),
    ('p-1', 'acme', 'c1', 900, 'EUR', 'pending', NULL, 0, NULL);
INSERT INTO orders (tenant, checkout_session_id, id, customer_id, amount, currency)
SELECT tenant, 'cs-' || id, id, customer_id, amount, currency FROM payments WHERE id <> 'p-1';
"""
# As code of 0002 inserts a payment: it knows no order.
PAYMENT_OF_0002 = """
INSERT INTO payments (id, tenant, customer_id, amount, currency, status, refunded)
VALUES ('p-2', 'acme', 'c1', 5, 'EUR', 'pending', 0)
"""


def move(engine: Engine, verb: Callable[[Config, str], None], revision: str) -> None:
    """Upgrade or downgrade to a revision."""
    config = Config()
    config.set_main_option("script_location", str(ROOT / "tasks" / "migrations"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        verb(config, revision)


def test_orders_from_before_they_were_placed_by_events_keep_their_checkouts_and_get_a_status(engine: Engine) -> None:
    move(engine, command.upgrade, "0002")
    with engine.begin() as connection:
        connection.exec_driver_sql(OF_0002)
    migrate(engine)
    with engine.begin() as connection:
        orders = connection.exec_driver_sql(
            "SELECT id, status, reason, payment_requested FROM orders ORDER BY id"
        ).all()
        assert orders == [
            ("order-1", "PROCESSING", None, True),
            ("order-2", "CANCELLED", "card_declined", True),
            ("order-3", "PENDING_PAYMENT", None, True),
        ]
        checkouts = connection.exec_driver_sql("SELECT checkout_session_id, order_id FROM checkouts ORDER BY 2").all()
        assert checkouts == [(f"cs-{order.id}", order.id) for order in orders]
        connection.exec_driver_sql(PAYMENT_OF_0002)
        payments = connection.exec_driver_sql("SELECT id, order_id, order_status FROM payments ORDER BY id").all()
        assert payments == [
            *((order.id, order.id, "cancelled" if order.status == "CANCELLED" else "placed") for order in orders),
            ("p-1", "p-1", None),
            ("p-2", "p-2", None),
        ]


def test_orders_from_before_there_were_events_are_as_if_events_had_placed_them(engine: Engine) -> None:
    """A payment that has failed gives back what a replay captures; what it has captured since 0003 has a case."""
    move(engine, command.upgrade, "0002")
    with engine.begin() as connection:
        for id, status in (("paid", "captured"), ("declined", "failed"), ("replayed", "failed")):
            connection.execute(text("INSERT INTO orders VALUES ('default', :id, :id, 'c', 1000, 'EUR')"), {"id": id})
            payment = "INSERT INTO payments (id, customer_id, amount, currency, status, refunded, charge_id) VALUES"
            charge = {"id": id, "status": status, "charge": "ch_1" if status == "captured" else None}
            connection.execute(text(f"{payment} (:id, 'c', 1000, 'EUR', :status, 0, :charge)"), charge)
    move(engine, command.upgrade, "0003")
    with engine.begin() as connection:
        connection.execute(text("UPDATE payments SET status = 'captured', charge_id = 'ch_2' WHERE id = 'replayed'"))
        connection.execute(text("INSERT INTO support_cases (payment_id, code) VALUES ('replayed', 'recovered')"))
    move(engine, command.upgrade, "0004")
    query = text("""
        SELECT o.id, o.status, p.order_status, r.status, r.quantity, c.code FROM orders o
        JOIN payments p ON p.order_id = o.id
        LEFT JOIN reservations r ON r.order_id = o.id LEFT JOIN support_cases c ON c.payment_id = p.id ORDER BY 1
    """)
    with engine.connect() as connection:
        assert connection.execute(query).all() == [
            ("declined", "CANCELLED", "cancelled", None, None, None),
            ("paid", "PROCESSING", "placed", "STOCK_RESERVED", 0, None),
            ("replayed", "CANCELLED", "cancelled", None, None, "refund_failed"),
        ]


RETURN = "INSERT INTO returns (id, order_id, customer_id, reason, reship) VALUES ('ret-1', 'order-1', 'c1', '', false)"


def test_the_migration_to_returns_is_taken_back_only_while_there_are_none(engine: Engine) -> None:
    """Code of 0003 would leave a return where it is: nobody would see to it."""
    migrate(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(RETURN)
    with pytest.raises(SQLAlchemyError, match="there are returns, which code of 0003 does not know"):
        move(engine, command.downgrade, "0003")
    with engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT status FROM returns").scalar_one() == "REQUESTED"
        connection.exec_driver_sql("DELETE FROM returns")
    move(engine, command.downgrade, "0003")
    with engine.begin() as connection:  # as code of 0003 does it
        connection.exec_driver_sql("INSERT INTO stock (sku, available, reserved) VALUES ('s', 1, 0)")
    migrate(engine)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT quarantined FROM stock").scalar_one() == 0


def test_the_migration_to_placement_by_events_can_be_taken_back(engine: Engine) -> None:
    migrate(engine)
    move(engine, command.downgrade, "0002")
    migrate(engine)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM placements")).scalar_one() == 0
