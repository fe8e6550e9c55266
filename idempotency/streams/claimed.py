"""A message that a claim of another process holds up: freed at once if that process is provably dead, as a relay would."""

from __future__ import annotations

from ..attempt.liveness import is_provably_dead
from ..attempt.policy import Policy
from ..attempt.runtime import Runtime
from ..observe import metrics
from ..observe.logs import log
from ..store import recover
from ..store.recover import Bounds
from ..wire.keys import OperationId
from .partition import Partition


def waits_for(runtime: Runtime, policy: Policy, partition: Partition, id: OperationId) -> bool:
    """Whether the message has to wait for the holder of its operation. False: it is free, or was freed of one that is dead.

    The attempt stays used up. An operation that also kills those that would end it stays for the relay, which ends it. Says
    once in the log whom a partition waits for. Raises SQLAlchemy's errors.
    """
    with runtime.autocommit(id.tenant) as connection:
        holder = recover.holder(connection, id)
        if holder is None:
            return False
        if is_provably_dead(holder) and recover.release_one(connection, _of_one(runtime, policy, id, holder), id):
            metrics.recovered.labels("dead_holder").inc()
            log.info("stream_claim_freed", place=partition.place, offset=partition.position, holder=said(holder))
            return False
    if partition.waits_for != holder:
        partition.waits_for = holder
        log.warning("stream_waits_for_claim", place=partition.place, offset=partition.position, holder=said(holder))
    return True


def said(holder: str) -> str:
    """Host and process of a holder or an owner, for people."""
    host, _, _, pid, _ = (holder.split("|") + [""] * 5)[:5]
    return f"{host} {pid}"


def _of_one(runtime: Runtime, policy: Policy, id: OperationId, holder: str) -> Bounds:
    most, task = policy.max_attempts, [id.task]
    return Bounds(runtime.settings.service, [holder], task, task, [most], [], most)
