"""Proofs of a second reader: corruptions of the books that the check of the demo does not notice."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from demo.checking import CAPTURE
from demo.order_books import OrderBooks, check_orders
from tests.pipeline.agreeing_orders import MAILS, RULES, A, D, K, Q, agreeing, of, outside


def corrupted(what: str, b: OrderBooks, directory: Path) -> dict[str, Any]:
    match what:
        case "a mail to another buyer":
            return outside(
                directory, mails=((MAILS[0][0], "customer-somebody-else@customers.example", *MAILS[0][2:]), *MAILS[1:])
            )
        case "every mail to one and the same buyer, who ordered nothing":
            return outside(directory, mails=tuple((mail[0], "x@x", *mail[2:]) for mail in MAILS))
        case "a return that names no refund":
            return {"returns": {**b.returns, of(A): b.returns[of(A)]._replace(refund_id=None)}}
        case "two returns that name one refund":
            return {"returns": {**b.returns, of(A): b.returns[of(A)]._replace(refund_id=b.returns[of(Q)].refund_id)}}
        case "a reservation of another article":
            _, pieces, status = b.reservations[K]
            return {"reservations": {**b.reservations, K: ("article-other", pieces, status)}}
        case "a declined payment whose operation has not failed":
            return {"unfinished": {k: v for k, v in b.unfinished.items() if k != (CAPTURE, D)}}
        case "a charge of another customer":
            charge = b.provider.charges[0]
            other = dataclasses.replace(charge, metadata={**charge.metadata, "customer_id": "somebody else"})
            return {"provider": b.provider._replace(charges=[other, *b.provider.charges[1:]])}
        case "a refund of the provider under another refund's name":
            refund = b.provider.refunds[0]
            another = dataclasses.replace(refund, metadata={"refund_id": "no such refund", "purchase_id": "another"})
            return {"provider": b.provider._replace(refunds=[another, *b.provider.refunds[1:]])}
    raise AssertionError(what)


WHATS = (
    "a mail to another buyer",
    "every mail to one and the same buyer, who ordered nothing",
    "a return that names no refund",
    "two returns that name one refund",
    "a reservation of another article",
    "a declined payment whose operation has not failed",
    "a charge of another customer",
    "a refund of the provider under another refund's name",
)


@pytest.mark.parametrize("what", WHATS)
def test_the_check_sees(tmp_path: Path, what: str) -> None:
    books = agreeing(tmp_path / "agreeing")
    verdict = check_orders(dataclasses.replace(books, **corrupted(what, books, tmp_path)), RULES)
    assert verdict.discrepancies != []
