"""What was found by reading: each test passes while the fault is there."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text

from idempotency.errors import ChangeRefused
from idempotency.operate.change import Change, read
from idempotency.operate.edit import edit, why_not
from idempotency.operate.erase import erase
from idempotency.operate.replay import replay
from idempotency.store import edits
from idempotency.store.outbox import _UNPUBLISHABLE
from idempotency.wire.keys import OperationId
from tests.integration.test_edit import ANN, RIGHT, WRONG, payload, task_of
from tests.support import operations as op
from tests.support.dead_messages import unpublishable
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.tasks import enqueued


@pytest.fixture
def deliveries(bank: Celery) -> Deliveries:
    return Deliveries(bank)


@pytest.fixture
def ran(bank: Celery) -> list[int]:
    return []


def give_up(connection: Connection) -> None:
    """As a relay does with a row that can never be published (`outbox._GIVE_UP`)."""
    connection.exec_driver_sql(
        f"""WITH failed AS (
            UPDATE idempotency.outbox SET status = 'failed', last_error = 'too long', attempts = attempts + 1,
                settled_at = clock_timestamp() WHERE status = 'pending' RETURNING *
        ) {_UNPUBLISHABLE}""",
        {"service": "bank"},
    )


def test_what_has_not_begun_is_not_edited_again_once_its_replay_could_not_be_published(
    bank: Celery, connection: Connection, deliveries: Deliveries, ran: list[int]
) -> None:
    """Only what has failed, or has not begun, is edited. It has not begun, and is refused with just these words."""
    task = task_of(bank, ran)
    first = unpublishable(connection, task, **WRONG)
    edit(bank, first.id, payload(order_id="o1", cents=400), ANN)
    replay(bank, first.id, ANN)
    give_up(connection)
    second = op.dead_letters(connection)[-1]
    record = op.record(connection, OperationId("default", task.name, "o1"))
    assert (second.reason, second.status, record.status, record.attempts, ran) == ("unpublishable", "open", "released", 0, [])
    with pytest.raises(ChangeRefused, match="its operation is released; only what has failed, or has not begun, is edited"):
        edit(bank, second.id, payload(**RIGHT), ANN)
    assert "only what has failed, or has not begun, is edited" in (why_not(bank, connection, second.id) or "")


def test_an_erasure_by_code_of_before_leaves_what_a_person_has_edited(
    bank: Celery, connection: Connection, deliveries: Deliveries, ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of 0020 runs beside this, and knows no history of edits."""
    task = task_of(bank, ran)
    deliveries.deliver(task, **WRONG)
    (letter,) = op.dead_letters(connection)
    edit(bank, letter.id, payload(**RIGHT), ANN)
    replay(bank, letter.id, ANN)
    row = op.outbox(connection)[-1]
    connection.execute(text("UPDATE idempotency.outbox SET status = 'published', published_at = now()"))
    assert deliver_row(deliveries, task, row).value == {"refunded": 500}
    connection.execute(text("UPDATE idempotency.outbox SET settled_at = now()"))
    id = OperationId("default", task.name, "o1")
    monkeypatch.setattr(edits, "erase", lambda *_: None)
    erase(bank, read(connection, id, "bank").id, Change("ann", "article 17"))
    assert op.record(connection, id).erased_at is not None
    (kept,) = edits.history(connection, letter.id)
    assert '\\"cents\\": 500' in kept.after or "500" in kept.after
    assert "-5" in kept.before


def test_what_was_edited_and_archived_is_due_for_ever_and_an_alarm_without_any_work(
    bank: Celery, connection: Connection, deliveries: Deliveries, ran: list[int]
) -> None:
    """Without the edit, the same letter is on no list, count or alarm; with it, its queue has work that no worker is owed."""
    from idempotency.operate.archive import archive
    from tests.integration.test_alarms import now
    from tests.integration.test_edited_before_they_begin import unhandled

    name: str = bank.conf.task_default_queue
    with bank.connection_for_write() as broker:
        bank.amqp.queues[name](broker.default_channel).declare()
    task = task_of(bank, ran)
    letter = unhandled(bank, connection, task)
    assert now(bank) == [], "nothing is due: it waits for a person"
    edit(bank, letter.id, payload(order_id="o1", cents=500), ANN)
    archive(bank, letter.id, Change("ann", "next quarter"))
    assert now(bank) == [f"no_consumers/{name}"]
    from idempotency.application import settings_of
    from idempotency.store.overview import monitoring_connection
    from idempotency.upkeep import overview

    with monitoring_connection(settings_of(bank)) as monitoring:
        found = overview.status(monitoring, bank, settings_of(bank))["queues"][name]
    assert (found["released"], found["ready"]) == (1, 0)
    assert found["next_due_seconds"] < 0


@pytest.mark.parametrize("is_edited", [False, True])
def test_a_cancel_leaves_the_letter_open_of_what_was_edited_replayed_and_died_again(
    bank: Celery, connection: Connection, deliveries: Deliveries, ran: list[int], is_edited: bool
) -> None:
    """Without the edit, a cancel closes it; with it, there is one more open letter that can neither be replayed nor edited."""
    from idempotency.errors import ReplayRefused
    from idempotency.letters import storing
    from idempotency.operate.cancel import cancel
    from tests.integration.test_edited_before_they_begin import dead, unhandled

    task = task_of(bank, ran)
    id = OperationId("default", task.name, "o1")
    first = unhandled(bank, connection, task)
    if is_edited:
        edit(bank, first.id, payload(order_id="o1", cents=500), ANN)
    replay(bank, first.id, ANN)
    connection.execute(text("UPDATE idempotency.outbox SET status = 'published', published_at = now() WHERE status = 'pending'"))
    row = op.outbox(connection)[-1]
    storing.store_unhandled(bank, dead(row, bank.conf.task_default_queue))
    second = op.dead_letters(connection)[-1]
    assert (second.reason, second.status, second.id != first.id) == ("unhandled", "open", True)
    cancel(bank, read(connection, id, "bank"), Change("ann", "given up"))
    found = [(each.id == second.id, each.reason, each.status) for each in op.dead_letters(connection)][1:]
    assert ran == []
    if not is_edited:
        assert found == [(True, "unhandled", "replayed"), (False, "cancelled", "open")]
        return
    assert found == [(True, "unhandled", "open"), (False, "cancelled", "open")]
    with pytest.raises(ReplayRefused, match="only one that failed in the letter's generation"):
        replay(bank, second.id, ANN)
    last = op.dead_letters(connection)[-1]
    with pytest.raises(ChangeRefused, match="another dead letter of its operation is open"):
        edit(bank, last.id, payload(**RIGHT), ANN)
