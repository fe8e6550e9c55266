"""What upkeep of partitions leaves alone for a while: one that could not go, and all of them after a lock was not granted in time.

For each database, in the memory of this process: another process makes its own tries, and so does this one after a restart.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine

# Seconds until a partition that could not go is looked at again.
PAUSE = 3600.0
# Seconds until a lock of the whole table is tried for again, behind which all claims have waited; twice as long each time.
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 900.0


@dataclass(slots=True)
class _Left:
    """Of one database: until when, by the monotonic clock."""

    partitions: dict[str, float] = field(default_factory=dict)
    all_until: float = 0.0
    times: int = 0


_left: WeakKeyDictionary[Engine, _Left] = WeakKeyDictionary()


def leave(connection: Connection, partition: str) -> None:
    """Leave this partition alone for `PAUSE` seconds."""
    _of(connection).partitions[partition] = time.monotonic() + PAUSE


def leave_all(connection: Connection) -> None:
    """Leave all partitions alone, for longer each time: a lock was not granted in time."""
    left = _of(connection)
    left.all_until = time.monotonic() + min(FIRST_PAUSE * 2**left.times, LONGEST_PAUSE)
    left.times = min(left.times + 1, 10)


def note_lock(connection: Connection) -> None:
    """A lock of the whole table was granted in time: the next pause is a short one again."""
    _of(connection).times = 0


def is_left(connection: Connection, partition: str | None = None) -> bool:
    """Whether to leave this partition alone now; None: all of them."""
    left = _of(connection)
    until = left.all_until if partition is None else left.partitions.get(partition, 0.0)
    return until > time.monotonic()


def forget() -> None:
    """Forget all pauses, of all databases."""
    _left.clear()


def _of(connection: Connection) -> _Left:
    return _left.setdefault(connection.engine, _Left())
