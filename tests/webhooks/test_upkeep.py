"""What relays do about webhooks: the purge, the alarm; and what the doctor says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from idempotency.application import settings_of
from idempotency.attempt.runtime import Runtime
from idempotency.checks.settings import check_webhooks
from idempotency.errors import SettingsError
from idempotency.operate import webhooks as operate
from idempotency.operate.change import Change
from idempotency.operate.replay import replay
from idempotency.settings import Settings
from idempotency.store.overview import monitoring_connection
from idempotency.testing import Outbox
from idempotency.upkeep import alarms, overview
from idempotency.upkeep.maintenance import purge_once
from tests.support.receiver import Receiver, answering
from tests.webhooks.test_letters import Waiting, cancelled

ANN = Change("ann", "test")
Rows = Callable[[str], Any]


def age(engine: Engine, days: int) -> None:
    with engine.connect() as connection:
        for column in ("created_at", "ended_at"):
            change = f"UPDATE idempotency.webhook_deliveries SET {column} = {column} - make_interval(days => :days)"
            connection.execute(text(change), {"days": days})


@pytest.mark.long
def test_what_has_ended_is_purged_with_its_attempts_and_what_waits_stays(
    shop: Celery, happen: Any, register: Any, outbox: Outbox, receiver: Receiver, engine: Engine, rows: Rows
) -> None:
    register()
    happen(), happen()
    outbox.run()
    age(engine, 20)
    receiver.answer = answering(500)
    happen()
    for _ in range(2):
        row = outbox._next()
        assert row is not None
        outbox._deliver(row)
    purge_once(shop, limit=100)
    assert (len(rows("deliveries")), len(rows("attempts"))) == (3, 3)
    age(engine, 20)
    purge_once(shop, limit=1)
    assert len(rows("deliveries")) == 2
    purge_once(shop, limit=100)
    assert [(row.status, row.event_type) for row in rows("deliveries")] == [("waiting", "order.paid")]
    assert [row.status for row in rows("attempts")] == [500]


@pytest.mark.long
def test_a_delivery_that_a_person_may_replay_stays(
    shop: Celery, waiting: Waiting, outbox: Outbox, receiver: Receiver, engine: Engine, rows: Rows
) -> None:
    _, id = waiting()
    letter = cancelled(shop, engine, id)
    age(engine, 40)
    purge_once(shop, limit=100)
    assert len(rows("deliveries")) == 1
    replay(shop, letter, ANN)
    purge_once(shop, limit=100)
    outbox.run()
    assert (len(receiver.webhooks), rows("deliveries")[0].status) == (1, "delivered")
    age(engine, 40)
    purge_once(shop, limit=100)
    assert rows("deliveries") == []


@pytest.mark.long
def test_an_endpoint_that_has_disabled_itself_is_an_alarm_until_a_person_has_seen_to_it(
    shop: Celery, happen: Any, register: Any, outbox: Outbox, receiver: Receiver, runtime: Runtime
) -> None:
    def names() -> list[str]:
        given = settings_of(shop)
        with monitoring_connection(given) as connection:
            found = alarms.lasting(overview.take_snapshot(connection, shop, given), given)
        return [alarm.name for alarm in found if alarm.name.startswith("webhook")]

    endpoint = register()
    assert names() == []
    receiver.answer = answering(410)
    happen()
    outbox.run()
    assert names() == [f"webhook_disabled/{endpoint.id}"]
    operate.disable_endpoint(runtime, ANN, endpoint.id)
    assert names() == []


def test_the_doctor_reports_exceptions_from_the_rule(shop: Celery) -> None:
    (found,) = check_webhooks(settings_of(shop))
    assert str(found).startswith("idempotency_webhook_allowed_hosts: 127.0.0.1: webhooks may go there")
    assert check_webhooks(Settings.read({"database_url": "postgresql+psycopg://x/y"})) == []


@pytest.mark.parametrize("wrong", ["10.0.0.0/33", "10.0.0.1/8", "https://hooks", "a b", "hook/s"])
def test_an_exception_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(SettingsError, match="idempotency_webhook_allowed_hosts"):
        Settings.read({"database_url": "postgresql+psycopg://x/y", "webhook_allowed_hosts": [wrong]})
