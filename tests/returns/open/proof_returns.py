"""Proofs of a second reader: each asserts the good outcome, and fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest

from idempotency import Defer, OperationId
from idempotency.operate.saga import signal_saga
from idempotency.store.rights import OPERATOR
from tests.returns.books import check_return
from tests.returns.shop import Returns
from tests.support.operators import ANN
from tests.support.roles import url_of


@pytest.fixture(autouse=True)
def _fresh(shop: Returns) -> None:
    shop.forget()


@contextmanager
def a_person(shop: Returns) -> Iterator[None]:
    url = shop.app.conf.idempotency_database_url
    shop._connect(url_of(OPERATOR, url))
    try:
        yield
    finally:
        shop._connect(url)


def in_transit(shop: Returns, order: str | None = None, **changes: Any) -> str:
    return_id = shop.send_back(order or shop.bought(), **changes)
    shop.run()
    shop.collect(return_id)
    shop.run()
    return return_id


def by_hand(shop: Returns, order: str, amount: int) -> str:
    refund_id = f"hand-{uuid4().hex[:8]}"
    with shop.transaction() as session:
        shop.refunds.submit_refund(session, refund_id=refund_id, payment_id=order, amount=amount, reason="by hand")
    return refund_id


def unavailable(shop: Returns, patch: pytest.MonkeyPatch, *refunds: str) -> None:
    """The provider does not answer calls about these refunds."""
    plain = type(shop.provider).refund

    def refund(*, refund_id: str, **call: Any) -> Any:
        if refund_id in refunds:
            raise Defer(1, "unreachable")
        return plain(shop.provider, refund_id=refund_id, **call)

    patch.setattr(shop.provider, "refund", refund, raising=False)


# ---- a verdict that contradicts what a person has said


def test_a_verdict_other_than_what_a_person_said_is_seen_to(shop: Returns) -> None:
    return_id = in_transit(shop)
    with a_person(shop):
        id = OperationId("default", shop.returns.process_return.name, return_id)
        signal_saga(shop.app, id, "warehouse.inspected", {"return_id": return_id, "verdict": "APPROVED"}, ANN)
    shop.run()
    check_return(shop, return_id, "approved")
    assert shop.inspect(return_id, "DAMAGED") is True
    shop.run()
    assert shop.cases(return_id) != set()


# ---- what fails for good here is not the buyer's cancellation


def test_a_return_that_cannot_go_on_has_a_case(shop: Returns, monkeypatch: pytest.MonkeyPatch) -> None:
    return_id = shop.send_back(shop.bought())

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(shop.returns, "send_label", broken)
        shop.run()
    row = shop.row(return_id)
    assert shop.cases(return_id) != set(), (row.status, row.problem, shop.told_of(return_id))


# ---- cancelled when all is done


def test_a_return_that_is_cancelled_after_its_refund_says_so(shop: Returns) -> None:
    return_id = in_transit(shop)
    shop.inspect(return_id, "APPROVED")
    while not [sent for sent in shop.waiting() if sent.row.task == "refunds.refund_payment"]:
        shop.deliver(shop.waiting()[0])
    shop.cancel_return(return_id)
    shop.run()
    check_return(shop, return_id, "cancelled late")


# ---- the label of a person


def test_a_label_that_a_person_has_voided_is_void(shop: Returns) -> None:
    from idempotency import PermanentError
    from idempotency.operate.saga import mark_undone

    return_id = shop.send_back(shop.bought())
    shop.run()

    def refuses(**_: Any) -> None:
        raise PermanentError("no", "carrier_refused")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.shipping.carrier, "void_label", refuses, raising=False)
        shop.cancel_return(return_id)
        shop.run()
    with a_person(shop):
        id = OperationId("default", shop.returns.process_return.name, return_id)
        mark_undone(shop.app, id, "shipping.create_label", ANN)
    shop.run()
    assert shop.row(return_id).status == "CANCELLED"
    assert shop.one("SELECT status FROM labels WHERE return_id = :id", id=return_id)[0] == "VOIDED"


@pytest.mark.parametrize("return_id", ["a/b%{x}", "x" * 255, "{return_id}", "..", "%s%(a)s"])
def test_a_return_of_any_id(shop: Returns, return_id: str) -> None:
    return_id = shop.send_back(shop.bought(), return_id)
    shop.run()
    shop.collect(return_id)
    shop.run()
    shop.inspect(return_id, "APPROVED")
    shop.run()
    check_return(shop, return_id, "approved")
