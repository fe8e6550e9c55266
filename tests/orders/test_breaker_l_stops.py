"""Proofs of a reader: each passes while the defect exists."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import Defer
from idempotency.store.rights import RELAY
from tests.orders.shop import Shop
from tests.orders.test_reconciliation import paid


@pytest.mark.parametrize("answers", [True, False])
def test_one_question_without_an_answer_stops_the_comparison_of_all_later_days(
    shop: Shop, gateway: Any, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """One time-out (429, 503) among the questions about single objects: of a payment of two days ago. A real difference of
    today is not told, and the next run begins with the oldest day again."""
    from tasks import maintenance, reconciliation

    old, old_charge = paid(shop)
    order, charge = paid(shop)
    with shop.books.begin() as connection:
        connection.execute(
            text("UPDATE payments SET created_at = created_at - interval '2 days' WHERE id = :id"), {"id": old}
        )
        connection.execute(text("UPDATE ledger SET amount = 999 WHERE payment_id = :id"), {"id": order})
    monkeypatch.setattr(reconciliation, "SETTLED_AFTER", timedelta(seconds=-5))
    real = gateway.charge

    def charge_of(id: str) -> Any:
        if id == old_charge and not answers:
            raise Defer(5.0, "the payment provider is unreachable or did not answer in time")
        return real(id)

    monkeypatch.setattr(gateway, "charge", charge_of)
    with shop.operating(RELAY):
        if answers:
            assert maintenance.reconcile_provider() == 1
        else:
            with pytest.raises(Defer):
                maintenance.reconcile_provider()
    told = "SELECT count(*) FROM idempotency.outbox WHERE task = 'payments.check_difference' AND key LIKE :key"
    assert shop.one(told, key=f"charge:{charge}:%")[0] == (1 if answers else 0)
