"""Proofs of a reader: each passes while the defect exists."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text

from idempotency.application import runtime_of, settings_of
from idempotency.operate import discard
from idempotency.operate.people import Person
from idempotency.store import purge
from idempotency.store.rights import RELAY
from sandbox.process import Sandbox
from tasks.gateway import GatewayError
from tests.orders.shop import Shop
from tests.orders.test_reconciliation import found, paid
from tests.orders.test_report_doubts import posted_net
from tests.orders.test_reported_and_typed import ask, eventually
from tests.orders.test_reports import refund, report, settle
from tests.orders.test_reserved import refunded, row_of
from tests.support.sandbox import faults

OPEN = "SELECT count(*) FROM idempotency.dead_letters WHERE task = 'payments.ask_about_refund' AND status = 'open'"


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def discard_by_two(shop: Shop, task: str, key: str) -> None:
    query = "SELECT id FROM idempotency.dead_letters WHERE task = :task AND key LIKE :key AND status = 'open'"
    letter = shop.one(query, task=task, key=key)[0]
    with shop.operating():
        engine = runtime_of(shop.app).engine
        with engine.begin() as connection:
            discard.request(connection, Person("ann", "operator"), letter, "the provider was away; asked again tomorrow")
        with engine.begin() as connection:
            discard.approve(connection, Person("ben", "admin"), letter)


@pytest.mark.parametrize("is_discarded", [False, True])
def test_a_pending_refund_is_asked_about_no_more_after_one_outage(
    shop: Shop, gateway: Any, provider: Sandbox, monkeypatch: pytest.MonkeyPatch, is_discarded: bool
) -> None:
    """The provider answers 500 for some minutes, in the night in which it is asked about a pending refund. That question's operation
    fails. From then on the refund is never asked about, though the provider is back; once two people have discarded the letter of
    the outage, nothing says so: the amount of a refund that has failed stays reserved, and no reconciliation names it."""
    order, charge = paid(shop)
    faults(provider, next=["refund_fails"], only={})
    faults(provider, decision_ms=300)
    made = gateway._connection().client.v1.refunds.create({"payment_intent": charge, "amount": 300})
    about = {"object": "refund", "charge_id": charge, "amount": 300}
    assert settle(shop, report(made.id, "pending", order, **about)) == ["applied"]
    assert eventually(lambda: gateway.refunded(made.id) is None)  # it has failed, and the webhook is lost

    def away(id: str) -> Any:
        raise GatewayError("the payment provider failed: 500")

    before = shop.one(OPEN)[0]
    with monkeypatch.context() as patch:
        patch.setattr(gateway, "state_of_refund", away)
        ask(shop)
    assert shop.one(OPEN)[0] == before + 1
    if is_discarded:
        discard_by_two(shop, "payments.ask_about_refund", f"stripe-{made.id}%")
        assert shop.one(OPEN)[0] == before
    for _ in range(5):  # the next days: the provider would say at once that it has failed
        ask(shop)
    assert row_of(shop, f"stripe-{made.id}")[0] == "reserved"
    assert (refunded(shop, order), posted_net(shop, order)) == (300, 1000)
    rest = refund(shop, order, 1000)
    shop.run()
    assert row_of(shop, rest) == ("refused", "exceeds_captured")
    assert made.id not in found(shop)
    assert shop.one(OPEN)[0] == before + (0 if is_discarded else 1)


AGED = (
    "UPDATE idempotency.records SET expires_at = clock_timestamp() - interval '1 d', kept_until = NULL"
    " WHERE task = :task AND key LIKE :key",
    "UPDATE idempotency.dead_letters SET closed_at = clock_timestamp() - interval '31 d'"
    " WHERE task = :task AND key LIKE :key AND status <> 'open'",
    # as the relay has published them, the last one yesterday at this time
    "UPDATE idempotency.outbox SET status = 'published', settled_at = clock_timestamp() - make_interval(hours => :hours, mins => 59),"
    " published_at = clock_timestamp() - make_interval(hours => :hours, mins => 59) WHERE task = :task AND key LIKE :key",
)


def a_month_later(shop: Shop, servers: Any, task: str, key: str, *, hours: int = 23) -> int:
    """The retention of the failed operation and of its discarded letter is over, and the daily task has run each day. Purge."""
    owner = create_engine(make_url(servers.database_url).set(database=shop.engine.url.database))
    with owner.begin() as connection:
        for statement in AGED:
            connection.execute(text(statement), {"task": task, "key": key} | ({"hours": hours} if ":hours" in statement else {}))
    owner.dispose()
    service = settings_of(shop.app).service
    with shop.operating(RELAY), runtime_of(shop.app).autocommit() as connection:
        purge.operations(connection, service, horizon=settings_of(shop.app).redelivery_horizon, limit=10_000)
        purge.letters(connection, service, retention=settings_of(shop.app).retention_dead_letters, limit=10_000)
    query = "SELECT count(*) FROM idempotency.records WHERE task = :task AND key LIKE :key"
    return int(shop.one(query, task=task, key=key)[0])


def test_what_was_discarded_once_is_asked_about_no_more_for_ever(
    shop: Shop, gateway: Any, servers: Any, provider: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, and a month later: each day's question is another message under the key of the one that has failed, which keeps that
    record from being purged for another redelivery horizon, which is a day. So it is never free again."""
    order, charge = paid(shop)
    faults(provider, next=["refund_fails"], only={})
    faults(provider, decision_ms=300)
    made = gateway._connection().client.v1.refunds.create({"payment_intent": charge, "amount": 300})
    about = {"object": "refund", "charge_id": charge, "amount": 300}
    assert settle(shop, report(made.id, "pending", order, **about)) == ["applied"]
    assert eventually(lambda: gateway.refunded(made.id) is None)

    def away(id: str) -> Any:
        raise GatewayError("the payment provider failed: 500")

    with monkeypatch.context() as patch:
        patch.setattr(gateway, "state_of_refund", away)
        ask(shop)
    discard_by_two(shop, "payments.ask_about_refund", f"stripe-{made.id}%")
    before = shop.one(OPEN)[0]
    for _ in range(2):
        ask(shop)
        # its letter is purged by now, so that nothing shows that it was ever asked
        assert a_month_later(shop, servers, "payments.ask_about_refund", f"stripe-{made.id}%") == 1
    left = "SELECT count(*) FROM idempotency.dead_letters WHERE key LIKE :key"
    assert shop.one(left, key=f"stripe-{made.id}%")[0] == 0
    ask(shop)
    assert row_of(shop, f"stripe-{made.id}")[0] == "reserved"
    assert (refunded(shop, order), shop.one(OPEN)[0]) == (300, before)
    # the cause: had the daily task been off for a day, it would be purged, and the next question would be asked and answered
    assert a_month_later(shop, servers, "payments.ask_about_refund", f"stripe-{made.id}%", hours=24) == 0
    ask(shop)
    assert row_of(shop, f"stripe-{made.id}") == ("refused", "lost_or_stolen_card")


def test_a_difference_that_comes_back_after_its_letter_was_discarded_is_told_nobody(
    shop: Shop, gateway: Any, servers: Any
) -> None:
    """A person mends a difference, and discards its letter instead of replaying it. A month later the same is wrong again."""
    order, charge = paid(shop)
    task, key = "payments.check_difference", f"charge:{charge}:%"

    def wrong(amount: int) -> None:
        with shop.books.begin() as connection:
            connection.execute(text("UPDATE ledger SET amount = :amount WHERE payment_id = :id"), {"amount": amount, "id": order})

    wrong(999)
    for _ in range(2):
        assert charge in found(shop)
        shop.run()
    discard_by_two(shop, task, key)
    wrong(1000)
    assert charge not in found(shop)
    wrong(999)  # or it was not mended as the person thought
    for _ in range(2):
        assert charge in found(shop)
        shop.run()
        assert a_month_later(shop, servers, task, key) == 1
    letters = "SELECT count(*) FROM idempotency.dead_letters WHERE task = :task AND key LIKE :key"
    assert shop.one(letters, task=task, key=key)[0] == 0


def test_a_real_difference_whose_check_met_an_outage_is_told_nobody_once_that_letter_is_discarded(
    shop: Shop, gateway: Any, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The letter says `attempts_exhausted` and an error 500, and nothing of a difference. The difference lasts, and has no letter ever."""
    order, charge = paid(shop)
    task, key = "payments.check_difference", f"charge:{charge}:%"
    with shop.books.begin() as connection:
        connection.execute(text("UPDATE ledger SET amount = 1 WHERE payment_id = :id"), {"id": order})

    def away(id: str) -> Any:
        raise GatewayError("the payment provider failed: 500")

    assert charge in found(shop)
    with monkeypatch.context() as patch:
        patch.setattr(gateway, "charge", away)
        shop.run()
    query = "SELECT reason, last_error FROM idempotency.dead_letters WHERE task = :task AND key LIKE :key AND status = 'open'"
    letter = shop.one(query, task=task, key=key)
    assert (letter.reason, "ledger" in letter.last_error) == ("attempts_exhausted", False)
    discard_by_two(shop, task, key)
    for _ in range(2):
        assert found(shop)[charge] == ("1000 EUR", "1 EUR")  # 999 are missing in the ledger
        shop.run()
        assert a_month_later(shop, servers, task, key) == 1
    letters = "SELECT count(*) FROM idempotency.dead_letters WHERE task = :task AND key LIKE :key"
    assert shop.one(letters, task=task, key=key)[0] == 0
