"""Faults of a cluster: nodes die, are promoted, cut off and replaced. Each heals what it has done before it returns."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from redis import Redis
from redis.exceptions import RedisError

from services import ServiceError
from services.cluster import Cluster
from services.cluster_rabbitmq import NET_TICK
from tests.chaos import faults
from tests.chaos.place import ZONES, Clustered, Proxies
from tests.chaos.scene import Missed, Scene

# How often each kind is drawn, as in `plan.WEIGHTS`. Those of RabbitMQ take longest: a node has to start again.
WEIGHTS = {
    "kill_leader": 1,
    "kill_majority": 1,
    "pause_node": 1,
    "cut_node": 1,
    "resize_queue": 1,
    "promote_standby": 2,
    "promote_over_paused": 1,
    "return_former": 1,
    "cut_replication": 1,
    "replace_redis": 1,
    "cut_zone_from_postgres": 1,
    "cut_zone_from_broker": 1,
    "cut_zone_from_redis": 1,
    "isolate_zone": 1,
}
# Faults of the same servers, which must not overlap; the plan leaves time between them.
LANES = (
    ("kill_leader", "kill_majority", "pause_node", "cut_node", "resize_queue", "wipe_broker"),
    ("promote_standby", "promote_over_paused", "return_former", "cut_replication", "kill_postgres"),
)
# What needs a single server, or a proxy before Redis.
WITHOUT = ("freeze_broker", "black_hole_redis")
# Seconds without the servers that a fault takes: longer than a lease.
AWAY = 4.0
# Longer than RabbitMQ's own patience with a node, and than every time-out of a client.
PAUSED = NET_TICK * 1.5
# Of what an asynchronous standby has not got when it is promoted.
LAG = 2.0
READY_WITHIN = 240.0
# How long a fault waits for another one of the same servers, of which a busy machine may need two minutes.
OTHERS_WITHIN = 150.0
# How long a former primary runs beside the new one.
BESIDE = 2.0
# One fault of RabbitMQ's nodes at a time: two at once could take all three.
_nodes = threading.Lock()


@contextmanager
def _alone(lock: threading.Lock) -> Iterator[None]:
    if not lock.acquire(timeout=OTHERS_WITHIN):
        raise Missed("others have these servers")
    try:
        yield
    finally:
        lock.release()


def _place(scene: Scene) -> Clustered:
    assert isinstance(scene.servers, Clustered)
    return scene.servers


def _cluster(scene: Scene) -> Cluster:
    return _place(scene).servers


def kill_leader(scene: Scene, target: int) -> str:
    """The node that leads the queue of the work dies, and comes back."""
    with _alone(_nodes):
        trio = _cluster(scene).rabbitmq
        if (leader := trio.members(scene.queue).leader) is None:
            raise Missed("the queue has no leader")
        trio.node(leader).kill()
        time.sleep(AWAY)
        trio.mend(READY_WITHIN)
    return leader


def kill_majority(scene: Scene, target: int) -> str:
    """Two of three nodes die: nothing is published or taken until they are back."""
    with _alone(_nodes):
        trio = _cluster(scene).rabbitmq
        first = target % len(trio.nodes)
        killed = [trio.nodes[first], trio.nodes[(first + 1) % len(trio.nodes)]]
        for node in killed:
            node.kill()
        time.sleep(AWAY)
        trio.mend(READY_WITHIN)
    return ", ".join(node.directory.name for node in killed)


def pause_node(scene: Scene, target: int) -> str:
    """One node stands still for longer than the others wait for it, and goes on."""
    with _alone(_nodes):
        trio = _cluster(scene).rabbitmq
        node = trio.nodes[target % len(trio.nodes)]
        node.pause()
        try:
            time.sleep(PAUSED)
        finally:
            node.resume()
        trio.mend(READY_WITHIN)
    return f"{node.directory.name} for {PAUSED:g} s"


def cut_node(scene: Scene, target: int) -> str:
    """The network between one node and the two others is cut: it has no majority and serves nobody, the others go on."""
    with _alone(_nodes):
        trio = _cluster(scene).rabbitmq
        node = trio.nodes[target % len(trio.nodes)]
        trio.cut_off(node)
        try:
            time.sleep(AWAY)
            left = trio.seen_by_others(node)
        finally:
            trio.join_again(node)
        trio.mend(READY_WITHIN)
    if left >= len(trio.nodes):
        raise Missed("the others saw it all the time")
    return f"{node.directory.name} for {AWAY:g} s, the others saw {left}"


def resize_queue(scene: Scene, target: int) -> str:
    """The queue of the work loses a member, and gets it back."""
    with _alone(_nodes):
        trio = _cluster(scene).rabbitmq
        node = trio.nodes[target % len(trio.nodes)]
        trio.shrink(scene.queue, node)
        time.sleep(AWAY)
        # the queue may have been wiped meanwhile, and be another one
        if node.directory.name not in trio.members(scene.queue).all:
            trio.grow(scene.queue, node)
    return f"without {node.directory.name} for {AWAY:g} s"


def wipe_broker(scene: Scene, target: int) -> str:
    """The same as without a cluster, while its nodes are there.

    A quorum queue that is deleted without one of its members stays in the middle of it (RabbitMQ 3.10), and nobody can use it.
    """
    with _alone(_nodes):
        return faults.wipe_broker(scene, target)


def promote_standby(scene: Scene, target: int) -> str:
    """The primary dies, its standby is promoted, and a new standby is built from it."""
    place, pair = _place(scene), _cluster(scene).postgres
    with _alone(scene.restarting):
        began = time.monotonic()
        if not pair.is_synchronous:
            place.replication.black_hole("replies")
            time.sleep(LAG)
        pair.primary.kill()
        place.replication.heal()
        promoted = pair.promote()
        pair.rebuild()
    return f"{promoted.directory.name}, and a new standby after {time.monotonic() - began:.1f} s"


def promote_over_paused(scene: Scene, target: int) -> str:
    """The primary stands still past every time-out, is fenced while it sleeps, and a new standby is built in its place."""
    pair = _cluster(scene).postgres
    with _alone(scene.restarting):
        former = pair.primary
        former.pause()
        time.sleep(AWAY)
        pair.promote()
        time.sleep(1.0)  # two of them for a moment; the sleeping one answers nothing
        former.kill()
        pair.rebuild()
    return f"{former.directory.name} slept for {AWAY:g} s"


def return_former(scene: Scene, target: int) -> str:
    """The primary stands still, its standby is promoted, and the former one goes on, which nobody has fenced.

    It says that it takes writes, and its commits wait for a standby that follows it no more. It is not restarted: then it
    would show what it alone had committed, and nobody had been answered.
    """
    pair = _cluster(scene).postgres
    with _alone(scene.restarting):
        former = pair.primary
        former.pause()
        try:
            time.sleep(AWAY)
            pair.promote()
        finally:
            former.resume()
        time.sleep(BESIDE)
        waiting = former.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")[0][0]
        former.kill()
        pair.rebuild()
    if pair.is_synchronous and not waiting:
        raise Missed("nobody wrote to the former primary")
    return f"{former.directory.name} went on for {BESIDE:g} s, {waiting} of its commits waited at the end"


def cut_replication(scene: Scene, target: int) -> str:
    """The zones of the primary and of the standby do not see each other: commits wait."""
    replication = _place(scene).replication
    with _alone(scene.restarting):
        swallowed = replication.swallowed
        replication.black_hole("replies")
        try:
            time.sleep(AWAY)
        finally:
            replication.black_hole(None)
            replication.heal()
        _cluster(scene).postgres.wait_for_standby()
    if replication.swallowed == swallowed:
        raise Missed("nothing was replicated meanwhile")
    return f"for {AWAY:g} s, {replication.swallowed - swallowed} bytes"


def replace_redis(scene: Scene, target: int) -> str:
    """The primary of Redis dies, the Sentinels choose another, and it comes back as a replica."""
    trio, began = _cluster(scene).redis, time.monotonic()
    former = trio.primary
    former.kill()
    try:
        chosen = trio.wait_for_failover(former)
    finally:
        former.start()
    return f"{chosen.directory.name} after {time.monotonic() - began:.1f} s"


def cut_zone_from_postgres(scene: Scene, target: int) -> str:
    """One zone gets no answers from Postgres; the other zone does."""
    return _cut_zone(scene, target, "postgres")


def cut_zone_from_broker(scene: Scene, target: int) -> str:
    """One zone gets no answers from RabbitMQ; the other zone does."""
    return _cut_zone(scene, target, "broker")


def cut_zone_from_redis(scene: Scene, target: int) -> str:
    """One zone gets no answers from the Sentinels, and has to ask them; the other zone finds Redis again."""
    return _cut_zone(scene, target, "redis")


def isolate_zone(scene: Scene, target: int) -> str:
    """One zone gets no answers from any server."""
    zone = ZONES[target % 2]
    return f"zone {zone} {_cut(scene, [proxies for (of, _), proxies in _place(scene).of_zone.items() if of == zone])}"


def _cut_zone(scene: Scene, target: int, service: str) -> str:
    zone = ZONES[target % 2]
    return f"zone {zone} {_cut(scene, [_place(scene).of_zone[zone, service]])}"


def _cut(scene: Scene, cut: Sequence[Proxies]) -> str:
    before = sum(each.swallowed for each in cut)
    for each in cut:
        each.black_hole("replies")
    try:
        # nothing is between a process and the Redis that it has found: it has to look for it again
        with contextlib.suppress(ServiceError, RedisError), Redis.from_url(_place(scene).redis_url) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        time.sleep(AWAY)
    finally:
        for each in cut:
            each.black_hole(None)
    if (swallowed := sum(each.swallowed for each in cut) - before) == 0:
        raise Missed("there was no answer")
    return f"for {AWAY:g} s, {swallowed} bytes"


def heal(scene: Scene) -> None:
    """Bring every node back, after `Scene.heal`."""
    servers = _cluster(scene)
    with _nodes:
        servers.rabbitmq.mend(READY_WITHIN)
    for server in servers.redis.servers:
        server.start()
    with scene.restarting:
        if not servers.postgres.is_whole:
            servers.postgres.rebuild()


FAULTS: dict[str, Callable[[Scene, int], str]] = {
    each.__name__: each
    for each in (
        kill_leader,
        kill_majority,
        pause_node,
        cut_node,
        resize_queue,
        wipe_broker,
        promote_standby,
        promote_over_paused,
        return_former,
        cut_replication,
        replace_redis,
        cut_zone_from_postgres,
        cut_zone_from_broker,
        cut_zone_from_redis,
        isolate_zone,
    )
}
