"""The check of the demo's orders: each book is corrupted in turn, and each time it must say which order, and both sides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.checking import CAPTURE, Posting
from demo.order_books import LABEL, SAGA, Movement, OrderBooks, OrderVerdict, check_orders
from demo.order_rules import SCARCE
from tests.pipeline.agreeing_orders import (
    AMOUNT,
    APPROVED,
    CHARGES,
    DAMAGED,
    DECLINED,
    KEPT,
    LABEL_ENDS,
    LABELS,
    MAILS,
    PIECES,
    REFUNDS,
    RESHIPPED,
    RULES,
    SCARCE_LINE,
    A,
    C,
    D,
    K,
    N,
    Q,
    R,
    S,
    U,
    X,
    agreeing,
    charged,
    given_back,
    label,
    of,
    outside,
)


def check(books: OrderBooks) -> OrderVerdict:
    return check_orders(books, RULES)


def test_the_check_finds_nothing_where_all_books_agree(tmp_path: Path) -> None:
    verdict = check(agreeing(tmp_path))
    assert verdict.discrepancies == []
    assert (verdict.orders, verdict.processing, verdict.cancelled) == (10, 7, 3)
    assert verdict.returns == {"REFUNDED": 2, "REJECTED": 1, "ESCALATED": 2, "COMPENSATED": 1}
    assert (verdict.kept_cents, verdict.given_back_cents, verdict.refunds) == (5 * AMOUNT, 3 * AMOUNT, 3)
    assert verdict.emails == len(MAILS)
    assert (verdict.lost, verdict.doubled, verdict.stock_lost) == (0, 0, 0)


# What is done to a book, and what the check must then say: kind, id, and a part of the text.
Corrupt = Callable[[OrderBooks], dict[str, Any]]
ARTICLE = RULES.article(KEPT) or ""


def changed(books: OrderBooks, book: str, id: str, **values: Any) -> dict[str, Any]:
    rows = getattr(books, book)
    return {book: {**rows, id: rows[id]._replace(**values)}}


def without(books: OrderBooks, book: str, id: Any) -> dict[str, Any]:
    return {book: {key: row for key, row in getattr(books, book).items() if key != id}}


def moved(books: OrderBooks, *, add: tuple[Movement, ...] = (), remove: str = "") -> dict[str, Any]:
    left = [each for each in books.movements if f"{each.kind} {each.reference}" != remove]
    return {"movements": [*left, *add]}


def of_provider(books: OrderBooks, what: str, **metadata: str) -> dict[str, Any]:
    """The first charge or refund of the provider with other metadata."""
    first, *others = getattr(books.provider, what)
    first = dataclasses.replace(first, metadata={**first.metadata, **metadata})
    return {"provider": books.provider._replace(**{what: [first, *others]})}


CORRUPTIONS: dict[str, tuple[Corrupt, str, str, str]] = {
    "a return that names no refund": (
        lambda b: changed(b, "returns", of(A), refund_id=None),
        "wrong",
        of(A),
        "its refund is None",
    ),
    "two returns that name one refund": (
        lambda b: changed(b, "returns", of(A), refund_id="r-q"),
        "wrong",
        of(A),
        "its refund is r-q",
    ),
    "a reservation of another article": (
        lambda b: {"reservations": {**b.reservations, K: ("x", PIECES, "STOCK_RESERVED")}},
        "wrong",
        K,
        "reservation: ('x'",
    ),
    "a declined payment whose operation has not failed": (
        lambda b: without(b, "unfinished", (CAPTURE, D)),
        "wrong",
        D,
        "has not failed, its payment has",
    ),
    "a charge of another customer": (
        lambda b: of_provider(b, "charges", customer_id="x"),
        "wrong",
        K,
        "'EUR', 'x'), not 500 of c",
    ),
    "a refund of the provider under another's name": (
        lambda b: of_provider(b, "refunds", refund_id="x"),
        "wrong",
        C,
        "('x', 500)",
    ),
    "an order that is gone": (lambda b: without(b, "orders", K), "lost", KEPT.id, "missing"),
    "an order that has not ended": (lambda b: changed(b, "orders", K, status="PAID"), "lost", K, "still PAID"),
    "an order of another amount": (lambda b: changed(b, "orders", K, amount=1), "wrong", K, "the file has"),
    "an order cancelled though nobody asked": (
        lambda b: changed(b, "orders", K, status="CANCELLED", reason="on_request"),
        "wrong",
        K,
        "by the input",
    ),
    "an order out of stock though there is enough": (
        lambda b: changed(b, "orders", C, reason="out_of_stock"),
        "wrong",
        C,
        "by the input",
    ),
    "a declined order that is processed": (
        lambda b: changed(b, "orders", D, status="PROCESSING", reason=None),
        "lost",
        D,
        f"the provider holds 0 EUR of it, {AMOUNT} are due",
    ),
    "a buyer who was told of two orders": (
        lambda b: {"told": dataclasses.replace(b.told, placed={**b.told.placed, KEPT.id: {K, "other"}})},
        "doubled",
        KEPT.id,
        "was told of 2",
    ),
    "a checkout with another order": (lambda b: changed(b, "checkouts", KEPT.id, order_id="x"), "wrong", KEPT.id, "x"),
    "a checkout of something else": (lambda b: changed(b, "checkouts", KEPT.id, quantity=9), "wrong", KEPT.id, "9)"),
    "an order that is cancelled for payments": (
        lambda b: changed(b, "orders", K, known_as="cancelled"),
        "wrong",
        K,
        "must be ('placed'",
    ),
    "an order that is never undone": (
        lambda b: changed(b, "orders", C, shown="COMPENSATING"),
        "wrong",
        C,
        "must be ('cancelled', 'FAILED')",
    ),
    "a return of another customer": (lambda b: changed(b, "returns", of(A), customer_id="x"), "wrong", of(A), "('x'"),
    "a return that was never collected": (
        lambda b: changed(b, "returns", of(A), is_collected=False),
        "wrong",
        of(A),
        "must be ('c', True",
    ),
    "a verdict that the warehouse does not have": (
        lambda b: changed(b, "returns", of(A), inspection=None),
        "wrong",
        of(A),
        "None, 'APPROVED')",
    ),
    "another verdict": (lambda b: changed(b, "returns", of(A), verdict="DAMAGED"), "wrong", of(A), "'DAMAGED')"),
    "an order that nobody placed": (
        lambda b: {"orders": {**b.orders, "x": b.orders[K]}},
        "wrong",
        "x",
        "nothing that was ordered",
    ),
    "a payment that is gone": (lambda b: without(b, "payments", K), "lost", K, "payment: missing"),
    "a payment of another customer": (
        lambda b: changed(b, "payments", K, customer_id="x"),
        "wrong",
        K,
        "payment: ('x', 500, 'EUR')",
    ),
    "a payment that is not captured": (
        lambda b: changed(b, "payments", K, status="pending"),
        "wrong",
        K,
        "payment: pending, must be captured",
    ),
    "a payment with another charge": (lambda b: changed(b, "payments", K, charge_id="x"), "wrong", K, "charge x"),
    "a payment with a refund too many": (lambda b: changed(b, "payments", K, refunded=1), "wrong", K, "1 refunded"),
    "a refund without a row": (lambda b: without(b, "refunds", "r-1"), "lost", C, "refund: missing"),
    "a refund that is not made": (lambda b: changed(b, "refunds", "r-1", status="pending"), "wrong", C, "pending"),
    "a reservation that is not released": (
        lambda b: {"reservations": {**b.reservations, C: (ARTICLE, PIECES, "STOCK_CONFIRMED")}},
        "wrong",
        C,
        "reservation",
    ),
    "pieces that were not taken": (lambda b: moved(b, remove=f"reserved {K}"), "lost", K, "movements"),
    "pieces that were taken twice": (
        lambda b: moved(b, add=(Movement("reserved", K, ARTICLE, PIECES),)),
        "wrong",
        K,
        "movements",
    ),
    "pieces that were not put back": (lambda b: moved(b, remove=f"released {C}"), "wrong", C, "movements"),
    "pieces that nobody ordered": (
        lambda b: moved(b, add=(Movement("reserved", "x", ARTICLE, 1),)),
        "wrong",
        "x",
        "nothing that was ordered",
    ),
    "a delivery that is gone": (lambda b: moved(b, remove=f"received {ARTICLE}-0"), "wrong", ARTICLE, "0 received"),
    "a piece that is gone": (
        lambda b: changed(b, "stock", ARTICLE, reserved=b.stock[ARTICLE].reserved - 1),
        "wrong",
        ARTICLE,
        "the orders leave",
    ),
    "an order turned away although there was enough": (
        lambda b: {"told": dataclasses.replace(b.told, deliveries={**b.told.deliveries, SCARCE: PIECES})},
        "wrong",
        SCARCE,
        "turned away",
    ),
    "a return that is gone": (lambda b: without(b, "returns", of(A)), "lost", of(A), "missing, must be approved"),
    "a return that has not ended": (
        lambda b: changed(b, "returns", of(A), status="IN_TRANSIT", saga="RUNNING"),
        "lost",
        of(A),
        "must be approved",
    ),
    "a return that ended otherwise": (
        lambda b: changed(b, "returns", of(R), status="REFUNDED"),
        "wrong",
        of(R),
        "must be reshipped",
    ),
    "a return for another reason": (
        lambda b: changed(b, "returns", of(N), problem="no_inspection"),
        "wrong",
        of(N),
        "must be no pick-up",
    ),
    "a saga that was not undone": (
        lambda b: changed(b, "returns", of(U), saga="COMPLETED"),
        "wrong",
        of(U),
        "must be cancelled",
    ),
    "a return that nobody asked for": (
        lambda b: {"returns": {**b.returns, "x": b.returns[of(A)]}},
        "wrong",
        "x",
        "return: nothing that was ordered",
    ),
    "a label that is gone": (lambda b: without(b, "labels", f"lbl-return-{A}"), "wrong", of(A), "label: None"),
    "a label that the carrier does not have": (
        lambda b: {"labels": {**b.labels, "x": b.labels[f"lbl-return-{A}"]}},
        "wrong",
        "x",
        "label: nothing that was ordered",
    ),
    "a label whose end is not noted": (
        lambda b: changed(b, "labels", f"lbl-return-{U}", status="created"),
        "wrong",
        of(U),
        "the carrier has",
    ),
    "a case of a return that is gone": (
        lambda b: {"return_cases": {(of(X), "reship_refused")}},
        "wrong",
        of(N),
        "cases: []",
    ),
    "a case of a return too many": (
        lambda b: {"return_cases": {*b.return_cases, (of(A), "late_parcel")}},
        "wrong",
        of(A),
        "cases: ['late_parcel']",
    ),
    "goods that were not booked": (lambda b: moved(b, remove=f"returned {of(A)}"), "lost", of(A), "movements: []"),
    "goods that were booked twice": (
        lambda b: moved(b, add=(Movement("quarantined", of(Q), RULES.article(DAMAGED) or "", PIECES),)),
        "doubled",
        of(Q),
        "movements",
    ),
    "goods booked of a return that was rejected": (
        lambda b: moved(b, add=(Movement("returned", of(R), RULES.article(RESHIPPED) or "", PIECES),)),
        "doubled",
        of(R),
        "must be []",
    ),
    "damaged goods that can be ordered": (
        lambda b: changed(
            b,
            "stock",
            RULES.article(DAMAGED) or "",
            available=b.stock[RULES.article(DAMAGED) or ""].available + PIECES,
            quarantined=0,
        ),
        "wrong",
        RULES.article(DAMAGED) or "",
        "the orders leave",
    ),
    "a reservation of goods that came back": (
        lambda b: {"reservations": {**b.reservations, A: (RULES.article(APPROVED), PIECES, "STOCK_RESERVED")}},
        "wrong",
        A,
        "STOCK_RETURNED",
    ),
    "a saga that failed": (
        lambda b: {"unfinished": {**b.unfinished, (SAGA, of(A)): "failed"}},
        "wrong",
        of(A),
        "failed, which nothing",
    ),
    "a call of a saga that failed": (
        lambda b: {"unfinished": {**b.unfinished, (LABEL, f"a-saga/1.8/{of(R)}/{LABEL}#2"): "failed"}},
        "wrong",
        f"a-saga/1.8/{of(R)}/{LABEL}#2",
        "failed, which nothing",
    ),
    "a refused label that was not refused": (
        lambda b: without(b, "unfinished", (LABEL, f"a-saga/1.8/{of(X)}/{LABEL}#2")),
        "wrong",
        f"{of(X)}/{LABEL}#2",
        "must have failed",
    ),
    "a posting that is gone": (lambda b: {"postings": b.postings[1:]}, "lost", K, "capture posting: missing"),
    "a posting that is there twice": (
        lambda b: {"postings": [*b.postings, b.postings[0]]},
        "doubled",
        K,
        "capture posting: 2 times",
    ),
    "a posting of another amount": (
        lambda b: {"postings": [Posting("capture", K, 1, "EUR"), *b.postings[1:]]},
        "wrong",
        K,
        f"capture posting: 1, not {AMOUNT}",
    ),
    "accounts that do not balance": (lambda b: {"balances": {"EUR": 1}}, "wrong", "EUR", "sum to 1"),
    "a notification that is gone": (
        lambda b: without(b, "notifications", f"payment.captured:{K}"),
        "lost",
        f"payment.captured:{K}",
        "notification: None",
    ),
    "a case that is gone": (lambda b: without(b, "cases", D), "wrong", D, "support case: None"),
    "a case without a failure": (lambda b: {"cases": {**b.cases, K: "x"}}, "wrong", K, "support case: x"),
    "an operation that has not ended": (
        lambda b: {"unfinished": {**b.unfinished, ("orders.mark_paid", "e-1"): "released"}},
        "lost",
        "e-1",
        "the record is released",
    ),
    "an operation that has failed": (
        lambda b: {"unfinished": {**b.unfinished, ("orders.mark_paid", "e-1"): "failed"}},
        "wrong",
        "e-1",
        "orders.mark_paid: failed",
    ),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_the_check_sees(tmp_path: Path, what: str) -> None:
    corrupt, kind, id, said = CORRUPTIONS[what]
    books = agreeing(tmp_path)
    verdict = check(dataclasses.replace(books, **corrupt(books)))
    assert (kind, id) in {(found.kind, found.id) for found in verdict.discrepancies if said in found.what}, verdict


OUTSIDE: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "a charge that is missing": ({"charges": CHARGES[1:]}, "lost", K, "charge: missing"),
    "a second charge": (
        {"charges": (*CHARGES, charged(KEPT, "pi-2"))},
        "doubled",
        K,
        "charge: 2 times",
    ),
    "a charge of another amount": (
        {"charges": (charged(KEPT, amount=AMOUNT + 1), *CHARGES[1:])},
        "wrong",
        K,
        f"the provider holds {AMOUNT + 1} EUR of it, {AMOUNT} are due",
    ),
    "a charge of an order that was declined": (
        {"charges": (*CHARGES, charged(DECLINED))},
        "wrong",
        D,
        f"the provider holds {AMOUNT} EUR of it, 0 are due",
    ),
    "a charge of an order that was not in stock": (
        {"charges": (*CHARGES, charged(SCARCE_LINE))},
        "wrong",
        S,
        "charge: exists",
    ),
    "a charge that nobody ordered": (
        {"charges": (*CHARGES, ("pi-9", 1, "eur", "pm", "k", '{"purchase_id": "x"}', 0.0))},
        "wrong",
        "x",
        "charge: nothing that was ordered",
    ),
    "a cancelled order that is not refunded": (
        {"refunds": REFUNDS[1:]},
        "wrong",
        C,
        f"the provider holds {AMOUNT} EUR of it, 0 are due",
    ),
    "a cancelled order that is refunded twice": (
        {"refunds": (*REFUNDS, given_back("re-2"))},
        "doubled",
        C,
        "refund of the provider: 2 times",
    ),
    "a return that is not refunded": (
        {"refunds": (REFUNDS[0], REFUNDS[2])},
        "wrong",
        A,
        f"the provider holds {AMOUNT} EUR of it, 0 are due",
    ),
    "a rejected return that is refunded": (
        {"refunds": (*REFUNDS, given_back("re-9", R))},
        "lost",
        R,
        f"the provider holds 0 EUR of it, {AMOUNT} are due",
    ),
    "a label that was never made": (
        {"labels": LABELS[1:], "label_ends": LABEL_ENDS[1:]},
        "lost",
        of(A),
        "the carrier has []",
    ),
    "a label that was made twice": ({"labels": (*LABELS, label(A, id="x"))}, "doubled", of(A), "the carrier has"),
    "a label that is not void": ({"label_ends": (*LABEL_ENDS[:3], *LABEL_ENDS[4:])}, "wrong", of(U), "voided"),
    "a label for nothing": (
        {"labels": (*LABELS, ("x", "return-x", "return", "key-x", "{}", 0.0))},
        "wrong",
        "x",
        "label of the carrier: nothing that was ordered",
    ),
    "a second parcel to the buyer": ({"labels": (*LABELS, label(A, "reship"))}, "doubled", of(A), "must have"),
    "a mail to another buyer": (
        {"mails": ((MAILS[0][0], "customer-x@customers.example", *MAILS[0][2:]), *MAILS[1:])},
        "wrong",
        f"payment.captured:{K}",
        "to customer-x@customers.example, not to c",
    ),
    "a mail that is missing": ({"mails": MAILS[1:]}, "lost", f"payment.captured:{K}", "e-mail: missing"),
    "a second mail": (
        {"mails": (*MAILS, ("<other>", *MAILS[0][1:]))},
        "doubled",
        f"payment.captured:{K}",
        "e-mail: 2 times",
    ),
    "a mail about an order that was not paid": (
        {"mails": (*MAILS, ("<other>", "c@customers.example", f"payment.captured {D}", 0.0))},
        "wrong",
        f"payment.captured:{D}",
        "e-mail: exists",
    ),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_the_check_sees_outside(tmp_path: Path, what: str) -> None:
    books, kind, id, said = OUTSIDE[what]
    verdict = check(dataclasses.replace(agreeing(tmp_path / "agreeing"), **outside(tmp_path, **books)))
    assert (kind, id) in {(found.kind, found.id) for found in verdict.discrepancies if said in found.what}, verdict


def test_the_same_mail_again_is_noted_and_no_discrepancy(tmp_path: Path) -> None:
    again = outside(tmp_path, mails=(*MAILS, MAILS[0]))
    verdict = check(dataclasses.replace(agreeing(tmp_path / "agreeing"), **again))
    assert (verdict.repeated, verdict.discrepancies) == (1, [])


def test_lost_pieces_are_counted(tmp_path: Path) -> None:
    books = agreeing(tmp_path)
    available = books.stock[ARTICLE].available
    one_less = dataclasses.replace(books, **changed(books, "stock", ARTICLE, available=available - 1))
    assert check(one_less).stock_lost == 1
