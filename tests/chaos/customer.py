"""A customer of the shop, who gets its webhooks over TLS and a bad connection, and never accepts some of them.

What it does with a delivery depends on the delivery's id, so that it is the same in each attempt.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from standardwebhooks import Webhook, WebhookVerificationError

from tests.support import receiver
from tests.support.receiver import Answer, Request

# One in so many deliveries is never accepted; taken and not answered the first time; put off.
REFUSED, UNANSWERED, PUT_OFF = 9, 5, 6
STRUCK = ("webhooks never accepted", "webhooks taken and not answered", "webhooks put off", "webhooks posted again")


@dataclass(frozen=True, slots=True)
class Posted:
    """One POST: its `webhook-id`, its body, whether it was signed by our secret, and what it was answered with."""

    id: str
    body: str
    is_signed: bool
    status: int | None


class Customer:
    """`posted` is all that came; `struck` counts what it has made difficult. `secret` is set once it is registered."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.secret = ""
        self.posted: list[Posted] = []
        self.struck: Counter[str] = Counter()
        self._times: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._receiver = receiver.start(receiver.certificate(directory))
        self._receiver.answer = self._answer

    @property
    def url(self) -> str:
        return f"{self._receiver.url}/hooks"

    @property
    def ca_file(self) -> Path:
        return self._receiver.ca_file

    def close(self) -> None:
        self._receiver.close()

    def _answer(self, request: Request) -> Answer:
        if request.document["type"] == "webhook.challenge":
            return receiver.accept(request)
        with self._lock:
            self._times[request.id] += 1
            times = self._times[request.id]
            self.struck["webhooks posted again"] += times > 1
            answer = self._decide(request.id, times)
            status = None if answer is None else answer[0]
            self.posted.append(Posted(request.id, request.body, self._is_signed(request), status))
        return answer

    def _decide(self, id: str, times: int) -> Answer:
        number = int.from_bytes(hashlib.sha256(id.encode()).digest()[:4])
        if number % REFUSED == 0:
            self.struck["webhooks never accepted"] += 1
            return 500, {}, b""
        if times == 1 and number % UNANSWERED == 0:
            self.struck["webhooks taken and not answered"] += 1
            return None
        if times == 1 and number % PUT_OFF == 0:
            self.struck["webhooks put off"] += 1
            return 503, {"Retry-After": "1"}, b""
        return 204, {}, b""

    def _is_signed(self, request: Request) -> bool:
        try:
            Webhook(self.secret).verify(request.body, request.headers)
        except WebhookVerificationError:
            return False
        return True
