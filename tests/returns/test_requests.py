"""Asking for a return: which are accepted, once, and what is refused, by field."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from tasks.validation import NotReturnable, Taken
from tests.returns.books import check_return
from tests.returns.shop import Returns
from tests.support.operations import at_once

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture(scope="module")
def order(shop: Returns) -> str:
    """An order for requests that are refused."""
    return shop.bought()


def test_the_same_request_at_once_and_again_is_one_return(shop: Returns) -> None:
    order, return_id = shop.bought(), f"ret-{uuid4().hex[:8]}"
    at_once(4, lambda _: shop.send_back(order, return_id))
    assert len(shop.outbox()) == 1
    shop.run()
    accepted = len(shop.outbox())
    shop.send_back(order, return_id)
    assert len(shop.outbox()) == accepted
    assert shop.told_of(return_id) == ["return.labelled"]
    assert len(shop.labels(return_id)) == 1
    for changed in ({"reason": "another"}, {"reship": True}):
        with pytest.raises(Taken, match="return_id: was used before, for another return"):
            shop.send_back(order, return_id, **changed)
    for other in (shop.bought(), "no such order"):
        with pytest.raises(Taken, match="return_id"):
            shop.send_back(other, return_id)


@pytest.mark.long
def test_an_order_has_one_return_at_a_time_whoever_is_first(shop: Returns) -> None:
    order = shop.bought()

    def ask(_: int) -> str | None:
        try:
            return shop.send_back(order)
        except NotReturnable:
            return None

    (first,) = [each for each in at_once(4, ask) if each is not None]
    with pytest.raises(NotReturnable, match="has a return already"):
        shop.send_back(order)
    shop.run()
    shop.cancel_return(first)
    shop.run()
    check_return(shop, first, "cancelled")
    second = shop.send_back(order)
    shop.run()
    shop.collect(second)
    shop.inspect(second, "APPROVED")
    shop.run()
    check_return(shop, second, "approved")
    with pytest.raises(NotReturnable, match="has a return already"):
        shop.send_back(order)  # it is refunded


def test_the_table_itself_has_one_return_of_an_order_at_a_time(shop: Returns) -> None:
    row = "INSERT INTO returns (id, order_id, customer_id, reason, reship) VALUES (:id, :order, 'c', '', false) RETURNING 1"
    order = uuid4().hex
    with shop.books.connect() as connection, connection.begin():
        connection.execute(text(row), {"id": f"a-{order}", "order": order})
        with pytest.raises(IntegrityError, match="returns_of_order"):
            connection.execute(text(row), {"id": f"b-{order}", "order": order})


@pytest.mark.long
@pytest.mark.parametrize("status", ["unknown", "PAID", "CANCELLED"])
def test_only_an_order_that_is_processing_can_be_returned(shop: Returns, status: str) -> None:
    order = "no such order"
    if status != "unknown":
        order = shop.order(None)
        shop.run("order.paid > warehouse")
        if status == "CANCELLED":
            shop.cancel(order)
            shop.run()
        assert shop.one("SELECT status FROM orders WHERE id = :id", id=order)[0] == status
    with pytest.raises(NotReturnable, match="only an order that is PROCESSING can be returned"):
        shop.send_back(order)


@pytest.mark.long
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("return_id", "ä", "return_id: only printable ASCII"),
        ("return_id", "x" * 256, "return_id: .*255"),
        ("order_id", "", "order_id: must not be empty"),
        ("order_id", 7, "order_id: must be"),
        ("reason", "x" * 201, "reason: at most 200 printable characters"),
        ("reason", "a\nb", "reason: at most 200 printable characters"),
        ("reship", 1, "reship: must be true or false"),
    ],
)
def test_a_bad_request_is_refused_by_field_and_nothing_is_written(
    shop: Returns, order: str, field: str, value: Any, says: str
) -> None:
    wanted = {"return_id": "bad", "order_id": order, "reason": "r", field: value}
    with shop.transaction() as session, pytest.raises(ValueError, match=says):
        shop.returns.submit_return(session, **wanted)
    assert shop.one("SELECT count(*) FROM returns WHERE order_id = :id", id=order)[0] == 0
    assert shop.waiting() == []


@pytest.mark.parametrize(
    ("verdict", "says"),
    [("approved", "verdict: must be one of APPROVED, DAMAGED, REJECTED"), (None, "verdict: must be one of")],
)
def test_a_verdict_that_does_not_exist_is_refused_where_it_is_given(shop: Returns, verdict: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        shop.inspect("some return", verdict)
    assert shop.outbox() == []


def test_a_parcel_is_inspected_once_and_by_one_verdict(shop: Returns) -> None:
    return_id = f"ret-{uuid4().hex[:8]}"
    assert sorted(at_once(4, lambda _: shop.inspect(return_id, "DAMAGED"))) == [False, False, False, True]
    with pytest.raises(Taken, match="return_id: was inspected before, with another verdict"):
        shop.inspect(return_id, "APPROVED")
    assert shop.told_of(return_id) == ["warehouse.inspected"]


def test_a_pick_up_without_a_label_is_refused_where_it_is_told(shop: Returns, order: str) -> None:
    with pytest.raises(ValueError, match="return_id: has no label"):
        shop.confirm("no such return")


def test_a_return_begun_by_its_saga_alone_is_refused(shop: Returns, order: str) -> None:
    """Its name was called before there was a request: that has failed, and would not be done again for it."""
    return_id = f"ret-{uuid4().hex[:8]}"
    with shop.transaction() as session:
        shop.returns.process_return.enqueue(session, return_id=return_id)
    shop.run()
    assert shop.saga(return_id).status == "FAILED"
    with pytest.raises(Taken, match="its saga was begun before there was a request"):
        shop.send_back(order, return_id)
    assert shop.one("SELECT count(*) FROM returns WHERE id = :id", id=return_id)[0] == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("return_id", ["../b%{x}{return_id}%s%(a)s", "x" * 255])
def test_a_return_has_any_id(shop: Returns, return_id: str) -> None:
    shop.send_back(shop.bought(), return_id)
    shop.run()
    shop.collect(return_id)
    shop.inspect(return_id, "APPROVED")
    shop.run()
    check_return(shop, return_id, "approved")


@pytest.mark.long
def test_tenants_do_not_see_each_other(shop: Returns) -> None:
    """The same ids for two tenants are two orders and two returns, by rows and by the database's own walls."""
    theirs = shop.bought(tenant="globex", checkout_session_id="cs-walls")
    mine = shop.bought(checkout_session_id="cs-walls")
    with pytest.raises(NotReturnable):
        shop.send_back(theirs)
    shop.send_back(theirs, "ret-walls", tenant="globex")
    shop.send_back(mine, "ret-walls")
    shop.run()
    for tenant in ("globex", "default"):
        with shop.transaction(tenant) as session:
            for table in ("returns", "labels"):
                found = session.execute(text(f"SELECT DISTINCT tenant FROM {table}")).scalars().all()
                assert found == [tenant], table
    assert shop.confirm("ret-walls", tenant="globex")
    shop.inspect("ret-walls", "APPROVED", tenant="globex")
    shop.run()
    statuses = {row.tenant: row.status for row in shop.all("SELECT tenant, status FROM returns WHERE id = 'ret-walls'")}
    assert statuses == {"globex": "REFUNDED", "default": "LABELLED"}
    assert (shop.provider.net(theirs), shop.provider.net(mine)) == (0, 1000)
