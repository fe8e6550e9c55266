"""What a provider has told, or a person has typed, is neither charged again nor in doubt, reserved or named for ever."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from idempotency import Happened
from idempotency.store.rights import RELAY
from sandbox.process import Sandbox
from tests.orders.shop import Shop
from tests.orders.test_money_concluded import CASE, KEY, LOST, has_failed
from tests.orders.test_provider_doubts import charges, pay
from tests.orders.test_reconciliation import found, paid
from tests.orders.test_report_doubts import of_refund, posted_net
from tests.orders.test_reports import captured, operation, refund, report, settle
from tests.orders.test_reserved import give_up, in_doubt, lost, refunded, resolve, row_of
from tests.support.sandbox import faults

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def intents(gateway: Any, payment_id: str) -> list[Any]:
    listing = {"limit": 100}
    page = gateway._connection().client.v1.payment_intents.list(listing)
    return [each for each in page.auto_paging_iter() if each.to_dict()["metadata"].get("purchase_id") == payment_id]


def capture_key(shop: Shop, payment_id: str) -> str:
    query = "SELECT effects -> 'capture' ->> 'key' FROM idempotency.records WHERE key = :id AND task = 'payments.capture_payment'"
    return str(shop.one(query, id=payment_id)[0])


def test_a_charge_that_is_reported_as_processing_is_not_made_again(shop: Shop, gateway: Any, provider: Sandbox) -> None:
    """500 stored, the intent is processing and its webhook has told us so; the search lags behind."""
    payment_id = pay(shop)
    faults(provider, next=["error_500_after"], only={"purchase_id": payment_id})
    faults(provider, search_lag_ms=3_600_000, undecided=1.0, decision_ms=2000)
    try:
        shop.deliver(shop.waiting()[0])
        (one,) = intents(gateway, payment_id)
        assert one.status == "processing"
        told = report(one.id, "processing", payment_id, effect_key=capture_key(shop, payment_id))
        assert settle(shop, told) == ["applied"]
        for _ in range(3):
            if shop.waiting():
                shop.deliver(shop.waiting()[0])
        status = shop.one("SELECT status FROM payments WHERE id = :id", id=payment_id)[0]
        (one,) = intents(gateway, payment_id)
        # a machine under load may have taken so long that it is decided
        assert status == "pending" or one.status == "succeeded"
        assert eventually(lambda: intents(gateway, payment_id)[0].status == "succeeded")
        shop.run()
    finally:
        faults(provider, search_lag_ms=0)
    assert len(charges(gateway, payment_id)) == 1
    assert shop.one("SELECT status FROM payments WHERE id = :id", id=payment_id)[0] == "captured"


def test_a_payment_that_is_known_to_be_captured_is_not_charged_again_under_a_key_in_doubt(
    shop: Shop, gateway: Any, provider: Sandbox
) -> None:
    payment_id = pay(shop)
    faults(provider, next=["error_500_after"], only={"purchase_id": payment_id})
    faults(provider, search_lag_ms=3_600_000)
    real = gateway.capture
    keys: list[str] = []

    def capture(**call: Any) -> Any:
        if call["idempotency_key"] not in keys:
            keys.append(call["idempotency_key"])
        if len(keys) == 2 and call["idempotency_key"] == keys[1]:
            lost()  # the connection breaks before the call is there
        return real(**call)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gateway, "capture", capture)
            while len(keys) < 2:
                shop.deliver(shop.waiting()[0])
        (charge,) = charges(gateway, payment_id)
        assert settle(shop, report(charge.id, "succeeded", payment_id, effect_key=keys[0])) == ["applied"]
        assert shop.one("SELECT status FROM payments WHERE id = :id", id=payment_id)[0] == "captured"
        shop.run()
    finally:
        faults(provider, search_lag_ms=0)
    assert [each.id for each in charges(gateway, payment_id)] == [charge.id]
    assert operation(shop, payment_id)[0] == "completed"


def test_a_pending_refund_of_the_site_whose_failure_no_webhook_tells_is_asked_about(
    shop: Shop, gateway: Any, provider: Sandbox
) -> None:
    order, charge = paid(shop)
    faults(provider, next=["refund_fails"], only={})
    faults(provider, decision_ms=300)
    made = gateway._connection().client.v1.refunds.create({"payment_intent": charge, "amount": 300})
    assert made.status == "pending"
    about = {"object": "refund", "charge_id": charge, "amount": 300}
    assert settle(shop, report(made.id, "pending", order, **about)) == ["applied"]
    assert eventually(lambda: gateway.refunded(made.id) is None)  # it has failed, and the webhook is lost
    assert row_of(shop, f"stripe-{made.id}")[0] == "reserved"
    ask(shop)
    assert row_of(shop, f"stripe-{made.id}") == ("refused", "lost_or_stolen_card")
    all_of_it = refund(shop, order, 1000)
    shop.run()
    assert (row_of(shop, all_of_it)[0], posted_net(shop, order)) == ("refunded", 0)


def test_a_refund_of_the_site_that_is_told_while_its_charge_is_noted_is_applied_within_a_day(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report sees no charge in the books yet, and the commit that brings it there does not see the report."""
    from tasks import reconciliation
    from tasks.reported import settle_later

    order, told = shop.order(), []

    def crossing(session: Any, payment: Any) -> None:
        settle_later(session, payment)
        about = {"object": "refund", "charge_id": payment.charge_id, "amount": 300}
        told.append(settle(shop, report(f"re_{uuid4().hex}", "succeeded", None, **about)))  # commits before this does

    monkeypatch.setattr("tasks.payments.settle_later", crossing)
    shop.run()
    assert told == [["waiting"]]
    assert posted_net(shop, order) == 1000
    with shop.operating(RELAY):
        assert reconciliation.settle_waiting_before(datetime.now(UTC) + timedelta(seconds=5)) == 1
    shop.run()
    assert posted_net(shop, order) == 700


def ask(shop: Shop) -> None:
    """As the daily reconciliation does."""
    from tasks import reconciliation

    with shop.operating(RELAY):
        assert reconciliation.ask_about_pending(datetime.now(UTC) + timedelta(seconds=5)) >= 1
    shop.run()


def eventually(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def two_in_doubt(shop: Shop, order: str) -> tuple[str, str]:
    one, two = refund(shop, order), refund(shop, order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", lost)
        for sent in [each for each in shop.waiting() if each.row.key in (one, two)]:
            shop.deliver(sent)
    return one, two


def test_what_has_failed_is_told_to_nobody_as_refunded_if_a_person_takes_it_for_another(shop: Shop) -> None:
    """Two refunds in doubt; the one has been made, and has failed, as the provider has answered; then a person takes its id."""
    order, charge = captured(shop)
    one, two = two_in_doubt(shop, order)
    there = f"re_x{order}"  # is of `two`
    give_up(shop, one)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", lost)
        patch.setattr(shop.provider, "find_refund", lambda **_: has_failed(there))
        shop.run()
    assert row_of(shop, two) == ("refused", LOST)
    failed = replace(of_refund(order, two, charge, "failed", there), effect_key=shop.one(KEY, id=two)[0])
    assert settle(shop, failed) == ["duplicate"]
    resolve(shop, one, Happened({"id": there, "amount": 400, "currency": "EUR", "status": "succeeded"}))
    shop.replay(one)
    shop.run()
    assert (row_of(shop, one)[0], posted_net(shop, order)) == ("reversed", 1000)
    assert len(shop.events("payment.refunded", order)) == 0
    assert settle(shop, replace(failed, event_id=f"again{order}")) == ["duplicate"]
    shop.run()
    assert (row_of(shop, one)[0], posted_net(shop, order)) == ("reversed", 1000)


def test_the_case_of_a_part_that_has_come_back_and_was_given_back_again_ends(shop: Shop) -> None:
    order, charge = captured(shop)
    one = refund(shop, order, 400)
    shop.run()
    there = shop.one("SELECT provider_refund_id FROM refunds WHERE id = :id", id=one)[0]
    assert settle(shop, of_refund(order, one, charge, "failed", there, 400)) == ["applied"]
    shop.run()
    assert shop.one(CASE, id=order)[0] == "refund_failed"
    again = refund(shop, order, 400)
    shop.run()
    assert (row_of(shop, again)[0], posted_net(shop, order)) == ("refunded", 600)
    assert shop.one(CASE, id=order)[0] == "recovered"


def test_a_second_charge_that_a_person_has_given_back_is_no_difference(shop: Shop, gateway: Any) -> None:
    order, charge = paid(shop)
    about = {"customer_id": "c1", "amount": 1000, "currency": "EUR"}
    second = gateway.capture(payment_id=order, **about, idempotency_key=uuid4().hex)["id"]
    assert settle(shop, report(second, "succeeded", order)) == ["waiting"]
    assert found(shop)[second] == ("1000 EUR", f"1000 EUR as {charge}")
    shop.run()
    back = gateway._connection().client.v1.refunds.create({"payment_intent": second, "amount": 1000})
    bare = report(back.id, "succeeded", order, object="refund", charge_id=second, amount=1000)
    assert settle(shop, bare) == ["waiting"]
    shop.run()
    assert not {second, back.id} & found(shop).keys()
    letter = shop.one(
        "SELECT min(key) FROM idempotency.dead_letters WHERE key LIKE :key AND status = 'open'",
        key=f"charge:{second}:%",
    )[0]
    shop.replay(letter)
    shop.run()
    assert shop.one("SELECT status FROM idempotency.records WHERE key = :key", key=letter)[0] == "completed"


def test_a_refund_whose_id_a_person_has_given_to_another_is_in_the_books_once(shop: Shop) -> None:
    """Nothing was made for `one`; `two` was. A person confuses them, and no command can mend it."""
    order, _ = captured(shop)
    one, two = two_in_doubt(shop, order)
    there = f"re_x{order}"
    made = Happened({"id": there, "amount": 400, "currency": "EUR", "status": "succeeded"})
    give_up(shop, one)
    resolve(shop, one, made)
    shop.replay(one)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", lost)
        patch.setattr(shop.provider, "find_refund", lambda **_: made)
        shop.run()
    assert (row_of(shop, one), row_of(shop, two)) == (("refunded", None), ("refused", "refund_of_another"))
    assert (refunded(shop, order), posted_net(shop, order)) == (400, 600)
    rest = refund(shop, order, 600)
    shop.run()
    assert row_of(shop, rest)[0] == "refunded"


def test_a_cancelled_order_whose_refund_was_in_doubt_before_has_a_case(shop: Shop) -> None:
    order = shop.order()
    shop.run("order.paid > warehouse")
    doubtful = in_doubt(shop, shop.provider, order, 1000)
    shop.cancel(order)
    shop.run()
    assert shop.status(order)[0] == "CANCELLED"
    assert (row_of(shop, doubtful)[0], posted_net(shop, order)) == ("unknown", 1000)
    assert shop.one(CASE, id=order)[0] == "refund_failed"


def test_a_cancelled_orders_case_lasts_while_a_part_is_still_under_way(shop: Shop) -> None:
    order = shop.order()
    shop.run("order.paid > warehouse")
    shop.provider.keeps.add(order)
    shop.cancel(order)
    shop.run()
    shop.provider.keeps.discard(order)
    assert shop.one(CASE, id=order)[0] == "refund_failed"
    slow, quick = refund(shop, order, 600), refund(shop, order, 400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", lost)
        shop.deliver(next(each for each in shop.waiting() if each.row.key == slow))
    shop.run(slow, "refunds.refund_payment")
    shop.deliver(next(each for each in shop.waiting() if each.row.key == quick))
    shop.run("refunds.refund_payment")
    assert (row_of(shop, slow)[0], row_of(shop, quick)[0], posted_net(shop, order)) == ("reserved", "refunded", 600)
    assert shop.one(CASE, id=order)[0] == "refund_failed"


@pytest.mark.parametrize("typed", ["n/a", ".."])
def test_what_a_person_has_typed_as_an_id_stops_no_reconciliation(
    shop: Shop, gateway: Any, typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import maintenance, reconciliation

    order, _ = paid(shop)
    refund_id = in_doubt(shop, gateway, order)
    resolve(shop, refund_id, Happened({"id": typed, "amount": 400, "currency": "EUR", "status": "succeeded"}))
    shop.replay(refund_id)
    shop.run()
    assert row_of(shop, refund_id)[0] == "refunded"
    with shop.books.begin() as connection:  # three weeks ago
        connection.execute(
            text("UPDATE refunds SET created_at = created_at - interval '20 days' WHERE id = :id"), {"id": refund_id}
        )
    about = {"customer_id": "c1", "amount": 700, "currency": "EUR"}
    missing = gateway.capture(payment_id=f"lost-{uuid4().hex}", **about, idempotency_key=uuid4().hex)["id"]
    monkeypatch.setattr(reconciliation, "SETTLED_AFTER", timedelta(seconds=-5))
    with shop.operating(RELAY):
        maintenance.reconcile_provider()
    shop.run()
    letters = "SELECT count(*) FROM idempotency.dead_letters WHERE reason = 'ledger_differs' AND last_error LIKE :said"
    assert shop.one(letters, said=f"%{missing}%")[0] == 1
    assert shop.one(letters, said=f"%refund {typed} of {refund_id}: the provider has nothing%")[0] == 1


def test_a_refund_at_another_provider_is_no_difference_at_stripe_after_the_migration(
    shop: Shop, gateway: Any, servers: Any
) -> None:
    """As code of 0005 has left them: the payment by a report, its refund by a person's word."""
    from sqlalchemy import create_engine
    from sqlalchemy.engine import make_url

    payment = pay(shop)
    assert settle(shop, report(f"ch-{payment}", "succeeded", payment, gateway="payment")) == ["applied"]
    shop.run()
    refund_id, there = in_doubt(shop, gateway, payment), f"re-{payment}"
    resolve(shop, refund_id, Happened({"id": there, "amount": 400, "currency": "EUR", "status": "succeeded"}))
    shop.replay(refund_id)
    shop.run()
    assert (row_of(shop, refund_id)[0], posted_net(shop, payment)) == ("refunded", 600)
    assert there not in found(shop)
    from importlib import import_module

    v0006 = import_module("tasks.migrations.versions.v0006_one_object_once")
    owner = create_engine(make_url(servers.database_url).set(database=shop.engine.url.database))
    with owner.begin() as connection:
        connection.execute(text("ALTER TABLE payments DROP COLUMN gateway; ALTER TABLE refunds DROP COLUMN gateway;"))
        connection.execute(text(v0006.GATEWAYS))
    owner.dispose()
    shop.engine.dispose()
    shop.books.dispose()
    gateways = "SELECT p.gateway, r.gateway FROM refunds r JOIN payments p ON p.id = r.payment_id WHERE r.id = :id"
    assert tuple(shop.one(gateways, id=refund_id)) == ("payment", "payment")
    assert there not in found(shop)


def test_support_is_told_of_a_cancelled_order_whose_refund_at_the_site_has_failed_silently(
    shop: Shop, gateway: Any, provider: Sandbox
) -> None:
    order = shop.order()
    shop.run("order.paid > warehouse")
    charge = shop.one("SELECT charge_id FROM payments WHERE id = :id", id=order)[0]
    faults(provider, next=["refund_fails"], only={})
    faults(provider, decision_ms=300)
    made = gateway._connection().client.v1.refunds.create({"payment_intent": charge, "amount": 1000})
    about = {"object": "refund", "charge_id": charge, "amount": 1000}
    assert settle(shop, report(made.id, "pending", order, **about)) == ["applied"]
    shop.cancel(order)
    shop.run()
    assert eventually(lambda: gateway.refunded(made.id) is None)
    ask(shop)
    assert (shop.status(order)[0], posted_net(shop, order), refunded(shop, order)) == ("CANCELLED", 1000, 0)
    assert shop.one(CASE, id=order)[0] == "refund_failed"


def test_a_refund_that_is_requested_again_after_a_restore_is_not_made_again(
    shop: Shop, gateway: Any, servers: Any
) -> None:
    """The backup does not know the refund; its webhook is sent again, which mends the books; then the client repeats its request."""
    from sqlalchemy import create_engine
    from sqlalchemy.engine import make_url

    from tests.orders.test_restore import configured

    order, charge = paid(shop)
    refund_id = refund(shop, order)
    shop.run()
    there = shop.one("SELECT provider_refund_id FROM refunds WHERE id = :id", id=refund_id)[0]
    owner = create_engine(make_url(servers.database_url).set(database=shop.engine.url.database))
    with owner.begin() as connection:  # as the backup has it
        for statement in (
            "DELETE FROM ledger WHERE kind = 'refund' AND reference = :id",
            "DELETE FROM refunds WHERE id = :id",
            "DELETE FROM idempotency.outbox WHERE key = :id",
            "DELETE FROM idempotency.records WHERE key = :id",
            "UPDATE payments SET refunded = 0 WHERE id = :order",
        ):
            given = {"order": order} if ":order" in statement else {"id": refund_id}
            connection.execute(text(statement), given)
    owner.dispose()
    shop.forget()
    configured(shop, idempotency_ask_first_until=datetime.now(UTC) + timedelta(days=3))
    try:
        assert found(shop)[there] == ("400 EUR", None)
        assert settle(shop, of_refund(order, refund_id, charge, "succeeded", there)) == ["applied"]
        assert there not in found(shop)
        with shop.transaction() as session:
            shop.refunds.submit_refund(session, refund_id=refund_id, payment_id=order, amount=400, reason="test")
        shop.run()
        assert (row_of(shop, refund_id), row_of(shop, f"stripe-{there}")[0]) == (
            ("refused", "refund_of_another"),
            "refunded",
        )
        assert (posted_net(shop, order), refunded(shop, order)) == (600, 400)
        assert len(shop.events("payment.refunded", order)) == 1  # of what was written down
        assert there not in found(shop)
        assert settle(shop, of_refund(order, refund_id, charge, "failed", there)) == ["applied"]
        assert (row_of(shop, f"stripe-{there}")[0], posted_net(shop, order)) == ("reversed", 1000)
    finally:
        configured(shop, idempotency_ask_first_until=None)


def test_a_charge_of_nobody_that_was_refunded_as_the_runbook_says_is_no_difference(shop: Shop, gateway: Any) -> None:
    """docs/restore.md, 6: "Nothing asks for the charges of orders that the backup has forgotten: refund them"."""
    about = {"customer_id": "c1", "amount": 700, "currency": "EUR"}
    charge = gateway.capture(payment_id=f"forgotten-{uuid4().hex}", **about, idempotency_key=uuid4().hex)["id"]
    assert found(shop)[charge] == ("700 EUR", None)
    shop.run()
    back = gateway._connection().client.v1.refunds.create({"payment_intent": charge, "amount": 700})
    letter = shop.one("SELECT key FROM idempotency.dead_letters WHERE key LIKE :key", key=f"charge:{charge}:%")[0]
    shop.replay(letter)
    shop.run()
    assert shop.one("SELECT status FROM idempotency.records WHERE key = :key", key=letter)[0] == "completed"
    assert not {charge, back.id} & found(shop).keys()


def test_a_refund_at_the_site_under_somebody_elses_name_is_no_difference(shop: Shop, gateway: Any) -> None:
    """An ERP on the same account gives its refunds the metadata `refund_id`; it is written down, and the amounts agree."""
    order, charge = paid(shop)
    made = gateway._connection().client.v1.refunds.create(
        {"payment_intent": charge, "amount": 400, "metadata": {"refund_id": "ERP-17"}}
    )
    assert settle(shop, of_refund(order, "ERP-17", charge, "succeeded", made.id)) == ["applied"]
    assert posted_net(shop, order) == 600
    assert made.id not in found(shop)


def test_a_pending_refund_at_the_site_of_somebody_elses_name_is_no_difference(
    shop: Shop, gateway: Any, provider: Sandbox
) -> None:
    """Without that name it is none: our books wait for its success."""
    order, charge = paid(shop)
    faults(provider, next=["refund_fails"], only={})
    faults(provider, decision_ms=3_600_000)
    try:
        made = gateway._connection().client.v1.refunds.create(
            {"payment_intent": charge, "amount": 300, "metadata": {"refund_id": "ERP-18"}}
        )
        assert made.status == "pending"
        told = of_refund(order, "ERP-18", charge, "pending", made.id, 300)
        assert settle(shop, told) == ["applied"]
        assert made.id not in found(shop)
    finally:
        faults(provider, decision_ms=500)


def test_a_refund_at_the_site_with_somebody_elses_purchase_id_is_written_down(
    shop: Shop, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of our charge, by an ERP whose metadata has a member `purchase_id`, too; as Stripe sends it."""
    from pydantic import SecretStr

    import celeryconfig
    from api import webhooks
    from tests.orders.test_webhooks import NEW, post, signed

    monkeypatch.setattr(celeryconfig.environment, "stripe_webhook_secrets", SecretStr(NEW))
    monkeypatch.setattr(webhooks, "gateway", gateway)
    order, charge = paid(shop)
    made = gateway._connection().client.v1.refunds.create(
        {"payment_intent": charge, "amount": 400, "metadata": {"purchase_id": "ERP-order-17"}}
    )

    def send(thing: dict[str, Any], kind: str) -> None:
        document = {"id": f"evt_{uuid4().hex}", "object": "event", "type": kind, "created": 1_772_366_400}
        body = json.dumps(document | {"data": {"object": thing}}).encode()
        assert post("/webhooks/stripe", body, signed(body)).status_code == 200

    send(made.to_dict(), "refund.created")
    shop.run()
    assert posted_net(shop, order) == 600
    assert made.id not in found(shop)
