"""One message in a transaction of its own, claimed before as any operation: for effects, steps, errors and retries.

The position moves in the commit that completes it. If that finds another owner, the attempt is given back and not counted.
"""

from __future__ import annotations

from typing import Any

from ..attempt.attempt import Attempt
from ..attempt.endings import Waiting
from ..attempt.exits import exits_are_errors
from ..attempt.policy import Policy
from ..attempt.run import Outcome, run
from ..attempt.runtime import Runtime
from ..observe.crash_points import crash_point
from ..store import streams
from ..store.streams import PartitionLost
from .declaring import Stream
from .handling import Handling
from .partition import Partition
from .preparing import Prepared


class _NotOwner(Waiting):
    """The attempt has been given back: its position is another's. Past the body's own `except Exception`."""


def handle_alone(
    runtime: Runtime, stream: Stream, policy: Policy, prepared: Prepared, partition: Partition | None
) -> Outcome:
    """Claim, run and commit one message, with the position of its partition; without a partition, of one that a person replays.

    Raises `PartitionLost`, SQLAlchemy's errors, and what `run` raises.
    """
    is_lost = False

    def body(attempt: Attempt) -> Any:
        nonlocal is_lost
        with exits_are_errors():
            # decoded for each run: a body may change its event, `on_failed` is given it as it came, and not everything can be
            # copied
            event = stream.event(prepared.message)
            result = stream.handler(Handling(attempt, prepared.message), event)
        crash_point("stream.run")
        if partition is not None and not _advanced(attempt, partition, prepared.message.offset + 1):
            is_lost = True
            attempt.release(delay=0.0, error=None, give_back=True)
            raise _NotOwner
        return result

    outcome = run(runtime, prepared.delivery, policy, body)
    if is_lost:
        raise PartitionLost(f"{prepared.message.topic}/{prepared.message.partition}")
    crash_point("stream.committed")
    return outcome


def _advanced(attempt: Attempt, partition: Partition, to: int) -> bool:
    """Move the position on in the attempt's transaction; False: it is another's, and the transaction can only be rolled back."""
    attempt.session.flush()
    lease = attempt.runtime.settings.lease
    try:
        attempt.writes.as_our_own(lambda c: streams.advance(c, partition.held, to, lease=lease, end=partition.end))
    except PartitionLost:
        return False
    crash_point("stream.advanced")
    return True
