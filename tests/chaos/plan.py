"""What goes wrong and when: a pure function of the seed and the length of the run.

The same seed replays the same plan. What the plan meets is another matter: the processes, the kernel and the servers
keep no seed, so two runs of one plan are two different histories.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

# How often each kind is drawn, relative to the others. Every kind is in every plan, whatever its weight.
WEIGHTS = {
    # processes
    "kill_child": 3,
    "kill_worker": 2,
    "stop_worker": 2,
    "terminate_worker": 2,
    "kill_relay": 2,
    "kill_beat": 1,
    "kill_caller": 2,
    "deploy_worker": 2,
    "deploy_relay": 1,
    # processes, at a crash point
    "kill_child_at_point": 4,
    "kill_worker_at_point": 2,
    "kill_relay_at_point": 2,
    "stop_child_at_point": 3,
    "stop_child_before_finish": 3,
    "stop_child_before_step": 3,
    # web servers
    "kill_edge": 2,
    "stop_edge": 2,
    "terminate_edge": 1,
    "kill_edge_at_point": 3,
    "stop_edge_before_finish": 2,
    # the shop
    "kill_shop_worker": 2,
    "kill_shop_relay": 1,
    "kill_shop_edge": 1,
    "kill_shop_at_point": 3,
    # broker
    "reset_broker": 2,
    "freeze_broker": 1,
    "wipe_broker": 2,
    # Redis
    "flush_redis": 3,
    "black_hole_redis": 1,
    # Postgres
    "kill_postgres": 1,
    "reset_postgres": 2,
    "cut_commit": 4,
    "slow_postgres": 1,
    # somebody who may publish
    "forge_message": 1,
    "squat_keys": 1,
    "alter_message": 1,
    "rekey_message": 1,
    "retenant_message": 1,
    "copy_message": 1,
    "forge_revoke": 1,
    "forge_headers": 1,
    "forge_letter": 1,
    "forge_charge": 1,
    "forge_webhook": 1,
}
# A former holder that goes on and finds the fence moved is what the fence is for: one try may be overtaken by another
# fault, so there are more.
AT_LEAST = {
    "stop_child_before_finish": 4,
    "stop_child_before_step": 3,
    "kill_edge_at_point": 3,
    "stop_edge_before_finish": 2,
    "kill_shop_at_point": 3,
}
# Faults per second. More of them, and nothing would run between two.
RATE = 0.7
# The first fault finds work under way, and the last one still has the run around it.
LEAD_IN, LEAD_OUT = 2.0, 1.0
# Faults that take the same servers come one after the other, one in so many seconds on average, unless that leaves a kind out,
# and none at the end: a busy machine needs half of it to start a node again, and work has to go on in between.
LANE_SECONDS = 40.0
# What a target may be; the fault takes it modulo what there is.
TARGETS = 1 << 16


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """Seconds after the beginning, what happens, and to which of its kind."""

    second: float
    kind: str
    target: int


def plan(
    seed: int,
    seconds: float,
    only: Sequence[str] = (),
    weights: Mapping[str, int] = WEIGHTS,
    lanes: Sequence[Collection[str]] = (),
) -> list[Fault]:
    """All faults of a run in their order; the same for the same seed and length.

    `only` leaves some kinds, to look into what they do; such a run proves nothing. `weights`: of another place than three
    servers. `lanes`: the kinds that take the same servers, of which no more are drawn than there is time for.
    """
    chance = random.Random(f"plan {seed} {seconds:g}")
    weights = {kind: weight for kind, weight in weights.items() if not only or kind in only}
    kinds = [kind for kind in weights for _ in range(AT_LEAST.get(kind, 1))]
    more = max(round(seconds * RATE) - len(kinds), 0)
    kinds += chance.choices(list(weights), weights=list(weights.values()), k=more)
    chance.shuffle(kinds)
    faults: list[Fault] = []
    for lane in lanes:
        own = [kind for kind in kinds if kind in lane]
        kinds = [kind for kind in kinds if kind not in lane]
        # each kind once, and then what there is time for
        first = list(dict.fromkeys(own))
        own = first + _without(own, first)[: max(int(seconds / LANE_SECONDS) - len(first), 0)]
        chance.shuffle(own)
        faults += _spread(own, chance, seconds - min(LANE_SECONDS / 2, seconds / 4), jitter=0.5)
    return sorted(faults + _spread(kinds, chance, seconds, jitter=1.0))


def _without(kinds: Sequence[str], taken: Sequence[str]) -> list[str]:
    """What is left when each of `taken` is taken out once."""
    left = Counter(kinds) - Counter(taken)
    return [kind for kind, number in left.items() for _ in range(number)]


def _spread(kinds: Sequence[str], chance: random.Random, seconds: float, *, jitter: float) -> list[Fault]:
    """One in each slot of the time, somewhere in its first part: spread, and never in step with anything that is periodic."""
    slot = max(seconds - LEAD_IN - LEAD_OUT, 0.0) / max(len(kinds), 1)
    return [
        Fault(round(LEAD_IN + (number + jitter * chance.random()) * slot, 3), kind, chance.randrange(TARGETS))
        for number, kind in enumerate(kinds)
    ]
