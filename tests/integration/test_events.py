"""Events: one row per consumer, each handled once, in commit order per ordering key."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.signals import import_modules
from sqlalchemy import text
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session

from idempotency import InvalidArguments, SettingsError, events, publish, subscribe
from idempotency.relay.relay import Relay
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries
from tests.support.tasks import ROW


@pytest.fixture
def consumers(bank: Celery) -> Iterator[Any]:
    """Two consumers of order events and one of everything; their tasks go with the test."""

    def handle(self: Any, event: Any) -> Any:
        self.session.execute(ROW)
        return [event["type"], event["data"]]

    names = ("ledger", "mail", "audit")
    tasks = {name: subscribe("*" if name == "audit" else "order.*", consumer=name, app=bank)(handle) for name in names}
    yield tasks
    events._subscriptions.pop(bank)
    for task in tasks.values():
        bank.tasks.pop(task.name)


@pytest.fixture
def transaction(engine: Engine) -> Iterator[Session]:
    with Session(engine.execution_options(isolation_level="READ COMMITTED")) as session:
        yield session


def rows(engine: Engine) -> Any:
    with engine.connect() as connection:
        return connection.execute(text("SELECT * FROM idempotency.outbox ORDER BY id")).all()


def test_an_event_is_one_row_for_each_consumer_that_subscribed(
    bank: Celery, consumers: Any, transaction: Session, engine: Engine
) -> None:
    event_id = publish(transaction, "order.paid", {"order": 1}, app=bank)
    publish(transaction, "user.created", {}, app=bank)
    transaction.commit()
    found = [(row.task, row.key == event_id) for row in rows(engine)]
    assert found == [("ledger.handle", True), ("mail.handle", True), ("audit.handle", True), ("audit.handle", False)]


def test_a_consumer_of_events_that_have_a_member_costs_no_row_for_others(
    bank: Celery, consumers: Any, transaction: Session, engine: Engine
) -> None:
    def pack(self: Any, event: Any) -> None: ...

    task = subscribe("order.*", consumer="parcels", having=("order", "parcel"), app=bank)(pack)
    for data in ({"order": 1}, {"order": 1, "parcel": None, "more": 2}, ["order", "parcel"], "parcel order", None):
        publish(transaction, "order.sent", data, app=bank)
    transaction.commit()
    bank.tasks.pop(task.name)
    found = [json.loads(json.loads(row.message)["body"])[0][0] for row in rows(engine) if row.task == task.name]
    assert [event["data"] for event in found] == [{"order": 1, "parcel": None, "more": 2}]
    with pytest.raises(SettingsError, match="having is a list of names"):
        subscribe("order.*", consumer="parcels", having="order", app=bank)


def test_a_rolled_back_event_reaches_no_consumer(
    bank: Celery, consumers: Any, transaction: Session, engine: Engine
) -> None:
    publish(transaction, "order.paid", {}, app=bank)
    transaction.rollback()
    assert rows(engine) == []


def test_each_consumer_handles_an_event_once(
    bank: Celery, consumers: Any, transaction: Session, engine: Engine, deliveries: Deliveries, entries: Entries
) -> None:
    event_id = publish(transaction, "order.paid", {"order": 1}, app=bank)
    transaction.commit()
    event = json.loads(json.loads(rows(engine)[0].message)["body"])[0][0]
    assert {event["specversion"], event["id"], event["type"]} == {"1.0", event_id, "order.paid"}
    for _ in range(2):
        for name in ("ledger", "mail"):
            outcome = deliveries.deliver(consumers[name], event, key=event_id)
            assert outcome.value == ["order.paid", {"order": 1}]
    assert entries("row") == 2


def test_events_of_one_ordering_key_are_published_in_commit_order(bank: Celery, consumers: Any, engine: Engine) -> None:
    relay = Relay(bank)
    sessions = [Session(engine.execution_options(isolation_level="READ COMMITTED")) for _ in range(2)]
    for number, session in enumerate(sessions):
        publish(session, "order.paid", {"n": number}, ordering_key="o1", app=bank)
        session.flush()
    for session in reversed(sessions):
        session.commit()
        session.close()
    assert relay.run_once().published == 6
    relay.close()
    with engine.connect() as connection:
        ordered = connection.execute(
            text("SELECT message FROM idempotency.outbox WHERE task = 'ledger.handle' ORDER BY place")
        ).scalars()
        assert [json.loads(json.loads(message)["body"])[0][0]["data"]["n"] for message in ordered] == [1, 0]


def test_an_event_goes_to_a_topic_exchange_for_consumers_outside(
    bank: Celery, consumers: Any, transaction: Session, environment: dict[str, str]
) -> None:
    relay = Relay(bank)
    name = f"events-{environment['BANK_QUEUE']}"
    with bank.connection_for_write() as connection:
        channel = connection.default_channel
        channel.exchange_declare(name, "topic", durable=True, auto_delete=False)
        queue = channel.queue_declare("", exclusive=False, auto_delete=False).queue
        channel.queue_bind(queue, name, "order.#")
        event_id = publish(transaction, "order.paid", {"order": 1}, exchange=name, app=bank)
        transaction.commit()
        while relay.run_once().published:
            pass
        relay.close()
        message = channel.basic_get(queue, no_ack=True)
        channel.queue_delete(queue)
        channel.exchange_delete(name)
    headers = message.properties["application_headers"]
    assert (headers["cloudEvents:id"], headers["cloudEvents:type"]) == (event_id, "order.paid")
    assert json.loads(message.body) == {"order": 1}


def test_a_payload_that_is_not_json_is_refused_and_nothing_is_written(
    bank: Celery, consumers: Any, transaction: Session, engine: Engine
) -> None:
    with pytest.raises(InvalidArguments):
        publish(transaction, "order.paid", {"x": float("nan")}, app=bank)
    with pytest.raises(InvalidArguments, match="payload: at most"):
        publish(transaction, "order.paid", "x" * 1_100_000, app=bank)
    transaction.commit()
    assert rows(engine) == []


def test_what_is_no_session_is_refused_even_without_subscribers(bank: Celery) -> None:
    with pytest.raises(InvalidArguments, match="session: must be"):
        publish(None, "nobody.listens", {}, app=bank)  # type: ignore[arg-type]


def test_a_consumer_cannot_subscribe_one_name_twice(bank: Celery, consumers: Any) -> None:
    def handle(self: Any, event: Any) -> None: ...

    with pytest.raises(SettingsError, match=r"ledger\.handle"):
        subscribe("order.*", consumer="ledger", app=bank)(handle)


def test_a_consumer_without_a_pattern_is_refused(bank: Celery) -> None:
    with pytest.raises(SettingsError, match=r"'ledger' names no event type"):
        subscribe(consumer="ledger", app=bank)


def test_a_consumer_with_several_patterns_gets_an_event_once(
    bank: Celery, transaction: Session, engine: Engine
) -> None:
    def handle(self: Any, event: Any) -> None: ...

    task = subscribe("order.paid", "order.*", "user.created", consumer="ledger", app=bank)(handle)
    try:
        told = [publish(transaction, name, {}, app=bank) for name in ("order.paid", "user.created", "user.deleted")]
        transaction.commit()
        assert [row.key for row in rows(engine)] == told[:2]
    finally:
        events._subscriptions.pop(bank)
        bank.tasks.pop(task.name)


def test_a_consumer_in_a_module_that_only_include_names_is_told(
    bank: Celery, transaction: Session, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_consumer.py").write_text(
        "from idempotency import subscribe\n"
        "from tests.support.bank import app\n"
        "@subscribe('order.*', consumer='late', app=app)\n"
        "def handle(self, event): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    bank.conf.include = ["late_consumer"]
    vars(bank.loader).pop("default_modules", None)  # a cached property of the loader
    events._imported.discard(bank)
    imports = []

    def note(**_: Any) -> None:
        imports.append(1)

    import_modules.connect(note)
    try:
        for _ in range(3):
            publish(transaction, "order.paid", {}, app=bank)
        transaction.commit()
        assert [row.task for row in rows(engine)] == ["late.handle"] * 3
        assert imports == [1]  # not again for every event
    finally:
        bank.conf.include = []
        vars(bank.loader).pop("default_modules")
        events._subscriptions.pop(bank)
        bank.tasks.pop("late.handle")
        sys.modules.pop("late_consumer")
