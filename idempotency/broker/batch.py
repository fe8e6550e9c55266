"""What became of the messages of a batch: confirmed, refused, or open. No input or output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..store.outbox import Lane
from ..wire.message import Message

# Characters of an error that an outbox row keeps.
REFUSAL_LIMIT = 300


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one message was not accepted. `own`: it never can be, and neither its queue nor the broker is to blame."""

    error: str
    own: bool
    is_missing_exchange: bool = False

    @classmethod
    def by(cls, error: Exception, *, own: bool, is_missing_exchange: bool = False) -> Refusal:
        return cls(f"{type(error).__name__}: {error}"[:REFUSAL_LIMIT], own, is_missing_exchange)


@dataclass(slots=True)
class Published:
    """What became of a batch so far; a message that is neither confirmed nor refused is open."""

    confirmed: list[str] = field(default_factory=list)
    refused: dict[str, Refusal] = field(default_factory=dict)
    # of those that their queue did not confirm, or that were not sent because it is left alone: its name
    held: dict[str, str] = field(default_factory=dict)
    # of messages that have an order; nothing is sent behind the first in a lane that is refused or held back
    lanes: dict[str, Lane] = field(default_factory=dict)
    stopped: set[Lane] = field(default_factory=set)

    def refuse(self, id: str, refusal: Refusal) -> None:
        self.refused[id] = refusal
        self.stop_behind(id)

    def hold(self, id: str, queue: str) -> None:
        """It stays open, because its queue is silent."""
        self.held[id] = queue
        self.stop_behind(id)

    def stop_behind(self, id: str) -> None:
        """Send nothing more of its lane."""
        if (lane := self.lanes.get(id)) is not None:
            self.stopped.add(lane)

    def waits(self, id: str) -> bool:
        """Whether an earlier message of its lane was refused or held back."""
        return self.lanes.get(id) in self.stopped

    def open(self, batch: Iterable[tuple[str, Message]]) -> list[tuple[str, Message]]:
        answered = {*self.confirmed, *self.refused}
        return [(id, message) for id, message in batch if id not in answered]

    def keep_order(self) -> None:
        """Forget what became of messages behind the first of their lane that was not confirmed: they are sent again."""
        confirmed, behind = set(self.confirmed), set()
        broken: set[Lane] = set()
        for id, lane in self.lanes.items():
            if lane in broken:
                behind.add(id)
            elif id not in confirmed:
                broken.add(lane)
        self.confirmed = [id for id in self.confirmed if id not in behind]
        self.refused = {id: refusal for id, refusal in self.refused.items() if id not in behind}
