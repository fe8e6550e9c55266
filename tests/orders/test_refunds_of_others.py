"""Refunds that turn out to be others, or come back: what is in the books, and whether support has a case."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from idempotency import DidNotHappen, Happened
from idempotency.store.rights import RELAY
from sandbox.process import Sandbox
from tests.orders.shop import Shop
from tests.orders.test_reconciliation import found, paid
from tests.orders.test_report_doubts import of_refund, posted_net
from tests.orders.test_reported_and_typed import ask
from tests.orders.test_reports import captured, operation, refund, report, settle
from tests.orders.test_reserved import give_up, in_doubt, lost, refunded, resolve, row_of
from tests.orders.test_restore import configured
from tests.support.roles import url_of
from tests.support.sandbox import faults

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def now(told: Any) -> Any:
    """The report, of this moment."""
    return replace(told, occurred_at=datetime.now(UTC))


def there_of(shop: Shop, refund_id: str) -> str:
    return str(shop.one("SELECT provider_refund_id FROM refunds WHERE id = :id", id=refund_id)[0])


def case(shop: Shop, order: str) -> str | None:
    code: str | None = shop.one("SELECT max(code) FROM support_cases WHERE payment_id = :id", id=order)[0]
    return code


def made_of(there: str, amount: int = 400) -> Happened:
    return Happened({"id": there, "amount": amount, "currency": "EUR", "status": "succeeded"})


def the_sites_and_ours(shop: Shop, amount: int = 400) -> tuple[str, str, str]:
    """A refund was made by our call, whose answer was lost; a person ended it as not made; its bare report is written down as
    the site's; the person corrects: it was made, as that. Its letter waits for a replay."""
    order, charge = captured(shop)
    refund_id = refund(shop, order, amount)
    shop.provider.silent.add(refund_id)
    there = f"id_{len(shop.provider._done)}"
    shop.deliver(shop.waiting()[0])
    give_up(shop, refund_id)
    resolve(shop, refund_id, DidNotHappen(), end=True)
    bare = replace(of_refund(order, None, charge, "succeeded", there, amount), payment_id=None)
    assert settle(shop, bare) == ["applied"]
    shop.run()
    resolve(shop, refund_id, made_of(there, amount))
    return order, refund_id, there


# ------------------------------------------------------------ cases


def test_a_case_opens_again_over_a_second_refund_that_comes_back(shop: Shop) -> None:
    """400 comes back, and is given again. Then 300 is refunded, and comes back, too: 300 is owed, and nobody is told."""
    order, charge = captured(shop)
    one = refund(shop, order, 400)
    shop.run()
    assert settle(shop, now(of_refund(order, one, charge, "failed", there_of(shop, one), 400))) == ["applied"]
    shop.run()
    refund(shop, order, 400)
    shop.run()
    assert case(shop, order) == "recovered"
    three = refund(shop, order, 300)
    shop.run()
    assert settle(shop, now(of_refund(order, three, charge, "failed", there_of(shop, three), 300))) == ["applied"]
    shop.run()
    assert (row_of(shop, three)[0], posted_net(shop, order)) == ("reversed", 600)  # 700 were promised, 400 are given
    assert case(shop, order) == "refund_failed"


def test_a_case_stays_as_another_refund_that_was_under_way_is_made(shop: Shop) -> None:
    """Two refunds are requested; the first comes back while the second is under way; then the second is made."""
    order, charge = captured(shop)
    one = refund(shop, order, 400)
    shop.run()
    two = refund(shop, order, 400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", lost)
        shop.deliver(next(each for each in shop.waiting() if each.row.key == two))
    assert row_of(shop, two)[0] == "reserved"
    assert settle(shop, now(of_refund(order, one, charge, "failed", there_of(shop, one), 400))) == ["applied"]
    shop.run(two, "refunds.refund_payment")
    assert case(shop, order) == "refund_failed"
    shop.run()
    assert (row_of(shop, two)[0], row_of(shop, one)[0], posted_net(shop, order)) == ("refunded", "reversed", 600)
    assert case(shop, order) == "refund_failed"  # 800 were promised, 400 given


def test_a_case_ends_though_another_refund_is_under_way_that_comes_to_nothing(shop: Shop) -> None:
    """What came back is given again while another refund is under way, which is then declined. Nothing is owed."""
    order, charge = captured(shop)
    one = refund(shop, order, 400)
    shop.run()
    assert settle(shop, now(of_refund(order, one, charge, "failed", there_of(shop, one), 400))) == ["applied"]
    shop.run()
    slow = refund(shop, order, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", lost)
        shop.deliver(next(each for each in shop.waiting() if each.row.key == slow))
    again = refund(shop, order, 400)
    shop.deliver(next(each for each in shop.waiting() if each.row.key == again))
    shop.run(slow, "refunds.refund_payment")
    assert (row_of(shop, slow)[0], row_of(shop, again)[0], case(shop, order)) == ("reserved", "refunded", "recovered")
    shop.provider.keeps.add(order)
    shop.run()
    assert (row_of(shop, slow)[0], case(shop, order)) == ("refused", "recovered")


@pytest.mark.parametrize("failure_first", [True, False])
def test_a_case_ends_alike_in_every_order_of_reports(shop: Shop, failure_first: bool) -> None:
    """A refund has failed at the provider, and its operator has given the same again at the site; the reports in both orders."""
    order, charge = captured(shop)
    one = refund(shop, order, 400)
    shop.run()
    failed = now(of_refund(order, one, charge, "failed", there_of(shop, one), 400))
    again = now(replace(of_refund(order, None, charge, "succeeded", f"re_s{order}", 400), payment_id=None))
    reports = [failed, again] if failure_first else [again, failed]
    assert settle(shop, *reports) == ["applied", "applied"]
    shop.run()
    assert (posted_net(shop, order), refunded(shop, order)) == (600, 400)
    assert case(shop, order) == "recovered"


def test_a_case_ends_after_a_second_attempt_has_failed_too(shop: Shop) -> None:
    """1000 comes back, is given again, comes back again, is given a third time, and stays."""
    order, charge = captured(shop)
    for _ in range(2):
        one = refund(shop, order, 1000)
        shop.run()
        assert settle(shop, now(of_refund(order, one, charge, "failed", there_of(shop, one), 1000))) == ["applied"]
        shop.run()
        assert case(shop, order) == "refund_failed"
    last = refund(shop, order, 1000)
    shop.run()
    assert (row_of(shop, last)[0], posted_net(shop, order), refunded(shop, order)) == ("refunded", 0, 1000)
    assert case(shop, order) == "recovered"


def test_a_case_ends_if_the_failure_was_told_before_our_finish(shop: Shop) -> None:
    """The process dies after the effect's answer was kept. The failure is reported, then as much is given at the site."""
    order, charge = captured(shop)
    one = refund(shop, order)
    there = f"id_{len(shop.provider._done)}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.refunds, "_other_refund", lost)  # its process dies there
        shop.deliver(next(each for each in shop.waiting() if each.row.key == one))
    assert row_of(shop, one)[0] == "reserved"
    assert settle(shop, now(of_refund(order, one, charge, "failed", there))) == ["applied"]
    bare = replace(of_refund(order, None, charge, "succeeded", f"re_again{order}"), payment_id=None)
    assert settle(shop, now(bare)) == ["waiting"]
    shop.run()
    assert row_of(shop, one)[0] == "reversed"
    assert (posted_net(shop, order), refunded(shop, order)) == (600, 400)
    assert case(shop, order) == "recovered"


# ------------------------------------------------------------ in the books once


def forget_refund(shop: Shop, servers: Any, order: str, refund_id: str) -> None:
    """As a backup has it that was made before the request."""
    owner = create_engine(make_url(servers.database_url).set(database=shop.engine.url.database))
    with owner.begin() as connection:
        for statement in (
            "DELETE FROM ledger WHERE kind = 'refund' AND reference = :id",
            "UPDATE payments SET refunded = refunded - (SELECT amount FROM refunds WHERE id = :id) WHERE id = :order",
            "DELETE FROM refunds WHERE id = :id",
            "DELETE FROM idempotency.outbox WHERE key = :id",
            "DELETE FROM idempotency.records WHERE key = :id",
        ):
            given = {"id": refund_id} | ({"order": order} if ":order" in statement else {})
            connection.execute(text(statement), given)
    owner.dispose()
    shop.forget()


def submit(shop: Shop, refund_id: str, order: str, amount: int) -> None:
    with shop.transaction() as session:
        shop.refunds.submit_refund(session, refund_id=refund_id, payment_id=order, amount=amount, reason="test")


def test_a_whole_refund_requested_again_after_a_restore_is_not_made_again(
    shop: Shop, gateway: Any, servers: Any
) -> None:
    """test_a_refund_that_is_requested_again_after_a_restore_..., of 1000 instead of 400."""
    order, charge = paid(shop)
    refund_id = refund(shop, order, 1000)
    shop.run()
    there = there_of(shop, refund_id)
    forget_refund(shop, servers, order, refund_id)
    configured(shop, idempotency_ask_first_until=datetime.now(UTC) + timedelta(days=3))
    try:
        assert settle(shop, of_refund(order, refund_id, charge, "succeeded", there, 1000)) == ["applied"]
        assert there not in found(shop)
        submit(shop, refund_id, order, 1000)
        shop.run()
        assert row_of(shop, refund_id) == ("refused", "exceeds_captured")
        assert row_of(shop, f"stripe-{there}") == ("refunded", None)
        assert (posted_net(shop, order), refunded(shop, order)) == (0, 1000)
        assert there not in found(shop)
        assert len(shop.events("payment.refunded", order)) == 1  # of what was written down
    finally:
        configured(shop, idempotency_ask_first_until=None)


def test_a_whole_refund_is_in_the_books_once_when_a_person_corrects_their_word(shop: Shop) -> None:
    """test_a_refund_that_is_written_down_as_the_sites_is_not_posted_again_by_a_persons_word, of more than half."""
    order, refund_id, there = the_sites_and_ours(shop, 1000)
    shop.replay(refund_id)
    shop.run()
    assert (row_of(shop, refund_id)[0], row_of(shop, f"stripe-{there}")[0]) == ("refused", "refunded")
    assert (posted_net(shop, order), refunded(shop, order)) == (0, 1000)


def test_a_persons_slip_changes_no_refund_of_another_payment(shop: Shop, gateway: Any) -> None:
    """B has a refund of 400 that was made at the site; of A one is in doubt, and a person types B's id for it."""
    a, _ = paid(shop)
    b, charge_b = paid(shop)
    site = gateway._connection().client.v1.refunds.create({"payment_intent": charge_b, "amount": 300})
    bare = report(site.id, "succeeded", None, object="refund", charge_id=charge_b, amount=300)
    assert settle(shop, bare) == ["applied"]
    shop.run()
    assert (posted_net(shop, b), refunded(shop, b)) == (700, 300)
    doubtful = in_doubt(shop, gateway, a, 400)
    resolve(shop, doubtful, made_of(site.id, 400))
    shop.replay(doubtful)
    shop.run()
    assert (operation(shop, doubtful).status, row_of(shop, doubtful)) == ("failed", ("refused", "refund_of_another"))
    assert (posted_net(shop, b), refunded(shop, b)) == (700, 300)
    assert (posted_net(shop, a), refunded(shop, a)) == (1000, 0)
    assert site.id not in found(shop)


def test_one_refund_that_two_have_claimed_is_in_the_books_once(shop: Shop, gateway: Any, servers: Any) -> None:
    """Written down as the site's after a restore; a person takes it for `one`; then the client asks for `two` again."""
    order, charge = paid(shop)
    two = refund(shop, order)
    shop.run()
    there = there_of(shop, two)
    forget_refund(shop, servers, order, two)
    configured(shop, idempotency_ask_first_until=datetime.now(UTC) + timedelta(days=3))
    try:
        assert settle(shop, of_refund(order, two, charge, "succeeded", there)) == ["applied"]
        one = in_doubt(shop, gateway, order)
        resolve(shop, one, made_of(there))
        shop.replay(one)
        shop.run()
        assert (row_of(shop, one)[0], row_of(shop, f"stripe-{there}")[0]) == ("refused", "refunded")
        submit(shop, two, order, 400)
        shop.run()
        assert (row_of(shop, two), row_of(shop, one)) == (("refused", "refund_of_another"),) * 2
        assert (refunded(shop, order), posted_net(shop, order)) == (400, 600)
        assert there not in found(shop)
    finally:
        configured(shop, idempotency_ask_first_until=None)


# ------------------------------------------------------------ reconciliation


def test_a_refund_of_a_foreign_charge_that_a_person_took_for_ours_is_named(shop: Shop, gateway: Any) -> None:
    """The buyer was charged twice; the second charge was given back at the site. A refund of the first is in doubt, and was
    not made; a person takes the one for the other. The buyer is told so, and our ledger says so of the first charge."""
    order, charge = paid(shop)
    about = {"customer_id": "c1", "amount": 1000, "currency": "EUR"}
    second = gateway.capture(payment_id=order, **about, idempotency_key=uuid4().hex)["id"]
    back = gateway._connection().client.v1.refunds.create({"payment_intent": second, "amount": 1000})
    doubtful = in_doubt(shop, gateway, order, 1000)
    resolve(shop, doubtful, made_of(back.id, 1000))
    shop.replay(doubtful)
    shop.run()
    assert (row_of(shop, doubtful)[0], posted_net(shop, order)) == ("refunded", 0)
    assert len(shop.events("payment.refunded", order)) == 1
    listed = gateway._connection().client.v1.refunds.list({"payment_intent": charge, "limit": 100}).data
    assert listed == []  # nothing was given back of what our ledger says
    assert found(shop)[back.id] == ("1000 EUR", f"1000 EUR of {doubtful}, charged as {charge}")


def test_an_answer_under_another_api_key_changes_no_refund(shop: Shop, gateway: Any, provider: Sandbox) -> None:
    """For one day the application has the API key of another account, or of the test mode: its refund is "missing" there."""
    order, charge = paid(shop)
    faults(provider, next=["refund_fails"], only={})
    faults(provider, decision_ms=3_600_000)
    try:
        made = gateway._connection().client.v1.refunds.create({"payment_intent": charge, "amount": 300})
        assert settle(shop, of_refund(order, None, charge, "pending", made.id, 300)) == ["applied"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gateway, "_retrieved", lambda _: None)  # 404 resource_missing
            ask(shop)
        assert row_of(shop, f"stripe-{made.id}")[0] == "reserved"
        # the key is right again, and the refund succeeds
        assert settle(shop, of_refund(order, None, charge, "succeeded", made.id, 300)) == ["applied"]
        shop.run()
        assert row_of(shop, f"stripe-{made.id}") == ("refunded", None)
        assert (posted_net(shop, order), refunded(shop, order)) == (700, 300)
    finally:
        faults(provider, decision_ms=500)


def test_the_command_of_the_reconciliation_asks_about_what_is_pending_at_the_site(
    shop: Shop, gateway: Any, provider: Sandbox
) -> None:
    """`python -m tasks.reconciliation`, as docs/payment-webhooks.md and step 8 of docs/restore.md say, in its own process."""
    order, charge = paid(shop)
    environment = {
        **os.environ,
        "DATABASE_URL": url_of(RELAY, shop.app.conf.idempotency_database_url),
        "STRIPE_API_KEY": "sk_test_sandbox",
        "STRIPE_API_BASE": provider.url,
        "STRIPE_URL": provider.url,
    }

    def run() -> Any:
        command = [sys.executable, "-m", "tasks.reconciliation", "--days", "1"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    before = run()
    assert before.returncode == 0, before.stderr
    assert settle(shop, of_refund(order, None, charge, "pending", f"re_p{order}", 300)) == ["applied"]
    with shop.books.begin() as connection:  # two hours ago
        connection.execute(
            text("UPDATE refunds SET created_at = created_at - interval '2 hours' WHERE payment_id = :id"),
            {"id": order},
        )
    after = run()
    assert after.returncode == 0, after.stderr
    asked = "SELECT count(*) FROM idempotency.outbox WHERE task = 'payments.ask_about_refund' AND message LIKE :about"
    assert shop.one(asked, about=f"%stripe-re_p{order}%")[0] == 1
