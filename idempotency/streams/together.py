"""Many messages of a partition in one transaction: what they write, their records and the position are committed together.

No claim is committed before. A crash rolls all of it back, so the next owner of the partition begins where the position is,
without waiting for a claim. Only what is plain goes this way: new keys, and bodies that write to their session and return.
Whatever else comes (an error, an effect, a step, a key that something else has) rolls all back, and says which message is to be
handled alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from ..attempt.attempt import Attempt
from ..attempt.exits import exits_are_errors
from ..attempt.policy import Policy
from ..attempt.runtime import Runtime
from ..attempt.sharing import SharingAttempt, run_within
from ..observe import metrics
from ..observe.crash_points import crash_point
from ..store import batches, streams
from ..store.answers import Claimed
from .declaring import Stream
from .handling import Handling
from .partition import Partition
from .preparing import Prepared

# The part of a lease in which bodies that share a transaction are begun; then it is committed.
SHARE_OF_LEASE = 1 / 3


class NotTogether(Exception):
    """A message that cannot stay in the transaction: its place, and whether its body needs one of its own by what it does."""

    def __init__(self, place: int, *, by_nature: bool) -> None:
        super().__init__(place)
        self.place = place
        self.by_nature = by_nature


@dataclass(frozen=True, slots=True)
class Committed:
    """What was committed: how many messages, how many of them were duplicates, and where the position is."""

    many: int
    duplicates: int
    position: int


class UnclaimedAttempt(SharingAttempt):
    """An attempt whose operation has no record before the commit: no lease has to be renewed, and none can be lost."""

    def __init__(self, runtime: Runtime, prepared: Prepared, policy: Policy) -> None:
        delivery = prepared.delivery
        claim = Claimed(delivery.id, 0, "", 1, 1, 0.0, {}, fingerprint=delivery.fingerprint, has_hint=False)
        super().__init__(runtime, claim, delivery, policy)
        runtime.heartbeat.drop(self._holding.claim.token)

    def check_lease(self) -> None:
        """Nothing: the position's owner is asked at the commit."""


def handle_together(
    runtime: Runtime, stream: Stream, policy: Policy, partition: Partition, prepared: Sequence[Prepared]
) -> Committed:
    """Handle these messages, which may share a transaction, or the first of them if they take long.

    Raises `NotTogether` and `PartitionLost`, after which nothing is committed; and SQLAlchemy's errors, after which all may be.
    """
    settings, tenant = runtime.settings, prepared[0].delivery.id.tenant
    until = time.monotonic() + settings.lease * SHARE_OF_LEASE
    # in a transaction of its own: what has read the records keeps partitions from being made and dropped until its end
    with runtime.autocommit(tenant) as connection:
        known = batches.known(connection, [each.delivery for each in prepared], service=settings.service)
    with runtime.transaction(tenant) as connection:
        most = batches.most_together(connection, len(prepared))
        done: dict[str, tuple[Prepared, str]] = {}
        many = 0
        with metrics.phase(stream.task, "body"):
            for place, each in enumerate(prepared):
                key = each.delivery.id.key
                if known.get(key) is False:
                    raise NotTogether(place, by_nature=False)
                if key not in known and key not in done:
                    done[key] = each, _run(runtime, stream, policy, connection, place, each)
                many = place + 1
                if time.monotonic() > until or len(done) == most:
                    break
        crash_point("stream.run")
        with metrics.phase(stream.task, "commit"):
            _record(runtime, policy, connection, done, prepared)
            crash_point("stream.recorded")
            position = prepared[many - 1].message.offset + 1
            streams.advance(connection, partition.held, position, lease=settings.lease, end=partition.end)
        crash_point("stream.advanced")
    crash_point("stream.committed")
    return Committed(many, many - len(done), position)


def _run(
    runtime: Runtime, stream: Stream, policy: Policy, connection: Connection, place: int, prepared: Prepared
) -> str:
    """Run the body of one message; returns its result as text. Raises `NotTogether`."""
    attempt = UnclaimedAttempt(runtime, prepared, policy)

    def body(attempt: Attempt) -> Any:
        with exits_are_errors():
            return stream.handler(Handling(attempt, prepared.message), prepared.event)

    try:
        _, stored = run_within(runtime, connection, attempt, body)
    except (SystemExit, KeyboardInterrupt):  # a signal's: none that the handler has raised comes so far
        raise
    except BaseException as error:
        # also for an error of the connection: with a transaction of its own, each message shows whether it was the cause
        raise NotTogether(place, by_nature=attempt.stopped) from error
    return stored


def _record(
    runtime: Runtime,
    policy: Policy,
    connection: Connection,
    done: dict[str, tuple[Prepared, str]],
    prepared: Sequence[Prepared],
) -> None:
    """Write the records of these operations. Raises `NotTogether` with the first that something else has begun meanwhile."""
    if not done:
        return
    settings = runtime.settings
    recorded = batches.complete_new(
        connection,
        [each.delivery for each, _ in done.values()],
        [stored for _, stored in done.values()],
        service=settings.service,
        holder=runtime.holder,
        retention=policy.retention_completed,
        lease=settings.lease,
    )
    if missing := done.keys() - recorded:
        raise NotTogether(min(prepared.index(done[key][0]) for key in missing), by_nature=False)
