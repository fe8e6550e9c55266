"""The confirms of one channel: which of the messages sent over it the broker has taken, sent back or refused."""

from __future__ import annotations

from typing import Any

from ..wire.headers import OUTBOX_HEADER
from .batch import REFUSAL_LIMIT, Published, Refusal


class Confirms:
    """Those of a channel that lives as long as nothing goes wrong on it. `are_given`: not by a broker like Redis.

    py-amqp does not match confirms to messages: after an error a late one could be mistaken for another message's.
    """

    def __init__(self, channel: Any, *, are_given: bool) -> None:
        self.channel = channel
        self._are_given = are_given
        self._tag = 0
        # of the batch under way, by their tags
        self._sent: dict[int, str] = {}
        self._awaited: dict[int, str] = {}
        self._nacked: set[int] = set()
        # by their ids
        self._returned: dict[str, str] = {}
        if are_given:
            channel.confirm_select()
            channel.events["basic_ack"].add(self._on_ack)
            channel.events["basic_nack"].add(self._on_nack)
            channel.events["basic_return"].add(self._on_return)

    def begin(self) -> None:
        """Forget the last batch."""
        for each in (self._sent, self._awaited, self._nacked, self._returned):
            each.clear()

    def sent(self, id: str) -> None:
        """A message has been sent. Its confirm may come while the next one is."""
        self._tag += 1
        self._sent[self._tag] = id
        if self._are_given:
            self._awaited[self._tag] = id

    @property
    def awaited(self) -> set[str]:
        """The ids of those of which nothing has been heard."""
        return set(self._awaited.values())

    @property
    def are_all_there(self) -> bool:
        """Whether something was sent, and the broker has answered all of it."""
        return bool(self._sent) and not self._awaited

    @property
    def has_nacked(self) -> bool:
        return bool(self._nacked)

    def note(self, result: Published) -> None:
        """Say what became of the messages of the batch under way."""
        for tag, id in self._sent.items():
            if tag in self._awaited or id in result.refused:
                continue
            if id in self._returned:
                result.refuse(id, Refusal(self._returned[id], own=False))
            elif tag in self._nacked:
                result.refuse(id, Refusal("nacked by the broker", own=False))
            else:
                result.confirmed.append(id)

    def _on_ack(self, tag: int, multiple: bool) -> None:
        for each in [each for each in self._awaited if each <= tag] if multiple else [tag]:
            self._awaited.pop(each, None)

    def _on_nack(self, tag: int, multiple: bool) -> None:
        for each in [each for each in self._awaited if each <= tag] if multiple else [tag]:
            if self._awaited.pop(each, None) is not None:
                self._nacked.add(each)

    def _on_return(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        # an unroutable message comes back before its confirm
        id = message.properties["application_headers"][OUTBOX_HEADER]
        self._returned[id] = f"{error}"[:REFUSAL_LIMIT]
