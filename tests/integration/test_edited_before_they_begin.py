"""What becomes of an operation that has not begun, once the message of its letter was edited: the same as without the edit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import Celery
from kombu import Message as BrokerMessage
from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from idempotency import Operation, OperationId, PermanentError
from idempotency.application import runtime_of
from idempotency.errors import ChangeRefused, DiscardRefused
from idempotency.letters import storing
from idempotency.operate import discard
from idempotency.operate.cancel import cancel
from idempotency.operate.edit import approve_edit, edit, why_not
from idempotency.operate.people import Person
from idempotency.operate.replay import replay
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.store import edits, lost
from idempotency.upkeep import maintenance
from idempotency.wire.headers import GENERATION_HEADER, OUTBOX_HEADER, SERVICE_HEADER
from idempotency.wire.message import Message
from tests.integration.test_edit import ANN, payload
from tests.support import dead_messages
from tests.support import operations as op
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operators import act, shown
from tests.support.tasks import enqueued, make_task

FIVE: dict[str, Any] = {"order_id": "o1", "cents": 5}
CORRECTED: dict[str, Any] = {"order_id": "o1", "cents": 500}
OPERATOR, APPROVER = Person("ann", "operator"), Person("ben", "approver")


@pytest.fixture
def ran(bank: Celery) -> list[int]:
    """The amounts that the body has run with."""
    return []


@pytest.fixture
def told() -> list[tuple[str, Any]]:
    """What `on_failed` was told."""
    return []


def task_of(bank: Celery, ran: list[int], told: list[tuple[str, Any]] | None = None, **options: Any) -> Any:
    def refund(self: Any, order_id: str, cents: int) -> dict[str, int]:
        ran.append(cents)
        return {"refunded": cents}

    def on_failed(session: Session, operation: Operation, error: PermanentError) -> None:
        assert told is not None
        told.append((error.code, dict(operation.arguments)))

    if told is not None:
        options["on_failed"] = on_failed
    return make_task(bank, refund, **{"key": "{order_id}", "max_attempts": 1} | options)


def dead(row: Any, queue: str) -> BrokerMessage:
    """The message of an outbox row as the broker's dead-letter queue has it."""
    message = Message.from_text(row.message)
    marks = {OUTBOX_HEADER: row.message_id, GENERATION_HEADER: row.generation, SERVICE_HEADER: row.service}
    return BrokerMessage(
        body=message.body,
        headers={**message.headers, **marks, "x-death": [{"queue": queue, "reason": "rejected"}]},
        content_type="application/json",
        content_encoding="utf-8",
        delivery_info={"routing_key": f"{queue}-dead", "exchange": ""},
        channel=None,
        properties={},
        delivery_tag="1",
        accept={"application/json"},
    )


def published(connection: Connection, task: Any) -> Any:
    """The row of an accepted operation, which has been sent and has not begun."""
    enqueued(connection, task, **FIVE)
    connection.execute(text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()"))
    return op.outbox(connection)[0]


def unhandled(bank: Celery, connection: Connection, task: Any) -> Any:
    """The letter of a message that the relay could not handle."""
    storing.store_unhandled(bank, dead(published(connection, task), bank.conf.task_default_queue))
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.generation) == ("unhandled", None)
    return letter


def unpublishable(bank: Celery, connection: Connection, task: Any) -> Any:
    """The letter of a row that no broker takes."""
    return dead_messages.unpublishable(connection, task, **FIVE)


KINDS = pytest.mark.parametrize("letter_of", [unhandled, unpublishable])


def correct(bank: Celery, connection: Connection, letter: int, *, cents: int = 500) -> None:
    """Edit it as two people, which is needed where money is moved."""
    if not edit(bank, letter, payload(order_id="o1", cents=cents), ANN, person=OPERATOR):
        approve_edit(bank, APPROVER, letter, edits.history(connection, letter)[-1].id)


def resent(bank: Celery, connection: Connection) -> int:
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 day'"))
    return resend_lost(bank, lambda _: 0).resent


def operation(task: Any) -> OperationId:
    return OperationId("default", task.name, "o1")


@pytest.mark.few(1)
@KINDS
def test_what_was_edited_is_not_discarded_but_cancelled_and_never_runs(
    bank: Celery, connection: Connection, deliveries: Deliveries, ran: list[int], letter_of: Any
) -> None:
    task = task_of(bank, ran, moves_money=True)
    letter = letter_of(bank, connection, task)
    correct(bank, connection, letter.id)
    act(bank, discard.request, OPERATOR, letter.id, "the customer has been paid by hand")
    with pytest.raises(DiscardRefused, match="replay the letter, or cancel the operation first"):
        act(bank, discard.approve, APPROVER, letter.id)
    assert resent(bank, connection) == 0
    cancel(bank, shown(connection, task, "o1"), ANN)
    (newest,) = [each for each in op.dead_letters(connection) if each.status == "open"]
    act(bank, discard.request, OPERATOR, newest.id, "the customer has been paid by hand")
    act(bank, discard.approve, APPROVER, newest.id)
    assert {each.status for each in op.dead_letters(connection)} == {"replayed", "discarded"}
    assert resent(bank, connection) == 0
    (row,) = op.outbox(connection)
    assert row.settled_at is not None
    assert deliver_row(deliveries, task, row).value.code == "cancelled"
    assert ran == []


@pytest.mark.few(2)
@KINDS
@pytest.mark.parametrize("edits_of_it", [2, 1])
def test_a_cancel_tells_on_failed_the_corrected_arguments(
    bank: Celery, connection: Connection, ran: list[int], told: list[Any], letter_of: Any, edits_of_it: int
) -> None:
    task = task_of(bank, ran, told)
    letter = letter_of(bank, connection, task)
    for cents in (400, 500)[-edits_of_it:]:
        correct(bank, connection, letter.id, cents=cents)
    cancel(bank, shown(connection, task, "o1"), ANN)
    assert op.status(connection, operation(task)) == "failed"
    assert told == [("cancelled", CORRECTED)]
    newest = op.dead_letters(connection)[-1]
    assert (newest.reason, newest.status) == ("cancelled", "open")
    assert json.loads(json.loads(newest.payload)["body"])[1] == CORRECTED


@pytest.mark.few(1)
@KINDS
def test_a_cancel_closes_the_letter_that_was_edited(
    bank: Celery, connection: Connection, ran: list[int], letter_of: Any
) -> None:
    task = task_of(bank, ran)
    letter = letter_of(bank, connection, task)
    correct(bank, connection, letter.id)
    cancel(bank, shown(connection, task, "o1"), ANN)
    found = [(each.reason, each.status) for each in op.dead_letters(connection)]
    assert found == [(letter.reason, "replayed"), ("cancelled", "open")]


@pytest.mark.few(2)
@KINDS
@pytest.mark.parametrize("asks_again", [True, False])
def test_what_was_edited_and_cancelled_by_mistake_runs_by_its_replay(
    bank: Celery, connection: Connection, deliveries: Deliveries, ran: list[int], letter_of: Any, asks_again: bool
) -> None:
    task = task_of(bank, ran)
    letter = letter_of(bank, connection, task)
    correct(bank, connection, letter.id)
    cancel(bank, shown(connection, task, "o1"), ANN)
    (open_one,) = [each for each in op.dead_letters(connection) if each.status == "open"]
    replay(bank, open_one.id, ANN)
    (sent,) = [row for row in op.outbox(connection) if row.status == "pending"]
    assert sent.queue == (letter.queue or "")
    if asks_again:  # a caller that knows nothing of the edit: the one that waits answers it
        handle = enqueued(connection, task, **FIVE)
        again = op.outbox(connection)[-1]
        connection.execute(
            text("UPDATE idempotency.outbox SET status = 'published', published_at = now() WHERE id = :id"),
            {"id": again.id},
        )
        deliver_row(deliveries, task, again)
        assert ran == []
    assert maintenance.recover(bank) == 0
    assert deliver_row(deliveries, task, sent).value == {"refunded": 500}
    assert ran == [500]
    if asks_again:
        assert handle.result(timeout=1) == {"refunded": 500}


@pytest.mark.few(1)
@KINDS
def test_an_edit_alone_sends_nothing(
    bank: Celery, connection: Connection, deliveries: Deliveries, ran: list[int], letter_of: Any
) -> None:
    task = task_of(bank, ran)
    letter = letter_of(bank, connection, task)
    before = [(row.status, row.generation) for row in op.outbox(connection)]
    correct(bank, connection, letter.id)
    assert resent(bank, connection) == maintenance.recover(bank) == 0
    assert [(row.status, row.generation) for row in op.outbox(connection)] == before
    replay(bank, letter.id, ANN)
    assert deliver_row(deliveries, task, op.outbox(connection)[-1]).value == {"refunded": 500}


def test_a_message_that_waits_to_be_sent_again_is_not_edited(
    bank: Celery, connection: Connection, ran: list[int]
) -> None:
    task = task_of(bank, ran)
    row = published(connection, task)
    assert resent(bank, connection) == 1  # it seemed lost
    storing.store_unhandled(bank, dead(row, bank.conf.task_default_queue))  # and is found
    (letter,) = op.dead_letters(connection)
    waits = "its message waits to be sent; look again when it has been delivered"
    with pytest.raises(ChangeRefused, match=waits):
        correct(bank, connection, letter.id)
    assert why_not(bank, connection, letter.id) == waits
    relay = Relay(bank)
    relay.run_once()
    relay.close()
    assert why_not(bank, connection, letter.id) is None
    correct(bank, connection, letter.id)
    assert resent(bank, connection) == 0


def test_a_pass_that_has_found_a_message_lost_before_it_was_edited_does_not_send_it_again(
    bank: Celery, connection: Connection, ran: list[int]
) -> None:
    task = task_of(bank, ran)
    row = published(connection, task)
    found = lost.waiting(connection, runtime_of(bank).settings.service, after=0)
    assert [each.id for each in found] == [row.id]
    storing.store_unhandled(bank, dead(row, bank.conf.task_default_queue))
    correct(bank, connection, op.dead_letters(connection)[0].id)
    assert lost.send_again(connection, found) == 0
    assert op.outbox(connection)[0].status == "published"
