"""The broker of a schedule: a queue in memory that delivers at least once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from idempotency.broker.batch import Published, Refusal
from idempotency.broker.silence import SilentQueues
from idempotency.wire.headers import ORIGIN_HEADER, OUTBOX_HEADER
from idempotency.wire.message import Message
from tests.search import application
from tests.search.scheduler import note, stop_before, touched
from tests.support.deliveries import Outcome


@dataclass(frozen=True)
class Envelope:
    """A message in the broker."""

    message: Message
    number: int

    @property
    def outbox_id(self) -> str | None:
        return self.message.headers.get(OUTBOX_HEADER)

    def __str__(self) -> str:
        return f"message {self.number} ({self.message.headers.get(ORIGIN_HEADER, 'first')})"


class Broker:
    """First in, first out; what was taken and not answered comes back to the front."""

    def __init__(self) -> None:
        self.ready: deque[Envelope] = deque()
        self.dead: deque[tuple[Envelope, str]] = deque()  # and why it died
        self._numbers = count(1)
        self.unconfirming = SilentQueues()

    def put(self, message: Message) -> Envelope:
        touched("w:queues")
        envelope = Envelope(message, next(self._numbers))
        self.ready.append(envelope)
        return envelope

    def answer(self, envelope: Envelope, outcome: Outcome) -> None:
        touched("w:queues")
        if outcome.state == "REJECTED":
            self.dead.append((envelope, "rejected"))

    # ------------------------------------------------------------ as the relay's publisher

    def publish(self, batch: Sequence[tuple[str, Message]], result: Published) -> None:
        for id, message in batch:
            stop_before("publish")
            try:
                destination = message.destination(application.app)
            except KeyError:
                destination = ("", "")
            if destination not in ((application.QUEUE, application.QUEUE), ("", application.QUEUE)):
                note("unroutable")
                result.refused[id] = Refusal("NO_ROUTE", own=False)
                continue
            note(str(self.put(message)))
            result.confirmed.append(id)

    def close(self) -> None:
        pass
