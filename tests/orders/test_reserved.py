"""What is reserved for refunds: `payments.refunded` is the sum of those that have moved money, will or may have, in every order."""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from idempotency import DidNotHappen, Happened, OperationId, StoredRefusal
from idempotency.application import runtime_of, settings_of
from idempotency.errors import ChangeRefused
from idempotency.operate.cancel import cancel
from idempotency.operate.change import read
from idempotency.operate.resolve import resolve_effect
from tasks.gateway import GatewayError
from tests.orders.shop import Sent, Shop
from tests.orders.test_report_doubts import of_refund, posted_net, silent_refund
from tests.orders.test_reports import captured, posted, refund, settle
from tests.support.operators import ANN

REFUND = "refunds.refund_payment"
LOST = StoredRefusal("refund was refused: lost_or_stolen_card", "lost_or_stolen_card")


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def seen(shop: Shop, refund_id: str) -> Any:
    with runtime_of(shop.app).autocommit() as connection:
        return read(connection, OperationId("default", REFUND, refund_id), settings_of(shop.app).service)


def row_of(shop: Shop, refund_id: str) -> tuple[Any, ...]:
    return tuple(shop.one("SELECT status, failure FROM refunds WHERE id = :id", id=refund_id))


def refunded(shop: Shop, order: str) -> int:
    """What is reserved or given back; what may have moved, and nothing of what was refused."""
    query = (
        "SELECT p.refunded, coalesce(sum(r.amount) FILTER (WHERE r.status IN ('reserved', 'unknown', 'refunded')), 0) AS due"
        " FROM payments p LEFT JOIN refunds r ON (r.tenant, r.payment_id) = (p.tenant, p.id) WHERE p.id = :id"
        " GROUP BY p.tenant, p.id"
    )
    row = shop.one(query, id=order)
    assert row.refunded == row.due
    return int(row.refunded)


def give_up(shop: Shop, refund_id: str) -> None:
    with shop.operating():
        cancel(shop.app, seen(shop, refund_id), ANN, may_have_happened=True)


def resolve(shop: Shop, refund_id: str, outcome: Any, *, end: bool = False) -> None:
    with shop.operating():
        resolve_effect(shop.app, seen(shop, refund_id), "refund", outcome, ANN, end=end)


def lost(**_: Any) -> Any:
    raise GatewayError("no answer")


def in_doubt(shop: Shop, provider: Any, order: str, amount: int = 400) -> str:
    """A refund whose call to the provider has got no answer, and which a person has given up."""
    refund_id = refund(shop, order, amount)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provider, "refund", lost)
        shop.deliver(next(sent for sent in shop.waiting() if sent.row.key == refund_id))
    give_up(shop, refund_id)
    return refund_id


def take_for_the_charge_of(shop: Shop, payment_id: str, charge: str) -> None:
    """A person gives up a charge in doubt, and says that it is this one."""

    def seen() -> Any:
        id = OperationId("default", "payments.capture_payment", payment_id)
        with runtime_of(shop.app).autocommit() as connection:
            return read(connection, id, settings_of(shop.app).service)

    with shop.operating():
        cancel(shop.app, seen(), ANN, may_have_happened=True)
        made = Happened({"id": charge, "amount": 1000, "currency": "EUR", "status": "succeeded"})
        resolve_effect(shop.app, seen(), "capture", made, ANN)


def unanswered_refund(shop: Shop) -> tuple[str, str]:
    """A refund that the provider has not made, whose call got no answer, and which a person has given up: order and refund."""
    order, _ = captured(shop)
    refund_id = in_doubt(shop, shop.provider, order)
    assert (row_of(shop, refund_id)[0], refunded(shop, order)) == ("unknown", 400)
    return order, refund_id


def check_refundable(shop: Shop, order: str) -> None:
    """All of the payment can be given back."""
    again = refund(shop, order, amount=1000)
    shop.run()
    assert (row_of(shop, again), refunded(shop, order), posted(shop, order)) == (("refunded", None), 1000, 0)


def test_a_refund_that_a_person_ends_as_not_made_is_free_again_once(shop: Shop) -> None:
    order, refund_id = unanswered_refund(shop)
    for _ in range(2):
        resolve(shop, refund_id, DidNotHappen(), end=True)
        assert (row_of(shop, refund_id), refunded(shop, order)) == (("refused", "cancelled"), 0)
    assert posted(shop, order) == 1000
    check_refundable(shop, order)


@pytest.mark.long
def test_a_refund_that_was_unknown_and_is_declined_in_its_replay_is_free_again(shop: Shop) -> None:
    order, refund_id = unanswered_refund(shop)
    resolve(shop, refund_id, DidNotHappen())
    shop.provider.keeps.add(order)
    shop.replay(refund_id)
    shop.run()
    assert (row_of(shop, refund_id), refunded(shop, order)) == (("refused", "charge_disputed"), 0)
    shop.provider.keeps.clear()
    check_refundable(shop, order)


@pytest.mark.long
def test_a_refund_that_was_unknown_and_has_failed_at_the_provider_is_free_again(shop: Shop) -> None:
    """The report says that it has failed, and the provider says so in a replay, too."""
    order, charge, refund_id, there = silent_refund(shop)
    give_up(shop, refund_id)
    assert settle(shop, of_refund(order, refund_id, charge, "failed", there)) == ["applied"]
    assert (row_of(shop, refund_id)[0], refunded(shop, order)) == ("unknown", 400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.provider, "find_refund", lambda **_: DidNotHappen(LOST))
        shop.replay(refund_id)
        shop.run()
    assert (row_of(shop, refund_id), refunded(shop, order)) == (("refused", "lost_or_stolen_card"), 0)
    check_refundable(shop, order)


@pytest.mark.long
def test_a_refund_thought_refused_that_is_reported_as_made_is_counted_once(shop: Shop) -> None:
    order, charge, refund_id, there = silent_refund(shop)
    give_up(shop, refund_id)
    resolve(shop, refund_id, DidNotHappen(), end=True)
    assert refunded(shop, order) == 0
    made = of_refund(order, refund_id, charge, "succeeded", there)
    assert settle(shop, made, made) == ["applied", "duplicate"]
    assert (row_of(shop, refund_id), refunded(shop, order), posted(shop, order)) == (("refunded", None), 400, 600)
    shop.replay(refund_id)
    shop.run()
    assert (refunded(shop, order), shop.provider.count(shop.provider.refunds, order)) == (400, 1)


@pytest.mark.long
@pytest.mark.parametrize("is_left", [True, False])
def test_a_refund_thought_refused_that_a_person_has_found_is_reserved_again(shop: Shop, is_left: bool) -> None:
    """Their answer is corrected. Unless the amount was refunded otherwise meanwhile: then the dead letter says so."""
    order, _, refund_id, there = silent_refund(shop)
    give_up(shop, refund_id)
    resolve(shop, refund_id, DidNotHappen(), end=True)
    other = refund(shop, order, amount=600 if is_left else 1000)
    shop.run()
    assert row_of(shop, other)[0] == "refunded"
    resolve(shop, refund_id, Happened({"id": there, "amount": 400, "currency": "EUR", "status": "succeeded"}))
    assert row_of(shop, refund_id) == ("unknown" if is_left else "refused", "unfinished")
    assert refunded(shop, order) == 1000
    shop.replay(refund_id)
    shop.run()
    assert row_of(shop, refund_id) == (("refunded", None) if is_left else ("refused", "unfinished"))
    assert refunded(shop, order) == 1000


@pytest.mark.long
def test_a_refund_that_was_reported_as_made_and_found_by_a_person_ends(shop: Shop) -> None:
    """Nothing is reserved for it any more, and nothing has to be."""
    order, charge, refund_id, there = silent_refund(shop)
    give_up(shop, refund_id)
    resolve(shop, refund_id, DidNotHappen(), end=True)
    assert settle(shop, of_refund(order, refund_id, charge, "succeeded", there)) == ["applied"]
    resolve(shop, refund_id, Happened({"id": there, "amount": 400, "currency": "EUR", "status": "succeeded"}))
    shop.replay(refund_id)
    shop.run()
    status = shop.one("SELECT status FROM idempotency.records WHERE key = :key", key=refund_id)[0]
    assert (status, row_of(shop, refund_id), refunded(shop, order)) == ("completed", ("refunded", None), 400)


@pytest.mark.long
def test_a_report_and_a_person_who_end_a_refund_at_once_count_it_once(shop: Shop) -> None:
    """The report has the payment's lock; the person's end waits for it, and sees what it has noted."""
    from tasks import settlement

    order, charge, refund_id, there = silent_refund(shop)
    give_up(shop, refund_id)
    reached, go_on = threading.Event(), threading.Event()
    real = settlement._refund_of

    def paused(*args: Any) -> Any:
        reached.set()
        go_on.wait(10)
        return real(*args)

    def by_report() -> None:
        settle(shop, of_refund(order, refund_id, charge, "succeeded", there))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settlement, "_refund_of", paused)
        thread = threading.Thread(target=by_report)
        thread.start()
        assert reached.wait(10)
        timer = threading.Timer(0.5, go_on.set)
        timer.start()
        resolve(shop, refund_id, DidNotHappen(), end=True)
        assert go_on.is_set()
        thread.join(20)
    # what the provider has told stays
    assert (row_of(shop, refund_id)[0], refunded(shop, order), posted_net(shop, order)) == ("refunded", 400, 600)


def deliver_one(shop: Shop, order: str, sent: Sent, chance: random.Random) -> None:
    """To a provider that makes the refund, makes it in silence, declines it, is not reached, or has refused it later."""
    with pytest.MonkeyPatch.context() as patch:
        match chance.randrange(6):
            case 0:
                patch.setattr(shop.provider, "keeps", {order})
            case 1:
                patch.setattr(shop.provider, "silent", {sent.row.key})
            case 2 | 3:
                patch.setattr(shop.provider, "refund", lost)
            case 4:
                patch.setattr(shop.provider, "refund", lost)
                patch.setattr(shop.provider, "find_refund", lambda **_: DidNotHappen(LOST))
        shop.deliver(sent)


def request_some(shop: Shop, order: str, chance: random.Random) -> None:
    """By hand; or all that is left at once, by a request that is withdrawn again or not."""
    if chance.random() < 0.7:
        refund(shop, order, amount=chance.choice((200, 300, 400)))
        return
    from tasks.models import Payment

    refund_id, is_withdrawn = f"rf-{uuid4().hex[:8]}", chance.random() < 0.3
    with shop.transaction() as session:
        payment = session.get_one(Payment, ("default", order), with_for_update=True)
        if shop.refunds.request_rest(session, payment, refund_id=refund_id, reason="test") == 0:
            return
        if not is_withdrawn:
            shop.refunds.refund_payment.enqueue(session, refund_id=refund_id, is_reserved=True)
    if is_withdrawn:
        with shop.transaction() as session:
            assert shop.refunds.withdraw(session, refund_id, "withdrawn") == "refused"


def report_some(shop: Shop, order: str, row: Any, chance: random.Random) -> None:
    """The provider reports that a refund was made, or that it has failed."""
    (charge,) = shop.one("SELECT charge_id FROM payments WHERE id = :id", id=order)
    there, state = row.provider_refund_id or f"re_{row.id}", chance.choice(("succeeded", "succeeded", "failed"))
    settle(shop, of_refund(order, row.id, charge, state, there, amount=row.amount))


def change_some(shop: Shop, row: Any, chance: random.Random) -> None:
    """A person gives up, says what has become of it, rightly or not, or replays."""
    made = Happened({"id": f"re_{row.id}", "amount": row.amount, "currency": "EUR", "status": "succeeded"})
    if row.operation == "released":
        give_up(shop, row.id)
    elif row.operation == "failed":
        with suppress(ChangeRefused):  # its outcome is known
            match chance.randrange(5):
                case 0 | 1:
                    resolve(shop, row.id, DidNotHappen(), end=True)
                case 2:
                    resolve(shop, row.id, DidNotHappen())
                case 3:
                    resolve(shop, row.id, made)
                case 4:
                    shop.replay(row.id)


@pytest.mark.long
def test_in_any_order_what_is_reserved_is_the_sum_of_what_may_have_moved(shop: Shop) -> None:
    moved: Counter[tuple[str, str]] = Counter()
    refunds = text(
        "SELECT f.*, r.status AS operation FROM refunds f LEFT JOIN idempotency.records r"
        " ON (r.tenant, r.task, r.key) = (f.tenant, 'refunds.refund_payment', f.id)"
        " WHERE f.payment_id = :id ORDER BY f.created_at"
    )
    for seed in (2, 5):
        chance = random.Random(seed)
        shop.forget()
        order, _ = captured(shop)
        rows: list[Any] = []
        for _ in range(35):
            messages = [sent for sent in shop.waiting() if sent.row.task == REFUND]
            match chance.randrange(10):
                case 0 | 1 | 2 if messages:
                    deliver_one(shop, order, chance.choice(messages), chance)
                case 3 | 4 | 5 | 6 if changeable := [row for row in rows if row.operation in ("released", "failed")]:
                    change_some(shop, chance.choice(changeable), chance)
                case 7 if rows:
                    report_some(shop, order, chance.choice(rows), chance)
                case _ if len(rows) < 5:
                    request_some(shop, order, chance)
            shop.run(REFUND, "notifications", "support", "webhooks")  # what waits for the charge is settled
            before = {row.id: row.status for row in rows}
            with shop.books.connect() as connection:
                rows = list(connection.execute(refunds, {"id": order}))
            moved.update((before[row.id], row.status) for row in rows if before.get(row.id, row.status) != row.status)
            refunded(shop, order)
            assert posted_net(shop, order) == 1000 - sum(row.amount for row in rows if row.status == "refunded")
    expected = {("reserved", "unknown"), ("unknown", "refused"), ("unknown", "refunded"), ("refused", "refunded")}
    assert expected <= set(moved), moved
