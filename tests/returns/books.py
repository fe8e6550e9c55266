"""What has to hold when a return has ended: its row, its labels, its money and its goods are those of one branch."""

from __future__ import annotations

from sqlalchemy import text

from tasks.branches import BRANCHES
from tests.orders.books import POSTED, check_stock
from tests.returns.shop import Returns

_MOVED = text("SELECT kind, quantity FROM stock_movements WHERE reference = :id")
_LABELS = text("SELECT id, kind, lower(status) FROM labels WHERE return_id = :id ORDER BY created_at")
_MAILS = text("SELECT about, status FROM notifications WHERE about LIKE 'return.%:' || :id")
ENDS = {f"return.{end}" for end in ("refunded", "rejected", "aborted", "cancelled", "escalated")}


def check_return(shop: Returns, return_id: str, branch: str) -> None:
    """The return has ended by this branch, and nothing is lost or doubled."""
    expected, row = BRANCHES[branch], shop.row(return_id)
    assert (row.status, row.problem) == (expected.status, expected.problem)
    assert shop.cases(return_id) == set(expected.cases)
    assert shop.saga(return_id).status == ("FAILED" if expected.undone else "COMPLETED")
    check_told(shop, return_id)
    check_labels(shop, return_id)
    labels = [label.status for label in shop.labels(return_id) if label.kind == "return"]
    assert labels == ([] if expected.label is None else [expected.label.lower()])
    check_goods(shop, return_id, expected.goods, released="goods_not_booked" in expected.cases)
    check_money(shop, row.order_id, refunded=expected.refunded)
    check_stock(shop)


def check_told(shop: Returns, return_id: str) -> None:
    """Its end was told once, and the buyer was told of everything once."""
    told = [event for event in shop.told_of(return_id) if event.startswith("return.")]
    assert len([event for event in told if event in ENDS]) == 1, told
    of_buyer = {f"{event}:{return_id}" for event in told if event != "return.late"}
    with shop.books.connect() as connection:
        mails = connection.execute(_MAILS, {"id": return_id}).all()
    assert {(mail.about, mail.status) for mail in mails} == {(about, "sent") for about in of_buyer}
    assert len(of_buyer) == len([event for event in told if event != "return.late"]), told


def check_labels(shop: Returns, return_id: str) -> None:
    """Each label that the carrier has made is known, with its status, and the other way round."""
    with shop.books.connect() as connection:
        known = {tuple(row) for row in connection.execute(_LABELS, {"id": return_id})}
    assert known == {(label.id, label.kind, label.status) for label in shop.labels(return_id)}


def check_goods(shop: Returns, return_id: str, kind: str | None, *, released: bool = False) -> None:
    """The pieces of the order were booked as `kind`, in the commit of their reservation; or stay the order's."""
    order = shop.row(return_id).order_id
    reservation = shop.one("SELECT * FROM reservations WHERE order_id = :id", id=order)
    with shop.books.connect() as connection:
        moved = [tuple(row) for row in connection.execute(_MOVED, {"id": return_id})]
    if kind is None:
        assert moved == []
        assert reservation.status == ("STOCK_RELEASED" if released else "STOCK_RESERVED")  # released: by the test
    else:
        assert moved == ([(kind, reservation.quantity)] if reservation.quantity else [])
        assert reservation.status == "STOCK_RETURNED"


def check_money(shop: Returns, order: str, *, refunded: bool) -> None:
    """What is left of the charge, by the provider's book, the ledger and the payment."""
    payment = shop.one("SELECT * FROM payments WHERE order_id = :id", id=order)
    net = shop.provider.net(payment.id)
    assert net == (0 if refunded else payment.amount)
    with shop.books.connect() as connection:
        assert connection.execute(POSTED, {"id": payment.id}).scalar_one() == net
    assert payment.amount - payment.refunded == net
