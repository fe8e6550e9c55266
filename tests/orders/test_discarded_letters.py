"""A letter that was discarded, or that says something else, hides no difference, no pending refund and no reserved money."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text

from idempotency.application import runtime_of, settings_of
from idempotency.errors import DiscardRefused
from idempotency.operate import discard
from idempotency.operate.cancel import cancel
from idempotency.operate.people import Person
from idempotency.store import outbox, purge
from idempotency.store.answers import error_text
from idempotency.store.rights import RELAY
from sandbox.process import Sandbox
from tasks.gateway import GatewayError
from tests.orders.shop import Shop
from tests.orders.test_reconciliation import found, paid
from tests.orders.test_report_doubts import posted_net
from tests.orders.test_reported_and_typed import ask, eventually
from tests.orders.test_reports import refund, report, settle
from tests.orders.test_reserved import refunded, row_of, seen
from tests.support.operators import ANN
from tests.support.sandbox import faults

pytestmark = pytest.mark.long

REFUND = "refunds.refund_payment"


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def reserved(shop: Shop) -> tuple[str, str]:
    """An order that was cancelled, and the refund of all its money, whose task has not begun."""
    order = shop.order()
    shop.run("order.paid > warehouse")
    shop.cancel(order)
    shop.run(REFUND)
    key = shop.one("SELECT id FROM refunds WHERE payment_id = :id", id=order)[0]
    assert row_of(shop, key)[0] == "reserved"
    return order, key


def discard_by_two(shop: Shop, task: str, key: str) -> None:
    query = "SELECT id FROM idempotency.dead_letters WHERE task = :task AND key LIKE :key AND status = 'open'"
    letter = shop.one(query, task=task, key=key)[0]
    with shop.operating():
        engine = runtime_of(shop.app).engine
        with engine.begin() as connection:
            discard.request(
                connection, Person("ann", "operator"), letter, "the provider was away; asked again tomorrow"
            )
        with engine.begin() as connection:
            discard.approve(connection, Person("ben", "admin"), letter, app=shop.app)


AGED = (
    "UPDATE idempotency.records SET expires_at = clock_timestamp() - interval '1 d', kept_until = NULL"
    " WHERE task = :task AND key LIKE :key",
    "UPDATE idempotency.dead_letters SET closed_at = clock_timestamp() - interval '31 d'"
    " WHERE task = :task AND key LIKE :key AND status <> 'open'",
    # as the relay has published them, the last one yesterday at this time
    "UPDATE idempotency.outbox SET status = 'published', settled_at = clock_timestamp() - interval '23 h 59 m',"
    " published_at = clock_timestamp() - interval '23 h 59 m' WHERE task = :task AND key LIKE :key",
)
LETTERS = "SELECT count(*) FROM idempotency.dead_letters WHERE task = :task AND key LIKE :key AND status = 'open'"


def a_month_later(shop: Shop, servers: Any, task: str, key: str) -> None:
    """The retentions of the failed operation and of its discarded letter are over, and the daily task has run each day. Purge."""
    owner = create_engine(make_url(servers.database_url).set(database=shop.engine.url.database))
    with owner.begin() as connection:
        for statement in AGED:
            connection.execute(text(statement), {"task": task, "key": key})
    owner.dispose()
    settings = settings_of(shop.app)
    with shop.operating(RELAY), runtime_of(shop.app).autocommit() as connection:
        purge.operations(connection, settings.service, horizon=settings.redelivery_horizon, limit=10_000)
        purge.letters(connection, settings.service, retention=settings.retention_dead_letters, limit=10_000)


def away(id: str) -> Any:
    raise GatewayError("the payment provider failed: 500")


@pytest.mark.parametrize("becomes", ["open", "discarded", "purged"])
def test_a_pending_refund_is_asked_about_again_after_an_outage(
    shop: Shop, gateway: Any, servers: Any, provider: Sandbox, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    """The provider answers 500 in the night in which it is asked about a refund that has failed meanwhile."""
    order, charge = paid(shop)
    faults(provider, next=["refund_fails"], only={})
    faults(provider, decision_ms=300)
    made = gateway._connection().client.v1.refunds.create({"payment_intent": charge, "amount": 300})
    about = {"object": "refund", "charge_id": charge, "amount": 300}
    task, key = "payments.ask_about_refund", f"stripe-{made.id}%"
    assert settle(shop, report(made.id, "pending", order, **about)) == ["applied"]
    assert eventually(lambda: gateway.refunded(made.id) is None)
    with monkeypatch.context() as patch:
        patch.setattr(gateway, "state_of_refund", away)
        ask(shop)
    assert shop.one(LETTERS, task=task, key=key)[0] == 1
    assert row_of(shop, f"stripe-{made.id}")[0] == "reserved"
    if becomes != "open":
        discard_by_two(shop, task, key)
    if becomes == "purged":
        a_month_later(shop, servers, task, key)
    ask(shop)
    assert row_of(shop, f"stripe-{made.id}") == ("refused", "lost_or_stolen_card")
    assert (refunded(shop, order), posted_net(shop, order)) == (0, 1000)


@pytest.mark.parametrize("was_away", [False, True])
def test_a_difference_has_a_letter_again_after_one_was_discarded(
    shop: Shop, gateway: Any, servers: Any, monkeypatch: pytest.MonkeyPatch, was_away: bool
) -> None:
    """`was_away`: the letter said nothing of the difference, because the provider did not answer."""
    order, charge = paid(shop)
    task, key = "payments.check_difference", f"charge:{charge}:%"
    with shop.books.begin() as connection:
        connection.execute(text("UPDATE ledger SET amount = 1 WHERE payment_id = :id"), {"id": order})
    assert charge in found(shop)
    with monkeypatch.context() as patch:
        if was_away:
            patch.setattr(gateway, "charge", away)
        shop.run()
    assert shop.one(LETTERS, task=task, key=key)[0] == 1
    for _ in range(2):  # told once, however often it is found
        if not was_away:
            found(shop)
            shop.run()
    assert shop.one(LETTERS, task=task, key=key)[0] == 1
    discard_by_two(shop, task, key)
    for _ in range(2):
        assert found(shop)[charge] == ("1000 EUR", "1 EUR")
        shop.run()
        assert shop.one(LETTERS, task=task, key=key)[0] == 1
    discard_by_two(shop, task, key)
    a_month_later(shop, servers, task, key)
    assert charge in found(shop)
    shop.run()
    assert shop.one(LETTERS, task=task, key=key)[0] == 1


def test_the_letter_of_a_refund_that_cannot_be_published_is_not_discarded_but_cancelled(shop: Shop) -> None:
    """An order is cancelled and all of its money reserved. The broker refuses the message for good: its queue was renamed."""
    order, key = reserved(shop)
    reserve = "UPDATE idempotency.outbox SET relayed_until = now() + interval '1 minute' WHERE key = :key RETURNING *"
    with shop.operating(RELAY), runtime_of(shop.app).engine.begin() as connection:
        row = connection.execute(text(reserve), {"key": key}).one()
        outbox.give_up(connection, row, error_text("unpublishable", "no queue"), service=settings_of(shop.app).service)
    with pytest.raises(DiscardRefused, match="cancel the operation first"):
        discard_by_two(shop, REFUND, key)
    with shop.operating():
        cancel(shop.app, seen(shop, key), ANN)
    assert row_of(shop, key) == ("refused", "cancelled")
    assert refunded(shop, order) == 0
    again = refund(shop, order, 1000)
    shop.run()
    assert row_of(shop, again)[0] == "refunded"
