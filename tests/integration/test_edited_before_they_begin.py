"""What becomes of an operation that has not begun, once the message of its letter was edited: the same as without the edit."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from idempotency import Operation, OperationId, PermanentError
from idempotency.application import runtime_of, settings_of
from idempotency.errors import ChangeRefused, DiscardRefused
from idempotency.letters import storing
from idempotency.operate import discard
from idempotency.operate.archive import archive, restore
from idempotency.operate.cancel import cancel
from idempotency.operate.edit import approve_edit, edit, why_not
from idempotency.operate.people import Person
from idempotency.operate.replay import replay
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.store import edits, flow, letter_pages, lost, operations, schema
from idempotency.store.outbox import _UNPUBLISHABLE
from idempotency.store.overview import monitoring_connection
from idempotency.upkeep import alarms, maintenance, overview
from idempotency.web.desk import Desk
from idempotency.web.preview import preview
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


def published(connection: Connection, task: Any) -> Any:
    """The row of an accepted operation, which has been sent and has not begun."""
    enqueued(connection, task, **FIVE)
    connection.execute(text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()"))
    return op.outbox(connection)[0]


def unhandled(bank: Celery, connection: Connection, task: Any) -> Any:
    """The letter of a message that the relay could not handle."""
    storing.store_unhandled(bank, dead_messages.dead(published(connection, task), bank.conf.task_default_queue))
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
    storing.store_unhandled(bank, dead_messages.dead(row, bank.conf.task_default_queue))  # and is found
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
    storing.store_unhandled(bank, dead_messages.dead(row, bank.conf.task_default_queue))
    correct(bank, connection, op.dead_letters(connection)[0].id)
    assert lost.send_again(connection, found) == 0
    assert op.outbox(connection)[0].status == "published"


# ---------------------------------------------------------------- what waits for a person is not due


def no_longer_unhandled(bank: Celery, connection: Connection, letter: Any) -> Any:
    """Replay the letter; its message dies again, before the operation has begun. The new letter."""
    replay(bank, letter.id, ANN)
    connection.execute(
        text(
            "UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp() WHERE status = 'pending'"
        )
    )
    storing.store_unhandled(bank, dead_messages.dead(op.outbox(connection)[-1], bank.conf.task_default_queue))
    return newest_open(connection, "unhandled")


def no_longer_unpublishable(bank: Celery, connection: Connection, letter: Any) -> Any:
    """Replay the letter; no broker takes its row again, as a relay finds (`outbox._GIVE_UP`). The new letter."""
    replay(bank, letter.id, ANN)
    connection.exec_driver_sql(
        f"""WITH failed AS (
            UPDATE idempotency.outbox SET status = 'failed', last_error = 'too long', attempts = attempts + 1,
                settled_at = clock_timestamp() WHERE status = 'pending' RETURNING *
        ) {_UNPUBLISHABLE}""",
        {"service": "bank"},
    )
    return newest_open(connection, "unpublishable")


def newest_open(connection: Connection, reason: str) -> Any:
    """The only open letter, which is of this reason; no record says that anything has run."""
    (found,) = [each for each in op.dead_letters(connection) if each.status == "open"]
    assert (found.reason, found.generation) == (reason, None)
    return found


AGAIN = pytest.mark.parametrize(
    ("letter_of", "died_again"), [(unhandled, no_longer_unhandled), (unpublishable, no_longer_unpublishable)]
)


def seen(bank: Celery, connection: Connection) -> tuple[list[str], int, float | None, int, Any]:
    """Alarms that last; as status, the flow and the operation itself have it: what is released, and when it is due."""
    settings, name = settings_of(bank), bank.conf.task_default_queue
    with monitoring_connection(settings) as monitoring:
        found = overview.take_snapshot(monitoring, bank, settings)
        queue = found.queues[name]
        released = flow.flow(monitoring, settings.service).queues.get(name, flow.Stages()).released
        lasting = [alarm.name for alarm in alarms.lasting(found, settings)]
    (id,) = {OperationId(row.tenant, row.task, row.key) for row in op.outbox(connection)}
    due = operations.operation(connection, id)["record"]["available_at"]
    return lasting, queue.released, queue.next_due_seconds, released, due


@pytest.mark.few(1)
@AGAIN
@pytest.mark.parametrize("is_archived", [True, False])
def test_what_was_edited_is_due_once_it_is_replayed_and_not_before(
    bank: Celery, connection: Connection, ran: list[int], letter_of: Any, died_again: Any, is_archived: bool
) -> None:
    """Else its queue has work for ever, which no worker is owed."""
    name: str = bank.conf.task_default_queue
    with bank.connection_for_write() as broker:
        bank.amqp.queues[name](broker.default_channel).declare()
    letter = letter_of(bank, connection, task_of(bank, ran))
    correct(bank, connection, letter.id)
    for _ in range(2):
        if is_archived:
            archive(bank, letter.id, ANN)
        assert seen(bank, connection) == ([], 0, None, 0, None)
        if is_archived:
            restore(bank, letter.id, ANN)
        letter = died_again(bank, connection, letter)
    replay(bank, letter.id, ANN)
    lasting, released, next_due, in_flow, due = seen(bank, connection)
    assert f"no_consumers/{name}" in lasting
    assert (released, in_flow) == (1, 1)
    assert next_due is not None
    assert next_due < 0
    assert due is not None


@AGAIN
def test_what_was_replayed_in_vain_is_edited_again_and_runs_with_the_last_arguments(
    bank: Celery, connection: Connection, deliveries: Deliveries, ran: list[int], letter_of: Any, died_again: Any
) -> None:
    task = task_of(bank, ran)
    letter = letter_of(bank, connection, task)
    correct(bank, connection, letter.id, cents=400)
    letter = died_again(bank, connection, letter)
    assert why_not(bank, connection, letter.id) is None
    correct(bank, connection, letter.id)
    assert resent(bank, connection) == 0
    replay(bank, letter.id, ANN)
    row = op.outbox(connection)[-1]
    connection.execute(
        text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp() WHERE id = :id"),
        {"id": row.id},
    )
    assert deliver_row(deliveries, task, row).value == {"refunded": 500}
    for cents in (5, 400, 500):  # whoever asks as before, by any of the edits
        assert deliveries.deliver(task, order_id="o1", cents=cents).value == {"refunded": 500}
    assert ran == [500]
    resend_lost(bank)
    assert all(each.settled_at is not None for each in op.outbox(connection)), (
        "nothing keeps the record from being purged"
    )


@pytest.mark.few(2)
@AGAIN
@pytest.mark.parametrize("is_purged", [True, False])
def test_a_cancel_closes_the_letter_of_what_was_replayed_in_vain(
    bank: Celery, connection: Connection, ran: list[int], letter_of: Any, died_again: Any, is_purged: bool
) -> None:
    """Also when the first letter, with the history of its edits, is purged by then."""
    task = task_of(bank, ran)
    letter = letter_of(bank, connection, task)
    correct(bank, connection, letter.id)
    letter = died_again(bank, connection, letter)
    if is_purged:
        connection.execute(text("DELETE FROM idempotency.dead_letters WHERE status = 'replayed'"))
    cancel(bank, shown(connection, task, "o1"), ANN)
    (left,) = [each for each in op.dead_letters(connection) if each.status == "open"]
    assert (left.reason, left.id != letter.id) == ("cancelled", True)
    resend_lost(bank)  # what a relay does: rows of operations that have ended are settled
    assert why_not(bank, connection, left.id) is None, "it can be corrected once more, and replayed"
    assert ran == []


def test_on_a_schema_without_edits_what_is_released_is_due(empty: Engine) -> None:
    schema.migrate(empty, "0020")
    with empty.connect() as connection:
        connection.execute(
            text(
                "INSERT INTO idempotency.records (tenant, task, key, status, fence, available_at, fingerprint, message, queue,"
                " attempts, service) VALUES ('t', 'x', 'k', 'released', 1, now() - interval '1 min', 'f', 'm', 'q', 0, 'bank')"
            )
        )
        assert flow.flow(connection, "bank").queues["q"].released == 1
        assert operations.operation(connection, OperationId("t", "x", "k"))["record"]["available_at"] is not None


def test_a_cancel_leaves_the_letter_of_another_request_open(
    bank: Celery, connection: Connection, deliveries: Deliveries
) -> None:
    """Another request under the key, which was refused: nobody has seen its letter, and nothing of it was replayed."""
    ran: list[int] = []
    task = task_of(bank, ran)
    letter = unhandled(bank, connection, task)
    correct(bank, connection, letter.id)
    enqueued(connection, task, order_id="o1", cents=77)
    deliver_row(deliveries, task, op.outbox(connection)[-1])
    cancel(bank, shown(connection, task, "o1"), ANN)
    others = [(each.reason, each.status) for each in op.dead_letters(connection) if each.id != letter.id]
    assert ("fingerprint_mismatch", "open") in others
    assert ran == []


def test_the_page_says_that_a_replay_runs_for_the_first_time_what_an_edit_has_opened(
    bank: Celery, connection: Connection
) -> None:
    task = task_of(bank, [])
    letter = unhandled(bank, connection, task)
    correct(bank, connection, letter.id)
    desk = cast(Desk, SimpleNamespace(celery=bank, service=settings_of(bank).service))
    row = letter_pages.show(connection, desk.service, None, letter.id)
    looked = preview(desk, connection, row, operations.operation(connection, operation(task)))
    assert looked.runs == "Its body has not begun yet; a replay runs it for the first time."
