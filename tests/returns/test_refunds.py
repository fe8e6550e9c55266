"""Money of returns: what is left is refunded, once; and what a person may do afterwards."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import Engine, create_engine, make_url, text

import services
from demo.order_books import OrderBooks, Told, read_order_books
from idempotency import Defer, EffectUnknown, Happened, OperationId, StoredRefusal
from idempotency.application import runtime_of
from idempotency.errors import ReplayRefused
from idempotency.operate.change import read
from idempotency.operate.replay import replay
from idempotency.operate.resolve import resolve_effect
from idempotency.store import sagas
from idempotency.store.answers import error_text
from sandbox import ledger
from tests.orders.shop import Sent
from tests.orders.test_report_doubts import of_refund
from tests.orders.test_reports import settle
from tests.returns.books import check_money, check_return
from tests.returns.shop import Returns
from tests.support.operators import ANN
from tests.support.sandbox import faults

pytestmark = pytest.mark.usefixtures("fresh")
REFUND = "refunds.refund_payment"


def given_back(shop: Returns, order: str, verdict: str = "APPROVED") -> str:
    return_id = shop.send_back(order)
    shop.run()
    shop.collect(return_id)
    shop.inspect(return_id, verdict)
    shop.run()
    return return_id


@pytest.mark.long
def test_what_was_refunded_by_hand_before_is_not_refunded_again(shop: Returns) -> None:
    order = shop.bought()
    with shop.transaction() as session:
        shop.refunds.submit_refund(session, refund_id=f"r-{order}", payment_id=order, amount=400, reason="by hand")
    shop.run()
    return_id = given_back(shop, order)
    assert sorted(amount for id, amount in shop.provider.refunds if id == order) == [400, 600]
    check_return(shop, return_id, "approved")


def test_an_order_that_is_refunded_already_is_only_taken_back(shop: Returns) -> None:
    order = shop.bought()
    with shop.transaction() as session:
        shop.refunds.submit_refund(session, refund_id=f"r-{order}", payment_id=order, amount=1000, reason="by hand")
    shop.run()
    return_id = given_back(shop, order, "DAMAGED")
    assert shop.row(return_id).refund_id is None
    check_return(shop, return_id, "damaged")


def requested_by_hand(shop: Returns, order: str, amount: int) -> Sent:
    refund = {"refund_id": f"r-{order}", "payment_id": order, "amount": amount, "reason": "by hand"}
    with shop.transaction() as session:
        shop.refunds.submit_refund(session, **refund)
    (message,) = [sent for sent in shop.waiting() if sent.row.key == refund["refund_id"]]
    return message


def unreachable(**_: Any) -> None:
    raise Defer(1, "unreachable")


def silent(**_: Any) -> None:
    raise EffectUnknown("the provider cannot say")


@pytest.mark.long
def test_a_return_whose_refund_was_refused_beside_one_by_hand_is_left_to_a_person(shop: Returns) -> None:
    """That one may come to nothing, too, and nobody would look then."""
    order = shop.bought()
    shop.provider.keeps.add(order)
    return_id = shop.in_transit(order)
    by_hand = requested_by_hand(shop, order, 1000)
    shop.inspect(return_id, "APPROVED")
    shop.run(REFUND)
    shop.deliver(next(sent for sent in shop.waiting() if sent.row.task == REFUND and sent.row.key != by_hand.row.key))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", unreachable, raising=False)
        shop.deliver(by_hand)
    shop.run(REFUND)
    row = shop.row(return_id)
    assert (row.status, row.problem) == ("ESCALATED", "refund_failed")
    shop.run()
    assert (shop.provider.net(order), shop.cases(return_id)) == (1000, {"refund_failed"})


@pytest.mark.long
def test_a_return_whose_refund_was_refused_beside_those_at_the_site_is_left_to_a_person(shop: Returns) -> None:
    order = shop.bought()
    charge = shop.one("SELECT charge_id FROM payments WHERE id = :id", id=order)[0]
    return_id = shop.in_transit(order)

    def refuse(**_: Any) -> Any:
        for there, amount in (("re_a" + order, 600), ("re_b" + order, 400)):
            assert settle(shop, of_refund(order, None, charge, "pending", there, amount)) == ["waiting"]
        raise StoredRefusal("the charge has been refunded", "charge_already_refunded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", refuse, raising=False)
        shop.inspect(return_id, "APPROVED")
        shop.run()
    row = shop.row(return_id)
    assert (row.status, row.problem, shop.cases(return_id)) == ("ESCALATED", "refund_failed", {"refund_failed"})


@pytest.mark.long
@pytest.mark.parametrize("keeps", [True, False])
def test_a_refund_by_hand_that_is_under_way_is_waited_for(shop: Returns, keeps: bool) -> None:
    """It may come to nothing, and then the return gives all of it back; or tries to."""
    order = shop.bought()
    return_id = shop.in_transit(order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", unreachable, raising=False)
        shop.deliver(requested_by_hand(shop, order, 1000))
        shop.inspect(return_id, "APPROVED")
        for _ in range(8):
            shop.deliver(next(sent for sent in shop.waiting() if sent.row.task != "refunds.refund_payment"))
        assert shop.row(return_id).status == "INSPECTED"
    if keeps:
        shop.provider.keeps.add(order)
    shop.run()
    if keeps:
        check_return(shop, return_id, "refund fails")
    else:
        assert shop.row(return_id).refund_id is None
        check_return(shop, return_id, "approved")


@pytest.mark.long
def test_a_refund_by_hand_in_doubt_leaves_the_return_to_a_person(shop: Returns) -> None:
    order = shop.bought()
    return_id = shop.in_transit(order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", silent, raising=False)
        shop.deliver(requested_by_hand(shop, order, 400))
    shop.inspect(return_id, "APPROVED")
    shop.run()
    assert (shop.row(return_id).problem, shop.provider.net(order)) == ("refund_failed", 400)


@pytest.mark.long
def test_a_refund_in_doubt_of_a_return_that_a_person_has_found_is_posted_by_a_replay(shop: Returns) -> None:
    order = shop.bought()
    return_id = shop.in_transit(order)
    made = type(shop.provider).refund

    def made_in_silence(**call: Any) -> None:
        made(shop.provider, **call)
        silent()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "refund", made_in_silence, raising=False)
        shop.inspect(return_id, "APPROVED")
        shop.run()
    row = shop.row(return_id)
    assert (row.status, row.problem, shop.provider.net(order)) == ("ESCALATED", "refund_failed", 0)
    letter = shop.one(
        "SELECT id, tenant, task, key FROM idempotency.dead_letters WHERE task = 'refunds.refund_payment'"
        " AND status = 'open' AND key LIKE '%' || :id || '%'",
        id=return_id,
    )
    found = Happened({"id": "re_found", "amount": 1000, "currency": "EUR", "status": "succeeded"})
    with shop.operating():
        with runtime_of(shop.app).autocommit() as connection:
            seen = read(connection, OperationId(*letter[1:]), runtime_of(shop.app).settings.service)
        resolve_effect(shop.app, seen, "refund", found, ANN)
        replay(shop.app, letter.id, ANN)
    shop.run()
    refund = shop.one("SELECT status, provider_refund_id FROM refunds WHERE id = :id", id=row.refund_id)
    assert tuple(refund) == ("refunded", "re_found")
    check_money(shop, order, refunded=True)


@pytest.mark.long
def test_a_return_gives_all_of_it_back_though_a_refund_by_hand_was_requested_before(shop: Returns) -> None:
    order = shop.bought()
    return_id = shop.in_transit(order)
    by_hand = requested_by_hand(shop, order, 400)
    shop.inspect(return_id, "APPROVED")
    shop.run("refunds.refund_payment")
    shop.deliver(by_hand)
    shop.run()
    check_return(shop, return_id, "approved")
    assert shop.one("SELECT failure FROM refunds WHERE id = :id", id=f"r-{order}")[0] == "exceeds_captured"


@pytest.mark.long
def test_a_cancel_between_the_row_of_a_refund_and_its_call_frees_the_amount(shop: Returns) -> None:
    return_id = shop.in_transit()
    owner_of = shop.returns.owned

    def cancelled_first(tenant: str) -> Any:  # on the way to the call
        id = OperationId("default", shop.returns.process_return.name, return_id)
        with shop.books.connect() as connection, connection.begin():
            sagas.cancel(connection, id, error_text("cancelled", "by a person"))
        return owner_of(tenant)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.returns, "owned", cancelled_first)
        shop.inspect(return_id, "APPROVED")
        shop.run()
    row = shop.row(return_id)
    refund = shop.one("SELECT status, failure FROM refunds WHERE id = :id", id=row.refund_id)
    assert (row.status, *refund) == ("ESCALATED", "refused", "cancelled")
    check_money(shop, row.order_id, refunded=False)


def test_an_order_that_cost_nothing_is_taken_back_without_a_refund(shop: Returns) -> None:
    return_id = given_back(shop, shop.bought(amount=0))
    assert shop.row(return_id).refund_id is None
    check_return(shop, return_id, "approved")


def test_an_order_of_nothing_in_stock_moves_nothing(shop: Returns) -> None:
    return_id = given_back(shop, shop.bought(sku=None))
    check_return(shop, return_id, "approved")


def test_a_refund_whose_answer_was_lost_is_found_and_made_once(shop: Returns) -> None:
    order = shop.bought()
    return_id = shop.send_back(order)
    shop.run()
    shop.collect(return_id)
    shop.inspect(return_id, "APPROVED")
    shop.run("refunds.refund_payment")
    shop.provider.silent.add(shop.row(return_id).refund_id)
    shop.run()
    assert shop.provider.count(shop.provider.refunds, order) == 1
    check_return(shop, return_id, "approved")


@pytest.mark.long
def test_a_refund_that_has_failed_for_good_can_be_made_by_a_person(shop: Returns) -> None:
    """Its amount is free again, and what was booked stays booked."""
    order = shop.bought()
    shop.provider.keeps.add(order)
    return_id = given_back(shop, order)
    check_return(shop, return_id, "refund fails")
    refund = shop.one("SELECT status, failure FROM refunds WHERE id = :id", id=shop.row(return_id).refund_id)
    assert tuple(refund) == ("refused", "charge_disputed")
    shop.provider.keeps.remove(order)
    with shop.transaction() as session:
        shop.refunds.submit_refund(session, refund_id=f"r-{order}", payment_id=order, amount=1000, reason="by hand")
    shop.run()
    check_money(shop, order, refunded=True)
    assert shop.row(return_id).status == "ESCALATED"


@pytest.mark.long
def test_a_cancelled_return_is_not_replayed_but_asked_for_again(shop: Returns) -> None:
    order = shop.bought()
    for is_begun in (True, False):
        return_id = shop.send_back(order)
        if is_begun:
            shop.run()
        shop.cancel_return(return_id)
        shop.run()
        assert shop.row(return_id).status == "CANCELLED"
        if is_begun:
            with pytest.raises(ReplayRefused):
                shop.replay(return_id)
        else:  # nothing was done that would be done again
            shop.replay(return_id)
            shop.run()
        assert shop.row(return_id).status == "CANCELLED"
        assert shop.told_of(return_id).count("return.cancelled") == 1
    check_return(shop, given_back(shop, order), "approved")


@pytest.mark.long
def test_a_label_of_unknown_outcome_is_looked_up_by_its_key(shop: Returns) -> None:
    """The carrier has made it and stores an error: it is found, and made once."""
    order, return_id = shop.bought(), "ret-lost-answer"
    faults(shop.sandbox, next=["error_500_after"], only={"reference": return_id})
    shop.send_back(order, return_id)
    shop.run()
    assert shop.row(return_id).status == "LABELLED"
    (label,) = shop.labels(return_id)
    assert shop.one("SELECT id FROM labels WHERE return_id = :id", id=return_id)[0] == label.id


@pytest.mark.long
def test_a_return_that_is_cancelled_before_its_saga_begins_is_cancelled(shop: Returns) -> None:
    return_id = shop.send_back(shop.bought())
    shop.cancel_return(return_id)
    shop.run()
    assert (shop.row(return_id).status, shop.row(return_id).problem) == ("CANCELLED", "cancelled")
    assert shop.labels(return_id) == []
    with shop.books.connect() as connection:
        mails = connection.execute(
            text("SELECT about FROM notifications WHERE about LIKE '%' || :id"), {"id": return_id}
        ).scalars()
        assert list(mails) == [f"return.cancelled:{return_id}"]


# ---------------------------------------------------------------- what the check of the demo reads

CORRUPTIONS = (
    "UPDATE inspections SET verdict = 'REJECTED'",
    "DELETE FROM inspections",
    "UPDATE returns SET verdict = 'REJECTED'",
    "UPDATE returns SET customer_id = 'x'",
    "UPDATE returns SET is_collected = false",
    "UPDATE returns SET is_inspected = false",
    "UPDATE payments SET customer_id = 'x'",
    "UPDATE payments SET order_status = 'cancelled'",
    "UPDATE checkouts SET quantity = 99",
    "UPDATE ledger SET debit = credit, credit = debit",
    "UPDATE idempotency.sagas SET status = 'COMPENSATING' WHERE task = 'order_placement'",
    "UPDATE refunds SET failure = 'x'",
)


@pytest.mark.long
def test_the_check_of_the_demo_reads_every_book_of_a_return(
    servers: services.Services, shop: Returns, tmp_path: Path
) -> None:
    order = shop.order(None)
    shop.run()
    given_back(shop, order)
    for make in (ledger.open_provider, ledger.open_mail):
        make(tmp_path).close()
    outside = {"provider": tmp_path, "mail": tmp_path, "carrier": Path(shop.sandbox.data)}
    owner = create_engine(make_url(servers.database_url).set(database=shop.books.url.database))
    with owner.connect() as connection:

        def read() -> OrderBooks:
            engine = SimpleNamespace(connect=lambda: nullcontext(connection))
            return read_order_books(cast(Engine, engine), Told((), {}, {}), outside)

        before = read()
        for corruption in CORRUPTIONS:
            assert connection.execute(text(corruption)).rowcount > 0
            assert read() != before, corruption
            connection.rollback()
        assert read() == before
    owner.dispose()
