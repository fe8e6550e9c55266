"""Dividing a consumer's partitions among its processes, where the broker has no groups: by leases in Postgres.

Each process registers as a member; all see the same list, and so compute the same shares. A process gives up what is above its
share, and takes what is free, or whose owner is dead or silent for a lease, up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..attempt.liveness import is_provably_dead
from ..store import streams
from .holdings import At, Holdings


@dataclass(frozen=True, slots=True)
class Shares:
    """What a process gives up now, and what it may try to take, both in order, and the owners that are known to be dead."""

    give_up: Sequence[At]
    take: Sequence[At]
    dead: frozenset[str]


def fair_share(partitions: int, members: Sequence[str], me: str) -> int:
    """How many of the partitions are for this member."""
    each, left_over = divmod(partitions, len(members))
    return each + (members.index(me) < left_over)


def shares(holdings: Holdings, every: Sequence[At]) -> Shares:
    """Look at who is there, and say what to change. Raises SQLAlchemy's errors."""
    runtime, name = holdings.runtime, holdings.stream.name
    settings, me = runtime.settings, runtime.holder
    with runtime.autocommit() as connection:
        members = streams.join(connection, settings.service, name, me, lease=settings.lease)
        owners = {(row.topic, row.partition): row for row in streams.owners(connection, settings.service, name)}
        dead = frozenset(
            each
            for each in {*members, *(row.owner for row in owners.values() if row.owner)}
            if each != me and is_provably_dead(each)
        )
        if gone := [each for each in members if each in dead]:
            streams.leave(connection, settings.service, name, gone)
    share = fair_share(len(every), [each for each in members if each not in dead], me)
    mine = [at for at in every if (held := holdings.get(at)) is not None and not held.is_lost]
    free = [
        at
        for at in every
        if at not in mine
        and ((row := owners.get(at)) is None or row.owner in (None, me) or row.owner in dead or row.is_over)
    ]
    return Shares(mine[share:], free[: max(share - len(mine), 0)], dead)


def leave(holdings: Holdings) -> None:
    """Remove this process from the members. Raises SQLAlchemy's errors."""
    runtime = holdings.runtime
    with runtime.autocommit() as connection:
        streams.leave(connection, runtime.settings.service, holdings.stream.name, [runtime.holder])
