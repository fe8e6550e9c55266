"""How and where a dead message died, as RabbitMQ notes it in the headers.

A message with a `countdown` waits in RabbitMQ in queues of Celery's, and the broker counts the end of each wait as a
death, `expired`. What `x-first-death-*` says of such a message is therefore its delay and not its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ..wire.message import Message


@dataclass(frozen=True, slots=True)
class Death:
    """The last death of a message that was not the end of a delay. Nothing is known of one that has just been refused."""

    reason: str | None = None
    queue: str | None = None
    # where its sender, or the last delay, had published it
    exchange: str | None = None
    routing_key: str | None = None
    time: datetime | None = None


def death_of(headers: Mapping[str, Any]) -> Death:
    """Read the death from a message's headers, which may hold anything."""
    return next(_deaths(headers), Death())


def _deaths(headers: Mapping[str, Any]) -> Iterator[Death]:
    """The deaths of a message but for delays, the last one first, as RabbitMQ lists them."""
    entries = headers.get("x-death")
    for entry in entries if isinstance(entries, list) else ():
        match entry:
            case {"reason": str(reason), "queue": str(queue)} if not Message.was_delayed(queue):
                exchange, keys, time = (entry.get(name) for name in ("exchange", "routing-keys", "time"))
                yield Death(
                    reason,
                    queue,
                    exchange if isinstance(exchange, str) else None,
                    keys[0] if isinstance(keys, list) and keys and isinstance(keys[0], str) else None,
                    time.replace(tzinfo=time.tzinfo or UTC) if isinstance(time, datetime) else None,
                )
