"""One row that Postgres refuses to delete, or that is locked, in what is kept beside operations: all else goes."""

from __future__ import annotations

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency.store.sweeps import BATCH
from idempotency.upkeep.maintenance import purge_once

WAITER = """
INSERT INTO idempotency.waiters (tenant, task, key, until) VALUES ('t', 't', 'w', clock_timestamp() - interval '1 day')
"""
EVENTS = """
INSERT INTO idempotency.saga_events (tenant, service, event_type, match, event_id, event, received_at, signalled)
SELECT 't', 'bank', 'paid', 'm', each, '{}', clock_timestamp() - interval '900 days', true
FROM unnest(ARRAY['bad', 'good', 'better']) each
"""
DELIVERIES = """
INSERT INTO idempotency.webhook_endpoints (id, tenant, service, url, events)
VALUES ('ep', 't', 'bank', 'https://shop.example', '{*}');
INSERT INTO idempotency.webhook_deliveries (id, tenant, service, endpoint_id, task, event_type, body, status, ended_at)
SELECT each, 't', 'bank', 'ep', 'w.deliver', 'paid', '{}', 'delivered', clock_timestamp() - interval '900 days'
FROM unnest(ARRAY['bad', 'good', 'better']) each
"""
FORMER = """
INSERT INTO idempotency.former_fingerprints (tenant, task, key, fingerprint, became)
SELECT 't', 'x', each, 'v1:a', 'v1:b' FROM unnest(ARRAY['bad', 'good', 'better']) each
"""
OBSERVED = """
INSERT INTO idempotency.sagas (tenant, task, key, service, entity_id, status, observed, updated_at)
SELECT 't', 's', each, 'bank', 'e', 'COMPLETED', true, clock_timestamp() - interval '900 days'
FROM unnest(ARRAY['bad', 'good', 'better']) each
"""
REFUSES = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN IF OLD.{name} = 'bad' THEN RAISE EXCEPTION 'not this one'; END IF; RETURN OLD; END $$;
CREATE TRIGGER refuse BEFORE DELETE ON idempotency.{table} FOR EACH ROW EXECUTE FUNCTION refuse()
"""


def left(connection: Connection, table: str, name: str = "key") -> list[str]:
    return sorted(connection.execute(text(f"SELECT {name} FROM idempotency.{table}")).scalars())


@pytest.mark.parametrize(
    ("table", "name", "rows"),
    [
        ("saga_events", "event_id", EVENTS),
        ("webhook_deliveries", "id", DELIVERIES),
        ("former_fingerprints", "key", FORMER),
        ("sagas", "key", OBSERVED),
    ],
)
def test_one_refused_row_is_set_aside_and_all_others_go(
    bank: Celery, connection: Connection, table: str, name: str, rows: str
) -> None:
    for statement in rows.split(";"):
        connection.exec_driver_sql(statement)
    connection.exec_driver_sql(WAITER)
    connection.exec_driver_sql(REFUSES.format(table=table, name=name))
    purge_once(bank, limit=BATCH)
    assert left(connection, table, name) == ["bad"]
    assert left(connection, "waiters") == []
    (noted,) = left(connection, "set_aside")
    assert noted.partition(":")[0] == "bad"


def test_an_event_that_is_just_published_again_holds_nothing_up(
    bank: Celery, connection: Connection, engine: Engine
) -> None:
    """By an application whose transaction stays open."""
    connection.exec_driver_sql(EVENTS)
    connection.exec_driver_sql(WAITER)
    with engine.connect() as application:
        application.exec_driver_sql("BEGIN")
        application.exec_driver_sql("SELECT idempotency.keep_event('t', 'bank', 'paid', 'm', 'bad', '{}')")
        purge_once(bank, limit=BATCH)
        assert left(connection, "saga_events", "event_id") == ["bad"]
        assert left(connection, "waiters") == []
        application.exec_driver_sql("ROLLBACK")
