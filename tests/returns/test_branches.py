"""Taking orders back: every way in which a return can end, from the request to the last row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from tasks.branches import BRANCHES
from tests.orders.books import check_stock
from tests.returns.books import check_return
from tests.returns.shop import Returns


@pytest.fixture(autouse=True)
def _fresh(shop: Returns) -> Iterator[None]:
    shop.forget()
    yield
    check_stock(shop)


def label_refused(shop: Returns) -> str:
    order, return_id = shop.bought(), f"ret-{uuid4().hex[:10]}"
    shop.refuses_label(return_id)
    return shop.send_back(order, return_id)


def cancelled(shop: Returns) -> str:
    return_id = shop.labelled()
    shop.cancel_return(return_id)
    return return_id


def saga_fails(shop: Returns) -> str:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a defect")

    return_id = shop.send_back(shop.bought())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.returns, "send_label", broken)
        shop.run()
    return return_id


def no_pickup(shop: Returns) -> str:
    return_id = shop.labelled()
    shop.pass_days(5)
    shop.run()
    return return_id


def label_not_void(shop: Returns) -> str:
    """The shop does not find it in its own books; afterwards it is there again, and as valid as before."""
    return_id = shop.labelled()
    rename = "UPDATE labels SET id = :new WHERE id = :old"
    (label,) = shop.labels(return_id)
    shop.write(rename, old=label.id, new="mislaid")
    shop.pass_days(5)
    shop.run()
    shop.write(rename, old="mislaid", new=label.id)
    return return_id


def late_parcel(shop: Returns) -> str:
    """The driver was there as the time ran out: the carrier says so when the label is to be voided."""
    return_id = shop.labelled()
    shop.pass_days(5)
    shop.run("shipping.void_label")
    shop.collect(return_id)
    shop.run()
    return return_id


def cancelled_late(shop: Returns) -> str:
    return_id = shop.in_transit()
    shop.cancel_return(return_id)
    return return_id


def no_inspection(shop: Returns) -> str:
    return_id = shop.in_transit()
    shop.pass_days(14)
    shop.run()
    return return_id


def late_inspection(shop: Returns) -> str:
    return_id = no_inspection(shop)
    shop.inspect(return_id, "APPROVED")
    return return_id


def inspected(shop: Returns, verdict: str, *, reship: bool = False) -> str:
    return_id = shop.in_transit(reship=reship)
    shop.inspect(return_id, verdict)
    return return_id


def refund_fails(shop: Returns) -> str:
    return_id = shop.in_transit()
    shop.provider.keeps.add(shop.row(return_id).order_id)
    shop.inspect(return_id, "APPROVED")
    return return_id


def cancelled_at_last(shop: Returns) -> str:
    return_id = inspected(shop, "APPROVED")
    shop.run("refunds.refund_payment")
    shop.cancel_return(return_id)
    return return_id


def goods_not_booked(shop: Returns) -> str:
    """Its pieces are not its own any more: by hand, in the books of the warehouse."""
    return_id = shop.in_transit()
    order = shop.row(return_id).order_id
    for statement in (
        "INSERT INTO stock_movements (kind, reference, sku, quantity) "
        "SELECT 'released', order_id, sku, quantity FROM reservations WHERE order_id = :id",
        "UPDATE stock SET available = available + r.quantity, reserved = reserved - r.quantity "
        "FROM reservations r WHERE r.sku = stock.sku AND order_id = :id",
        "UPDATE reservations SET status = 'STOCK_RELEASED' WHERE order_id = :id",
    ):
        shop.write(statement, id=order)
    shop.inspect(return_id, "APPROVED")
    return return_id


def both_fail(shop: Returns) -> str:
    return_id = goods_not_booked(shop)
    shop.provider.keeps.add(shop.row(return_id).order_id)
    return return_id


def reship_refused(shop: Returns) -> str:
    return_id = shop.in_transit(reship=True)
    shop.refuses_label(return_id, "reship")
    shop.inspect(return_id, "REJECTED")
    return return_id


TAKEN: dict[str, Callable[[Returns], str]] = {
    "label refused": label_refused,
    "cancelled": cancelled,
    "saga fails": saga_fails,
    "no pick-up": no_pickup,
    "label not void": label_not_void,
    "late parcel": late_parcel,
    "cancelled late": cancelled_late,
    "no inspection": no_inspection,
    "late inspection": late_inspection,
    "approved": lambda shop: inspected(shop, "APPROVED"),
    "damaged": lambda shop: inspected(shop, "DAMAGED"),
    "refund fails": refund_fails,
    "goods not booked": goods_not_booked,
    "both fail": both_fail,
    "cancelled at last": cancelled_at_last,
    "rejected": lambda shop: inspected(shop, "REJECTED"),
    "reshipped": lambda shop: inspected(shop, "REJECTED", reship=True),
    "reship refused": reship_refused,
}


def test_every_branch_is_taken() -> None:
    assert list(TAKEN) == list(BRANCHES)


@pytest.mark.parametrize("branch", TAKEN)
def test_a_return_ends_as_the_table_of_branches_says(shop: Returns, branch: str) -> None:
    return_id = TAKEN[branch](shop)
    shop.run()
    check_return(shop, return_id, branch)
    kinds = [label.kind for label in shop.labels(return_id)]
    assert kinds == {"label refused": [], "reshipped": ["return", "reship"]}.get(branch, ["return"])
