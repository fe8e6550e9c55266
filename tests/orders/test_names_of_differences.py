"""A difference whose name for its reader changes while both sides stay: the same key, with other arguments."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from idempotency.operate import discard
from idempotency.operate.people import Person
from idempotency.operate.replay import replay
from tests.orders.shop import Shop
from tests.orders.test_reconciliation import found, paid
from tests.orders.test_refunds_of_others import submit
from tests.support.operators import ANN, act

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _fresh(shop: Shop) -> None:
    shop.forget()


def told(shop: Shop, id: str) -> list[tuple[str, str]]:
    """The letters about an object of the provider's."""
    query = "SELECT reason, status FROM idempotency.dead_letters WHERE key LIKE :key ORDER BY id"
    with shop.books.connect() as connection:
        return [tuple(row) for row in connection.execute(text(query), {"key": f"%:{id}:%"})]


def discarded(shop: Shop, letter: int) -> None:
    with shop.operating():
        act(shop.app, discard.request, Person("ann", "operator"), letter, "seen to next week")
        act(shop.app, discard.approve, Person("ben", "admin"), letter)


def test_a_difference_that_has_another_name_the_next_day_has_no_second_letter(shop: Shop, gateway: Any) -> None:
    """After a restore: a refund at the provider has our name, of which the books know nothing, so it is told as `stripe-re_1`. Then the
    client requests it again, and it is refused (its payment was forgotten, too): from then on the name is known, and told.
    """
    order, charge = paid(shop)
    name = f"r-{uuid4().hex}"
    made = gateway.refund(refund_id=name, payment_id=order, charge_id=charge, amount=100, idempotency_key=uuid4().hex)[
        "id"
    ]
    assert found(shop)[made] == ("100 EUR", None)
    shop.run()
    assert told(shop, made) == [("ledger_differs", "open")]
    submit(shop, name, "p-forgotten", 100)
    shop.run()
    assert found(shop)[made] == ("100 EUR", None)
    shop.run()
    assert told(shop, made) == [("ledger_differs", "open")]

    query = "SELECT id FROM idempotency.dead_letters WHERE key LIKE :key AND reason = 'ledger_differs'"
    letter = shop.one(query, key=f"refund:{made}:%")[0]
    discarded(shop, letter)
    for _ in range(3):  # the next days
        assert found(shop)[made] == ("100 EUR", None)
        shop.run()
    assert told(shop, made) == [("ledger_differs", "discarded"), ("ledger_differs", "open")]


@pytest.mark.parametrize("given_back", [True, False])
def test_a_charge_that_carries_another_tenants_name_is_told_to_the_one_in_whose_books_it_is(
    shop: Shop, gateway: Any, given_back: bool
) -> None:
    """A person of t1 has typed the id of t2's charge. t2's payment was declined here, and so is known, without a charge."""
    theirs = f"p-{uuid4().hex}"
    with shop.books.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO payments (tenant, id, customer_id, amount, currency, status, refunded)"
                " VALUES ('t2', :id, 'c1', 700, 'EUR', 'failed', 0)"
            ),
            {"id": theirs},
        )
    about = {"customer_id": "c1", "amount": 700, "currency": "EUR"}
    charge = gateway.capture(payment_id=theirs, **about, idempotency_key=uuid4().hex, tenant="t2")["id"]
    order = shop.order(tenant="t1")
    shop.run()
    with shop.books.begin() as connection:
        connection.execute(text("UPDATE payments SET charge_id = :it WHERE id = :id"), {"id": order, "it": charge})
    if given_back:
        gateway._connection().client.v1.refunds.create({"payment_intent": charge, "amount": 700})
    for _ in range(3):
        assert found(shop)[charge] == ("700 EUR", f"1000 EUR of {order}")
        shop.run()
    query = "SELECT tenant, last_error FROM idempotency.dead_letters WHERE key LIKE :key AND status = 'open'"
    with shop.books.connect() as connection:
        (letter,) = connection.execute(text(query), {"key": f"charge:{charge}:%"}).all()
    assert letter.tenant == "t1"
    assert f"the ledger 1000 EUR of {order}" in letter.last_error


def test_a_letter_of_before_is_no_second_one_and_is_replayed(
    shop: Shop, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of before has called the task with the name, too."""
    from tasks import reconciliation

    order, charge = paid(shop)
    set_amount(shop, order, 999)
    check = reconciliation.check_difference
    with monkeypatch.context() as patch:
        enqueue = check.enqueue
        patch.setattr(type(check), "enqueue", lambda self, session, **given: enqueue(session, name=order, **given))
        assert charge in found(shop)
    shop.run()
    for _ in range(2):
        assert charge in found(shop)
        shop.run()
    query = "SELECT id, reason FROM idempotency.dead_letters WHERE key LIKE :key"
    with shop.books.connect() as connection:
        (letter,) = connection.execute(text(query), {"key": f"charge:{charge}:%"}).all()
    assert letter.reason == "ledger_differs"
    set_amount(shop, order, 1000)
    with shop.operating():
        replay(shop.app, letter.id, ANN)
    shop.run()
    assert (
        shop.one("SELECT status FROM idempotency.records WHERE key LIKE :key", key=f"charge:{charge}:%")[0]
        == "completed"
    )


def set_amount(shop: Shop, order: str, cents: int) -> None:
    with shop.books.begin() as connection:
        connection.execute(
            text("UPDATE ledger SET amount = :cents WHERE payment_id = :id"), {"id": order, "cents": cents}
        )


def test_a_letter_about_another_call_hides_no_difference(shop: Shop, gateway: Any) -> None:
    """Somebody has called the check under its key with other arguments."""
    from tasks import reconciliation

    order, charge = paid(shop)
    set_amount(shop, order, 999)
    assert charge in found(shop)
    shop.run()
    query = "SELECT id, key FROM idempotency.dead_letters WHERE key LIKE :key AND reason = 'ledger_differs' ORDER BY id"
    letter, key = shop.one(query, key=f"charge:{charge}:%")
    with shop.transaction() as session:
        reconciliation.check_difference.enqueue(session, difference=key, kind="charge", id="pi_another")
    shop.run()
    discarded(shop, letter)
    assert charge in found(shop)
    shop.run()
    assert told(shop, charge) == [
        ("ledger_differs", "discarded"),
        ("fingerprint_mismatch", "open"),
        ("ledger_differs", "open"),
    ]
