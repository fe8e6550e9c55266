"""Orders and returns that ended in every way, and books that agree about them: what the check of the demo finds nothing in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo.checking import CAPTURE, Payment, Posting, Refund
from demo.input import Line
from demo.order_books import (
    LABEL,
    SAGA,
    Checkout,
    Label,
    Movement,
    Order,
    OrderBooks,
    Return,
    Stock,
    Told,
)
from demo.order_rules import SCARCE, Rules, return_of
from sandbox import ledger
from tests.support.ledgers import Rows, write_ledgers

RULES = Rules(3)
AMOUNT, PIECES = 500, 2


def a_line(wanted: Callable[[Line, str], bool]) -> Line:
    """The first purchase that the rules make what is wanted."""
    lines = (Line(n, "purchase", n, f"p-{n}", f"p-{n}", "c", AMOUNT, "EUR", "", str(PIECES)) for n in range(10_000))
    return next(line for line in lines if wanted(line, order_id(line)))


def order_id(line: Line) -> str:
    return f"order-{line.id}"


def is_certain(line: Line, id: str) -> bool:
    """Only one end is possible."""
    article = RULES.article(line)
    return article not in (None, SCARCE) and RULES.hesitation(line) is None and not RULES.is_declined(line, id)


def returned(branch: str) -> Line:
    return a_line(lambda line, id: is_certain(line, id) and RULES.branch(line, id) == branch)


KEPT = a_line(lambda line, id: is_certain(line, id) and RULES.branch(line, id) is None)
SCARCE_LINE = a_line(
    lambda line, id: (
        RULES.article(line) == SCARCE and RULES.hesitation(line) is None and not RULES.is_declined(line, id)
    )
)
CANCELLED = a_line(
    lambda line, id: (
        RULES.article(line) not in (None, SCARCE)
        and RULES.hesitation(line) is not None
        and not RULES.is_declined(line, id)
    )
)
DECLINED = a_line(
    lambda line, id: (
        RULES.article(line) not in (None, SCARCE) and RULES.hesitation(line) is None and RULES.is_declined(line, id)
    )
)
APPROVED, DAMAGED, RESHIPPED = map(returned, ("approved", "damaged", "reshipped"))
UNDONE, NOT_COLLECTED, NO_RESHIPMENT = map(returned, ("cancelled", "no pick-up", "reship refused"))
LINES = (KEPT, SCARCE_LINE, CANCELLED, DECLINED)
RETURNED = (APPROVED, DAMAGED, RESHIPPED, UNDONE, NOT_COLLECTED, NO_RESHIPMENT)
K, S, C, D = map(order_id, LINES)
A, Q, R, U, N, X = map(order_id, RETURNED)
PROCESSED = (KEPT, *RETURNED)
REFUND_OF_RETURN = {A: "r-a", Q: "r-q"}
INSPECTED = ("c", True, True)
NOTHING_HEARD = ("c", False, False, None, None)


def of(order: str) -> str:
    return return_of(order)


def charged(line: Line, id: str = "", amount: int = AMOUNT) -> tuple[object, ...]:
    about = order_id(line)
    return (
        id or f"pi-{about}",
        amount,
        "eur",
        "pm",
        f"key-{id}{about}",
        f'{{"purchase_id": "{about}", "customer_id": "c"}}',
        0.0,
    )


def given_back(id: str = "re-1", order: str = "") -> tuple[object, ...]:
    refund = id.replace("re-", "", 1) if order else "r-1"
    return (id, f"pi-{order or C}", AMOUNT, "eur", f"key-{id}", f'{{"refund_id": "{refund}"}}', 0.0)


def label(order: str, kind: str = "return", id: str = "") -> tuple[object, ...]:
    return (id or f"lbl-{kind}-{order}", of(order), kind, f"key-{id}{kind}{order}", "{}", 0.0)


CHARGES = tuple(charged(line) for line in (*PROCESSED, CANCELLED))
REFUNDS = (given_back(), *(given_back(f"re-{id}", order) for order, id in REFUND_OF_RETURN.items()))
LABELS = (*(label(order_id(line)) for line in RETURNED), label(R, "reship"))
LABEL_ENDS = tuple(
    (f"lbl-return-{order_id(line)}", "voided" if line in (UNDONE, NOT_COLLECTED) else "collected", 0.0)
    for line in RETURNED
)
TOLD = (
    *(f"payment.captured {order_id(line)}" for line in (*PROCESSED, CANCELLED)),
    *(f"payment.refunded {id}" for id in ("r-1", *REFUND_OF_RETURN.values())),
    *(f"return.labelled {of(order_id(line))}" for line in RETURNED),
    f"return.refunded {of(A)}",
    f"return.refunded {of(Q)}",
    f"return.rejected {of(R)}",
    f"return.cancelled {of(U)}",
    f"return.escalated {of(N)}",
    f"return.escalated {of(X)}",
)
MAILS = tuple((f"<{about}>", "customer-c@customers.example", about, 0.0) for about in TOLD)


def outside(
    directory: Path,
    charges: Rows = CHARGES,
    refunds: Rows = REFUNDS,
    mails: Rows = MAILS,
    labels: Rows = LABELS,
    label_ends: Rows = LABEL_ENDS,
) -> dict[str, Any]:
    """The stand-ins' own books, as they are on disk."""
    write_ledgers(directory, charges, refunds, mails, labels, label_ends)
    return {
        "provider": ledger.read(directory),
        "mails": ledger.read_mail(directory),
        "carrier": ledger.read_labels(directory),
    }


SEEN = {"PROCESSING": ("placed", "COMPLETED"), "CANCELLED": ("cancelled", "FAILED")}


def an_order(line: Line, status: str, reason: str | None) -> Order:
    return Order(line.id, "c", AMOUNT, "EUR", RULES.article(line), PIECES, status, reason, *SEEN[status])


def agreeing(directory: Path) -> OrderBooks:
    """One order for each way to end."""
    articles = {order_id(line): RULES.article(line) or "" for line in (*LINES, *RETURNED)}
    deliveries = Counter({articles[S]: PIECES - 1})
    for id in articles:
        deliveries[articles[id]] += PIECES if id != S else 0
    held: Counter[str] = Counter()
    for id in (K, R, U, N, X):
        held[articles[id]] += PIECES
    moved = [Movement("received", f"{article}-0", article, number) for article, number in deliveries.items()]
    moved += [Movement("reserved", id, articles[id], PIECES) for id in articles if id != S]
    moved += [Movement("released", id, articles[id], PIECES) for id in (C, D)]
    moved += [Movement("returned", of(A), articles[A], PIECES), Movement("quarantined", of(Q), articles[Q], PIECES)]
    damaged = {articles[Q]: PIECES}
    processed = [order_id(line) for line in PROCESSED]
    back = dict.fromkeys(REFUND_OF_RETURN, AMOUNT)
    return OrderBooks(
        told=Told((*LINES, *RETURNED), {line.id: {order_id(line)} for line in (*LINES, *RETURNED)}, deliveries),
        checkouts={
            line.id: Checkout(order_id(line), "c", AMOUNT, "EUR", RULES.article(line), PIECES)
            for line in (*LINES, *RETURNED)
        },
        orders={
            **{order_id(line): an_order(line, "PROCESSING", None) for line in PROCESSED},
            S: an_order(SCARCE_LINE, "CANCELLED", "out_of_stock"),
            C: an_order(CANCELLED, "CANCELLED", "on_request"),
            D: an_order(DECLINED, "CANCELLED", "card_declined"),
        },
        payments={
            **{id: Payment("c", AMOUNT, "EUR", "captured", f"pi-{id}", back.get(id, 0), None) for id in processed},
            S: Payment("c", AMOUNT, "EUR", "cancelled", None, 0, None),
            C: Payment("c", AMOUNT, "EUR", "captured", f"pi-{C}", AMOUNT, None),
            D: Payment("c", AMOUNT, "EUR", "failed", None, 0, "card_declined"),
        },
        refunds={
            "r-1": Refund(C, AMOUNT, "refunded", "re-1", None),
            **{id: Refund(order, AMOUNT, "refunded", f"re-{id}", None) for order, id in REFUND_OF_RETURN.items()},
        },
        reservations={
            **{id: (articles[id], PIECES, "STOCK_RETURNED" if id in back else "STOCK_RESERVED") for id in processed},
            S: (articles[S], 0, "STOCK_RELEASED"),
            C: (articles[C], PIECES, "STOCK_RELEASED"),
            D: (articles[D], PIECES, "STOCK_RELEASED"),
        },
        movements=moved,
        stock={
            article: Stock(number - held[article] - damaged.get(article, 0), held[article], damaged.get(article, 0))
            for article, number in deliveries.items()
        },
        returns={
            of(A): Return(A, *INSPECTED, "APPROVED", "APPROVED", "REFUNDED", "r-a", None, "COMPLETED"),
            of(Q): Return(Q, *INSPECTED, "DAMAGED", "DAMAGED", "REFUNDED", "r-q", None, "COMPLETED"),
            of(R): Return(R, *INSPECTED, "REJECTED", "REJECTED", "REJECTED", None, None, "COMPLETED"),
            of(U): Return(U, *NOTHING_HEARD, "CANCELLED", None, "cancelled", "FAILED"),
            of(N): Return(N, *NOTHING_HEARD, "ESCALATED", None, "no_pickup", "COMPLETED"),
            of(X): Return(X, *INSPECTED, "REJECTED", "REJECTED", "ESCALATED", None, "reship_refused", "COMPLETED"),
        },
        labels={
            **{id: Label(of(id.removeprefix("lbl-return-")), "return", end) for id, end, _ in LABEL_ENDS},
            f"lbl-reship-{R}": Label(of(R), "reship", "created"),
        },
        return_cases={(of(N), "no_pickup"), (of(X), "reship_refused")},
        postings=[
            *(Posting("capture", id, AMOUNT, "EUR") for id in (*processed, C)),
            *(Posting("refund", id, AMOUNT, "EUR") for id in ("r-1", "r-a", "r-q")),
        ],
        balances={"EUR": 0},
        notifications={subject.replace(" ", ":"): "sent" for subject in TOLD},
        cases={D: "card_declined"},
        unfinished={
            (CAPTURE, D): "failed",
            (SAGA, of(U)): "failed",
            (LABEL, f"a-saga/1.8/{of(X)}/{LABEL}#2"): "failed",
        },
        **outside(directory),
    )
