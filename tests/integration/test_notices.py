"""What a program reads of an alert or alarm: ids, the runbook's page, the command, and what is at stake."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from sqlalchemy import Connection, text

from idempotency import IdempotentTask, reasons
from idempotency.application import close_runtime
from idempotency.store import alarms as stored
from idempotency.upkeep import alarms, alerts
from idempotency.wire.message import Message
from tests.support import operations as op
from tests.support.alert_receiver import Receiver, receiving

SECRET = "a-key-that-no-alert-shows"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def alerting(bank: Celery, receiver: Receiver) -> Iterator[Celery]:
    """The bank, whose alerts go to the receiver."""
    changed = {
        "idempotency_alert_webhook_url": receiver.url,
        "idempotency_environment": "staging",
        "idempotency_runbooks_at": "https://wiki.example/runbooks/",
        "idempotency_own_runbooks": ("over_limit", "bank_"),
        "idempotency_alert_open_letters": 20,
        "idempotency_alarm_unconsumed": 0.0,
    }
    bank.conf.update(changed)
    yield bank
    close_runtime(bank)
    for name in changed:
        bank.conf.pop(name, None)


def letter(
    connection: Connection,
    reason: str,
    task: str | None = None,
    arguments: dict[str, Any] | None = None,
    known: int = 1,
) -> int:
    body = json.dumps([[], arguments or {}, {}])
    payload = Message({"task": task, "id": SECRET}, body, {"queue": "q"}, {}).to_text()
    insert = """INSERT INTO idempotency.dead_letters (source, consumer_service, reason, payload, tenant, task, key, generation,
                                                      last_error)
                VALUES ('broker', 'bank', :reason, :payload, 'default', :task, :key, :known, :error) RETURNING id"""
    fields = {"reason": reason, "payload": payload, "task": task, "known": known or None}
    return int(
        connection.execute(text(insert), {**fields, "key": f"{SECRET}-{uuid4().hex}", "error": SECRET}).scalar_one()
    )


def test_an_alert_has_ids_runbook_and_command(alerting: Celery, receiver: Receiver, connection: Connection) -> None:
    many = [letter(connection, "envelope") for _ in range(12)]
    (one,) = [letter(connection, "over_limit")]
    letter(connection, "bank_closed")
    letter(connection, "card_declined")
    assert alerts.run_once(alerting) == 15
    told = {each.pop("reason"): each for each in receiver.alerts}
    common = {"service": "bank", "environment": "staging"}
    assert told["envelope"] == common | {
        "count": 12,
        "dead_letters": many[:10],
        "runbook": "https://wiki.example/runbooks/envelope.md",
        "command": f"idempotency dead-letters show {many[0]}",
    }
    assert told["over_limit"] == common | {
        "count": 1,
        "dead_letters": [one],
        "runbook": "https://wiki.example/runbooks/over_limit.md",
        "command": f"idempotency dead-letters show {one}",
    }
    assert told["bank_closed"]["runbook"].endswith("/bank.md")
    assert told["card_declined"]["runbook"].endswith("/declined.md")
    assert SECRET not in json.dumps(receiver.alerts)


def test_without_an_address_there_is_the_pages_name(
    alerting: Celery, receiver: Receiver, connection: Connection
) -> None:
    alerting.conf.idempotency_runbooks_at = alerting.conf.idempotency_environment = None
    letter(connection, "envelope")
    alerts.run_once(alerting)
    assert receiver.alerts[0]["runbook"] == "envelope"
    assert "environment" not in receiver.alerts[0]


def test_too_many_letters_and_rows_that_are_refused_have_theirs(
    alerting: Celery, receiver: Receiver, connection: Connection
) -> None:
    for _ in range(21):
        letter(connection, "envelope")
    op.early(connection, queue="mail")
    op.early(connection, queue="money")
    connection.execute(text("UPDATE idempotency.outbox SET attempts = 5, last_error = 'nacked'"))
    alerts.run_once(alerting)
    told = {each["reason"]: each for each in receiver.alerts}
    assert (told["open"]["count"], told["open"]["runbook"]) == (21, "https://wiki.example/runbooks/open.md")
    assert told["outbox_stuck"]["queues"] == ["mail", "money"]
    assert told["outbox_stuck"]["command"] == "idempotency status"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("amount", "arguments", "stake"),
    [
        (
            "{amount} {currency}",
            [{"amount": 1250, "currency": "EUR"}, {"amount": 250, "currency": "EUR"}],
            ["1500 EUR"],
        ),
        (
            "{amount} {currency}",
            [{"amount": 1, "currency": "EUR"}, {"amount": 2, "currency": "USD"}],
            ["1 EUR", "2 USD"],
        ),
        ("{order[total]}", [{"order": {"total": "12.50"}}, {"order": {"total": "0.25"}}], ["12.75"]),
        ("amount", [{"amount": 7}], ["7"]),
        ("amount", [{"amount": "7 EUR or a name"}], None),
        ("amount", [{"other": 7}], None),
        (None, [{"amount": 7}], None),
    ],
)
def test_what_is_at_stake_is_added_up_by_currency(
    alerting: Celery,
    receiver: Receiver,
    connection: Connection,
    amount: str | None,
    arguments: list[dict[str, Any]],
    stake: list[str] | None,
) -> None:
    def pay(self: Any, amount: Any = None, currency: str = "", order: Any = None, other: int = 0) -> None: ...

    name = f"pay.{uuid4().hex}"
    alerting.task(base=IdempotentTask, bind=True, name=name, key=None, amount=amount, shared=False)(pay)
    try:
        for given in arguments:
            letter(connection, "over_limit", name, given)
        # anyone may have written what names no operation that is known
        letter(connection, "over_limit", name, arguments[0], known=0)
        alerts.run_once(alerting)
    finally:
        alerting.tasks.unregister(name)
    assert receiver.alerts[0].get("at_stake") == stake


def test_an_alarm_names_its_queue_and_says_when_it_is_over(
    alerting: Celery, receiver: Receiver, connection: Connection
) -> None:
    queue = alerting.conf.task_default_queue
    sign = """INSERT INTO idempotency.processes (kind, name, host, pid, service, version, started_at, seen_at, queues)
              VALUES ('worker', 'w1@h', 'h', 7, 'bank', '1', now(), clock_timestamp() - interval '2 min', ARRAY[:queue])"""
    connection.execute(text(sign), {"queue": queue})
    assert alarms.run_once(alerting) == 1
    (silent,) = receiver.alerts
    assert silent["reason"] == reasons.SILENT
    assert {name: silent[name] for name in ("kind", "name", "host", "pid")} == {
        "kind": "worker", "name": "w1@h", "host": "h", "pid": 7,
    }  # fmt: skip
    assert silent["start"] == f"celery -A yourapp worker --hostname w1@h --queues {queue}"
    assert "directory" not in silent, "not known, as of a process before schema 0020"
    assert silent["runbook"] == "https://wiki.example/runbooks/silent.md"
    connection.execute(text("DELETE FROM idempotency.processes"))
    connection.execute(text("UPDATE idempotency.alerts SET sent_at = sent_at - interval '1 min'"))
    assert alarms.run_once(alerting) == 1
    over = receiver.alerts[-1]
    assert (over["reason"], over["alarm"], over["over"]) == (reasons.SILENT, silent["alarm"], True)


def test_the_store_knows_no_payload_of_a_letter_without_an_operation(connection: Connection) -> None:
    ids = [letter(connection, "envelope", "t"), letter(connection, "envelope", "t", known=0)]
    assert len(stored.payloads(connection, ids)) == 1
