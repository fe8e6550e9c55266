"""The business tasks: each test passes while the bug is there."""

from __future__ import annotations

from idempotency import Happened
from tests.pipeline.test_books import Shop, mail, provider, shop  # noqa: F401


def test_a_refund_of_a_payment_in_doubt_is_refused_for_good(shop: Shop) -> None:  # noqa: F811
    """The payment is charged, its reply is lost, it ends as effect_unknown: status `unknown`. A refund that arrives now is
    refused with code payment_unknown, the same code as for a payment that does not exist. Then a person finds the charge
    and the payment is captured: the refund stays `refused`, and the customer's money with us. Breaks: what depends on an
    open doubt waits for it (as for `pending`); a final refusal needs a fact.
    """
    payment = shop.buy("p-doubt")
    shop.faults("p-doubt", "timeout_after")
    shop.deliver(payment)
    shop.cancel(payment)
    assert shop.row("payments", "p-doubt").status == "unknown"

    refund = shop.give_back("r-doubt", "p-doubt", 400)
    assert shop.deliver(refund).state == "FAILURE"

    (charge,) = shop.charges("p-doubt")
    found = {"id": charge.id, "amount": charge.amount, "currency": charge.currency, "status": "succeeded"}
    shop.resolve(payment, "capture", Happened(found))
    assert shop.replay(payment).state == "SUCCESS"
    assert shop.row("payments", "p-doubt").status == "captured"
    row = shop.row("refunds", "r-doubt")
    assert (row.status, row.failure, shop.record(refund).status) == ("refused", "payment_unknown", "failed")
    assert shop.refunds_of("p-doubt") == []
