"""The letter of an accepted operation that has not begun is not discarded while its `on_failed` has to be told: it would reserve its money for ever."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kombu import Message as BrokerMessage
from sqlalchemy import text

from idempotency.application import runtime_of, settings_of
from idempotency.errors import DiscardRefused
from idempotency.letters import storing
from idempotency.letters.editing import arguments_of
from idempotency.operate import discard
from idempotency.operate.cancel import cancel
from idempotency.operate.edit import approve_edit, edit
from idempotency.operate.people import Person
from idempotency.store import edits
from idempotency.store.rights import RELAY
from idempotency.wire.headers import GENERATION_HEADER, OUTBOX_HEADER, SERVICE_HEADER
from idempotency.wire.message import Message
from tests.orders.shop import Shop
from tests.orders.test_discarded_letters import REFUND, reserved
from tests.orders.test_reserved import refunded, row_of, seen
from tests.support.operators import ANN

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def dead(row: Any) -> BrokerMessage:
    """The refund's message as the broker's dead-letter queue has it."""
    message = Message.from_text(row.message)
    marks = {OUTBOX_HEADER: row.message_id, GENERATION_HEADER: row.generation, SERVICE_HEADER: row.service}
    return BrokerMessage(
        body=message.body,
        headers={**message.headers, **marks, "x-death": [{"queue": "refunds", "reason": "rejected"}]},
        content_type="application/json",
        content_encoding="utf-8",
        delivery_info={"routing_key": "refunds.dead_letters", "exchange": ""},
        channel=None,
        properties={},
        delivery_tag="1",
        accept={"application/json"},
    )


@pytest.mark.parametrize("reason", ["unknown_task", "unhandled"])
def test_the_letter_of_a_refund_that_has_not_begun_is_not_discarded_but_cancelled(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """An old release, or a worker with a missing module, did not know the task for longer than `unknown_task_grace`."""
    order, key = reserved(shop)
    (sent,) = [each for each in shop.waiting() if each.row.key == key]
    with shop.operating(RELAY):
        published = (
            "UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp() WHERE id = :id"
        )
        with runtime_of(shop.app).engine.begin() as connection:
            connection.execute(text(published), {"id": sent.row.id})
        if reason == "unhandled":
            storing.store_unhandled(shop.app, dead(sent.row))
        else:
            task = shop.app.tasks.pop(REFUND)  # the relay that finds it is of the old release, too
            no_grace = settings_of(shop.app).model_copy(update={"unknown_task_grace": 0.0})
            monkeypatch.setattr(runtime_of(shop.app), "settings", no_grace)
            try:
                storing.store(shop.app, dead(sent.row))
            finally:
                shop.app.tasks[REFUND] = task
    found = "SELECT id, reason, task FROM idempotency.dead_letters WHERE key = :key AND status = 'open'"
    letter = shop.one(found, key=key)
    assert letter.reason == reason
    with shop.operating():
        engine = runtime_of(shop.app).engine
        with engine.begin() as connection:
            discard.request(connection, Person("ann", "operator"), letter.id, "of an old release")
        with engine.begin() as connection, pytest.raises(DiscardRefused, match="cancel the operation first"):
            discard.approve(connection, Person("ben", "admin"), letter.id, app=shop.app)
    assert row_of(shop, key)[0] == "reserved"
    with shop.operating():
        cancel(shop.app, seen(shop, key), ANN)
    assert (row_of(shop, key)[0], refunded(shop, order)) == ("refused", 0)
    assert shop.one(found, key=key)[1] == "cancelled"


def test_a_refund_that_was_edited_before_it_began_gives_its_money_back_when_it_is_cancelled(shop: Shop) -> None:
    order, key = reserved(shop)
    (sent,) = [each for each in shop.waiting() if each.row.key == key]
    with shop.operating(RELAY):
        with runtime_of(shop.app).engine.begin() as connection:
            connection.execute(
                text(
                    "UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp() WHERE id = :id"
                ),
                {"id": sent.row.id},
            )
        storing.store_unhandled(shop.app, dead(sent.row))
    letter = shop.one("SELECT id, payload FROM idempotency.dead_letters WHERE key = :key AND status = 'open'", key=key)
    found = arguments_of(Message.from_text(letter.payload))
    assert found is not None
    args, kwargs, _ = found
    less = {"args": [_less(each) for each in args], "kwargs": {name: _less(each) for name, each in kwargs.items()}}
    with shop.operating():
        edit(shop.app, letter.id, json.dumps(less), ANN, person=Person("ann", "operator"))
        with runtime_of(shop.app).engine.connect() as connection:
            (asked,) = edits.history(connection, letter.id)
        approve_edit(shop.app, Person("ben", "admin"), letter.id, asked.id)
        cancel(shop.app, seen(shop, key), ANN)
    assert (row_of(shop, key)[0], refunded(shop, order)) == ("refused", 0)


def _less(argument: Any) -> Any:
    """An amount, less one cent."""
    return argument - 1 if type(argument) is int else argument
