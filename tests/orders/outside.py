"""What stands outside in these tests: a payment provider and a mail server, in this process, each with its own book."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from idempotency import DidNotHappen, Happened, StillUnknown, StoredRefusal, Undecided
from tasks.gateway import GatewayError


class Provider:
    """Acts once per key. `declines`, and `silent` after it has acted: payments and refunds by their ids.

    `keeps`: payments of which it refunds nothing. `slow`: what it accepts and decides later, by `decide`.
    """

    def __init__(self) -> None:
        self.declines: set[str] = set()
        self.silent: set[str] = set()
        self.keeps: set[str] = set()
        self.slow: set[str] = set()
        self.accepted: dict[str, dict[str, Any]] = {}
        self.refused: set[str] = set()
        self.charges: list[tuple[str, int]] = []
        self.refunds: list[tuple[str, int]] = []
        self._done: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def capture(self, *, payment_id: str, amount: int, currency: str, idempotency_key: str, **_: Any) -> dict[str, Any]:
        if payment_id in self.declines:
            raise StoredRefusal("the card was declined", "card_declined")
        if payment_id in self.slow and payment_id not in self.refused:
            with self._lock:
                number = len(self.accepted)
                self.accepted.setdefault(
                    idempotency_key, {"id": f"slow_{number}", "amount": amount, "currency": currency, "of": payment_id}
                )
            raise Undecided(3600.0, "processing")
        return self._act(self.charges, payment_id, payment_id, amount, currency, idempotency_key)

    def refund(self, *, refund_id: str, payment_id: str, amount: int, idempotency_key: str, **_: Any) -> dict[str, Any]:
        if payment_id in self.keeps:
            raise StoredRefusal("the charge is disputed", "charge_disputed")
        return self._act(self.refunds, refund_id, payment_id, amount, "EUR", idempotency_key)

    def find_capture(self, *, doubt: Any, **_: Any) -> Any:
        return self._find(doubt)

    find_refund = find_capture

    def decide(self, payment_id: str, *, is_paid: bool = True) -> str:
        """Charge what was accepted, or refuse it. Returns the id of the charge."""
        (key,) = [key for key, charge in self.accepted.items() if charge["of"] == payment_id and key not in self._done]
        charge = self.accepted[key]
        if is_paid:
            self.charges.append((payment_id, charge["amount"]))
            self._done[key] = {name: charge[name] for name in ("id", "amount", "currency")} | {"status": "succeeded"}
        else:
            self.refused.add(payment_id)
        return str(charge["id"])

    def net(self, payment_id: str) -> int:
        """What is left of the charges of a payment."""
        return sum(amount for id, amount in self.charges if id == payment_id) - sum(
            amount for id, amount in self.refunds if id == payment_id
        )

    def count(self, book: list[tuple[str, int]], payment_id: str) -> int:
        return sum(id == payment_id for id, _ in book)

    def _act(
        self, book: list[tuple[str, int]], id: str, payment_id: str, amount: int, currency: str, key: str
    ) -> dict[str, Any]:
        with self._lock:
            if key not in self._done:
                book.append((payment_id, amount))
                number = len(self._done)
                done = {"id": f"id_{number}", "amount": amount, "currency": currency, "status": "succeeded"}
                self._done[key] = done
                if id in self.silent:
                    raise GatewayError("no answer")
            return self._done[key]

    def _find(self, doubt: Any) -> Any:
        """As the gateway: no until the call has ended, because it may be on its way."""
        with self._lock:
            if doubt.idempotency_key in self._done:
                return Happened(self._done[doubt.idempotency_key])
            if (accepted := self.accepted.get(doubt.idempotency_key)) is not None:
                if accepted["of"] in self.refused:
                    return DidNotHappen(StoredRefusal("the bank has refused it", "debit_refused"))
                raise Undecided(3600.0, "processing")
            return StillUnknown() if doubt.ended_for is None else DidNotHappen()


class Mailer:
    """Takes every mail. `sent`: recipient, subject and body by the key that becomes its Message-ID."""

    def __init__(self) -> None:
        self.sent: dict[str, tuple[str, str, str]] = {}

    def send(
        self, recipient: str, subject: str, body: str, html: str | None = None, *, idempotency_key: str
    ) -> Mapping[str, Any]:
        self.sent[idempotency_key] = (recipient, subject, body)
        return {"message_id": f"<{idempotency_key}>"}
