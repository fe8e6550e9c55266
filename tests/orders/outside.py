"""What stands outside in these tests: a payment provider and a mail server, in this process, each with its own book."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from idempotency import DidNotHappen, Happened, StillUnknown, StoredRefusal
from tasks.gateway import GatewayError


class Provider:
    """Acts once per key. `declines`, and `silent` after it has acted: payments and refunds by their ids.

    `keeps`: payments of which it refunds nothing.
    """

    def __init__(self) -> None:
        self.declines: set[str] = set()
        self.silent: set[str] = set()
        self.keeps: set[str] = set()
        self.charges: list[tuple[str, int]] = []
        self.refunds: list[tuple[str, int]] = []
        self._done: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def capture(self, *, payment_id: str, amount: int, currency: str, idempotency_key: str, **_: Any) -> dict[str, Any]:
        if payment_id in self.declines:
            raise StoredRefusal("the card was declined", "card_declined")
        return self._act(self.charges, payment_id, payment_id, amount, currency, idempotency_key)

    def refund(self, *, refund_id: str, payment_id: str, amount: int, idempotency_key: str, **_: Any) -> dict[str, Any]:
        if payment_id in self.keeps:
            raise StoredRefusal("the charge is disputed", "charge_disputed")
        return self._act(self.refunds, refund_id, payment_id, amount, "EUR", idempotency_key)

    def find_capture(self, *, doubt: Any, **_: Any) -> Any:
        return self._find(doubt)

    find_refund = find_capture

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
            return StillUnknown() if doubt.ended_for is None else DidNotHappen()


class Mailer:
    """Takes every mail. `sent`: recipient, subject and body by the key that becomes its Message-ID."""

    def __init__(self) -> None:
        self.sent: dict[str, tuple[str, str, str]] = {}

    def send(self, recipient: str, subject: str, body: str, *, idempotency_key: str) -> Mapping[str, Any]:
        self.sent[idempotency_key] = (recipient, subject, body)
        return {"message_id": f"<{idempotency_key}>"}
