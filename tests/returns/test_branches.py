"""Taking orders back: every way in which a return can end, from the request to the last row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from idempotency import DidNotHappen, EffectUnknown, Happened, OperationId, StillUnknown
from idempotency.application import runtime_of
from idempotency.operate.change import read
from idempotency.operate.replay import replay
from idempotency.operate.resolve import resolve_effect
from idempotency.sagas.attempt import SagaAttempt
from idempotency.store import sagas
from idempotency.store.answers import error_text
from tasks.branches import BRANCHES
from tests.returns.books import check_return
from tests.returns.shop import Returns
from tests.support.operators import ANN

pytestmark = pytest.mark.usefixtures("fresh")


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


@pytest.mark.few(1)
@pytest.mark.parametrize("branch", TAKEN)
def test_a_return_ends_as_the_table_of_branches_says(shop: Returns, branch: str) -> None:
    return_id = TAKEN[branch](shop)
    shop.run()
    check_return(shop, return_id, branch)
    kinds = [label.kind for label in shop.labels(return_id)]
    assert kinds == {"label refused": [], "reshipped": ["return", "reship"]}.get(branch, ["return"])


@pytest.mark.long
def test_a_label_that_a_person_has_found_is_void_at_the_carrier_if_it_is_void_here(shop: Returns) -> None:
    made = type(shop.shipping.carrier).create_label
    carrier = shop.shipping.carrier

    def made_in_silence(**call: Any) -> None:
        made(carrier, **call)
        raise EffectUnknown("no answer")

    return_id = shop.send_back(shop.bought())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carrier, "create_label", made_in_silence, raising=False)
        patch.setattr(carrier, "find_label", lambda **_: StillUnknown(), raising=False)
        shop.run()
    assert shop.saga(return_id).status == "COMPENSATING"
    (label,) = shop.labels(return_id)
    letter = shop.one(
        "SELECT id, tenant, task, key FROM idempotency.dead_letters WHERE task = 'shipping.create_label'"
        " AND status = 'open' AND key LIKE '%' || :id || '%'",
        id=return_id,
    )
    with shop.operating():
        with runtime_of(shop.app).autocommit() as connection:
            seen = read(connection, OperationId(*letter[1:]), runtime_of(shop.app).settings.service)
        resolve_effect(shop.app, seen, "label", Happened({"id": label.id, "status": "created"}), ANN)
        replay(shop.app, letter.id, ANN)
    shop.run()
    assert shop.saga(return_id).status == "FAILED"
    here = shop.one("SELECT status FROM labels WHERE return_id = :id", id=return_id)[0]
    (label,) = shop.labels(return_id)
    assert (here.lower(), label.status) == ("voided", "voided")


@pytest.mark.long
def test_a_return_that_a_defect_has_ended_is_not_told_as_cancelled(shop: Returns) -> None:
    """docs/returns.md: CANCELLED if a person has cancelled it; or ESCALATED: a failure of ours is left to a person."""

    def silent(**_: Any) -> None:
        raise EffectUnknown("no answer")

    carrier = shop.shipping.carrier
    return_id = shop.send_back(shop.bought())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carrier, "create_label", silent, raising=False)
        patch.setattr(carrier, "find_label", lambda **_: StillUnknown(), raising=False)
        shop.run()
    letter = shop.one(
        "SELECT id, tenant, task, key FROM idempotency.dead_letters WHERE task = 'shipping.create_label'"
        " AND status = 'open' AND key LIKE '%' || :id || '%'",
        id=return_id,
    )
    with shop.operating():
        with runtime_of(shop.app).autocommit() as connection:
            seen = read(connection, OperationId(*letter[1:]), runtime_of(shop.app).settings.service)
        resolve_effect(shop.app, seen, "label", DidNotHappen(), ANN, end=True)
    shop.run()
    assert shop.saga(return_id).status == "FAILED"
    assert (shop.row(return_id).status, "return.cancelled" in shop.told_of(return_id)) == ("ESCALATED", False)


@pytest.mark.long
def test_a_rejected_return_whose_second_label_was_voided_is_seen_by_somebody(shop: Returns) -> None:
    """Cancelled after its last step and before its end: the goods were to go back, and nobody is told that they do not."""
    return_id = shop.in_transit(reship=True)
    completes = SagaAttempt.complete

    def cancelled_first(self: SagaAttempt, result: Any) -> None:
        with shop.books.connect() as connection, connection.begin():
            id = OperationId("default", shop.returns.process_return.name, return_id)
            assert sagas.cancel(connection, id, error_text("cancelled", "a person"))
        completes(self, result)

    shop.inspect(return_id, "REJECTED")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SagaAttempt, "complete", cancelled_first)
        shop.run()
    (label,) = [label for label in shop.labels(return_id) if label.kind == "reship"]
    assert shop.row(return_id).status == "REJECTED"
    assert label.status == "created" or shop.cases(return_id)
