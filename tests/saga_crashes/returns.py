"""Taking an order back: its branches are those of tests/returns, and what the books say of one return when all is over."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sqlalchemy import text

from tests.returns.books import check_return
from tests.returns.test_branches import TAKEN
from tests.saga_crashes.shop import StruckReturns, ends, told_apart

# By names without blanks, for the command line.
BRANCHES = {name.replace(" ", "-"): name for name in TAKEN}

_BOOKS = {
    "return": "SELECT status, problem, is_collected, is_inspected FROM returns WHERE id = :id",
    "cases": "SELECT code FROM return_cases WHERE return_id = :id",
    "labels": "SELECT kind, status FROM labels WHERE return_id = :id",
    "payment": "SELECT status, order_status, amount, refunded FROM payments WHERE order_id = :order",
    "reservation": "SELECT status, quantity FROM reservations WHERE order_id = :order",
    "stock": """SELECT available, reserved, quarantined FROM stock
                WHERE sku = (SELECT sku FROM reservations WHERE order_id = :order)""",
    "movements": "SELECT kind, quantity FROM stock_movements WHERE reference = :id",
    "ledger": "SELECT kind, amount FROM ledger WHERE payment_id = :order",
    "refunds": "SELECT amount, status FROM refunds WHERE payment_id = :order",
    "saga": """SELECT status, current_step FROM idempotency.saga_instances
               WHERE (saga_type, entity_id) = ('returns.process_return', :id)""",
    "steps": """SELECT s.kind, s.name, s.state FROM idempotency.saga_steps s JOIN idempotency.sagas g ON g.id = s.saga_id
                WHERE (g.task, g.entity_id) = ('returns.process_return', :id)""",
    "letters": """SELECT task, reason, status FROM idempotency.dead_letters
                  WHERE key LIKE '%' || :id || '%' OR payload LIKE '%' || :id || '%'""",
}


def run(shop: StruckReturns, branch: str) -> tuple[Any, list[str]]:
    """Carry out a branch. Returns its books, and what its own rules say is wrong."""
    shop.forget()
    name = BRANCHES[branch]
    return_id = TAKEN[name](shop)
    shop.run()
    wrong = []
    try:
        check_return(shop, return_id, name)
    except AssertionError as error:
        wrong.append(f"{error}"[:300])
    return books(shop, return_id), wrong


def books(shop: StruckReturns, return_id: str) -> dict[str, Any]:
    """What is there of a return, in every service, at the provider, the carrier and in the mail."""
    from tasks import notifications

    found: dict[str, Any] = {}
    order = shop.row(return_id).order_id
    with shop.books.connect() as connection:
        refunds = connection.execute(text("SELECT id FROM refunds WHERE payment_id = :id"), {"id": order}).scalars()
        names = (return_id, order, *sorted(refunds), *(label.id for label in shop.labels(return_id)))
        for book, query in _BOOKS.items():
            rows = connection.execute(text(query), {"id": return_id, "order": order})
            found[book] = Counter(told_apart(tuple(row), *names) for row in rows)
    found["carrier"] = Counter((label.kind, label.status) for label in shop.labels(return_id))
    found["charges"] = sorted(amount for id, amount in shop.provider.charges if id == order)
    found["money back"] = sorted(amount for id, amount in shop.provider.refunds if id == order)
    sent = notifications.mailer.sent.values()  # type: ignore[attr-defined]
    about = [mail for mail in sent if return_id in mail[1] + mail[2] or order in mail[2]]
    found["mails"] = Counter(told_apart(mail, *names) for mail in about)
    found["events"] = Counter(shop.told_of(return_id))
    found["ended"] = Counter(ends(shop))
    return found
