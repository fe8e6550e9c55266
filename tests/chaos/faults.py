"""Faults: one function for each kind of the plan. Each inflicts, waits for as long as it lasts, and heals.

A fault returns what it did, in a line. It raises `Missed` when there was nothing to hit: a fault that is only believed
to have happened proves nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import redis
from kombu import Connection as BrokerConnection

from idempotency.queues import dead_letter_queues
from services import process
from tests.chaos import application
from tests.chaos.fleet import BEAT, CALLER, EDGE, RELAY, SHOP_EDGE, SHOP_RELAY, SHOP_WORKER, WORKER, Member
from tests.chaos.place import Proxies
from tests.chaos.scene import (
    ATTEMPT_POINTS,
    EDGE_POINTS,
    EDGE_REACHED_WITHIN,
    REACHED_WITHIN,
    RELAY_POINTS,
    SHOP_POINTS,
    Missed,
    Scene,
)
from tests.support import crashing

# Longer than the lease, so that what is stopped is taken over, and short enough that it goes on within the run.
STOPPED = application.LEASE + 2.0
# How long a process stays stopped at most until another process has ended its operation: longer than the lease, the
# sweep and a backlog of the queue.
REPLACED_WITHIN = 20.0
FROZEN = 4.0
DOWN = 1.0
BLACK_HOLE = 3.0
SLOW, SLOW_SECONDS = 0.05, 3.0

# The fourth part of a holder's name is its pid.
_HELD = """
SELECT tenant, task, key, fence FROM idempotency.records
WHERE status = 'started' AND split_part(locked_by, '|', 4) = %(pid)s
"""
_PAID_AND_RELEASED = """
SELECT fence > %(fence)s AND status = 'released' AND effects ? 'pay' FROM idempotency.records
WHERE (tenant, task, key) = (%(tenant)s, %(task)s, %(key)s)
"""
_REPLACED = """
SELECT fence > %(fence)s AND status IN ('completed', 'failed') FROM idempotency.records
WHERE (tenant, task, key) = (%(tenant)s, %(task)s, %(key)s)
"""


Inflict = Callable[[Scene, int], str]

# ---------------------------------------------------------------- processes


def kill_child(scene: Scene, target: int) -> str:
    """F1: SIGKILL of one pool child."""
    deadline = time.monotonic() + REACHED_WITHIN
    while True:
        member, running = _take(scene, WORKER, target)
        if children := process.family(running)[1:]:
            break
        if time.monotonic() > deadline:
            raise Missed(f"{member.name} has no pool")
        time.sleep(0.1)
    child = children[target % len(children)]
    child.kill()
    return f"{member.name}: child {child.pid}"


def kill_worker(scene: Scene, target: int) -> str:
    """F2: SIGKILL of a whole worker, parent first."""
    member, running = _take(scene, WORKER, target)
    process.signal_all(process.family(running), signal.SIGKILL)
    return f"{member.name}: {running.pid}"


def stop_worker(scene: Scene, target: int) -> str:
    """F3: SIGSTOP of a whole worker until its leases are over, then SIGCONT."""
    return _stop(scene, WORKER, target)


def terminate_worker(scene: Scene, target: int) -> str:
    """F4: SIGTERM, a warm shutdown."""
    return _terminate(scene, WORKER, target)


def kill_relay(scene: Scene, target: int) -> str:
    """F2: SIGKILL of a relay."""
    return _kill(scene, RELAY, target)


def kill_beat(scene: Scene, target: int) -> str:
    """F19: SIGKILL of a beat, which starts again with its old schedule file."""
    return _kill(scene, BEAT, target)


def kill_caller(scene: Scene, target: int) -> str:
    """F1: SIGKILL of a process that calls eagerly: its attempt is not delivered again."""
    return _kill(scene, CALLER, target)


def deploy_worker(scene: Scene, target: int) -> str:
    """F21: a worker ends, and starts with the other code."""
    return _deploy(scene, WORKER, target)


def deploy_relay(scene: Scene, target: int) -> str:
    """F21: a relay, with the dead-letter consumer in it, likewise."""
    return _deploy(scene, RELAY, target)


# ---------------------------------------------------------------- processes, at a crash point


def kill_child_at_point(scene: Scene, target: int) -> str:
    """F1 at a named moment of an attempt."""
    return _kill_at(scene, ATTEMPT_POINTS, target, crashing.KILL_CHILD)


def kill_worker_at_point(scene: Scene, target: int) -> str:
    """F2 at a named moment of an attempt."""
    return _kill_at(scene, ATTEMPT_POINTS, target, crashing.KILL_WORKER)


def kill_relay_at_point(scene: Scene, target: int) -> str:
    """F2 of a relay between select, publish, confirm and mark."""
    return _kill_at(scene, RELAY_POINTS, target, crashing.KILL_CHILD)


def stop_child_at_point(scene: Scene, target: int) -> str:
    """F3 at a named moment of an attempt: taken over, and then it goes on."""
    return _stop_at(scene, ATTEMPT_POINTS, target)


def stop_child_before_finish(scene: Scene, target: int) -> str:
    """F3 with everything written and nothing finished, until another process has ended the operation.

    Its next statement is the write that must match nothing.
    """
    # either way it was stopped past its lease, and what it writes now must match nothing
    return _stop_until(scene, scene.arm(("body.done",), target, crashing.STOP), _REPLACED, "ended")


def stop_child_before_step(scene: Scene, target: int) -> str:
    """F3 inside a charge's first step, until another attempt has reserved, perhaps paid, and let go.

    What it decides now is about another attempt's work, and belongs to no attempt that is still there.
    """
    plan = scene.arm(("charge.reserving",), target, crashing.STOP)
    return _stop_until(scene, plan, _PAID_AND_RELEASED, "paid and released")


# ---------------------------------------------------------------- web servers


def kill_edge(scene: Scene, target: int) -> str:
    """F22: SIGKILL of a web server with all requests that it carries out."""
    return _kill(scene, EDGE, target)


def stop_edge(scene: Scene, target: int) -> str:
    """F23: SIGSTOP of a web server until its leases are over, then SIGCONT."""
    with _only_one_stopped(scene):
        return _stop(scene, EDGE, target)


def terminate_edge(scene: Scene, target: int) -> str:
    """F4: SIGTERM of a web server, which answers what it has begun."""
    return _terminate(scene, EDGE, target)


def kill_edge_at_point(scene: Scene, target: int) -> str:
    """F22 at a named moment of a request."""
    return _kill_at(scene, EDGE_POINTS, target, crashing.KILL_CHILD, scene.edge_crashes)


def stop_edge_before_finish(scene: Scene, target: int) -> str:
    """F23 with everything written and nothing finished, until the other server has ended all that this one holds."""
    with _only_one_stopped(scene):
        plan = scene.arm(("body.done",), target, crashing.STOP, scene.edge_crashes)
        return _stop_until(scene, plan, _REPLACED, "ended")


# ---------------------------------------------------------------- the shop


def kill_shop_worker(scene: Scene, target: int) -> str:
    """F2: SIGKILL of a whole worker of the worked application."""
    return _kill(scene, SHOP_WORKER, target)


def kill_shop_relay(scene: Scene, target: int) -> str:
    """F2: SIGKILL of its relay, of which there is one."""
    return _kill(scene, SHOP_RELAY, target)


def kill_shop_edge(scene: Scene, target: int) -> str:
    """F22: SIGKILL of its web server, to which the provider posts its webhooks."""
    return _kill(scene, SHOP_EDGE, target)


def kill_shop_at_point(scene: Scene, target: int) -> str:
    """F1 at a named moment of an attempt of the worked application, its sagas included."""
    return _kill_at(scene, SHOP_POINTS, target, crashing.KILL_CHILD, scene.shop_crashes)


# ---------------------------------------------------------------- servers


def reset_broker(scene: Scene, target: int) -> str:
    """F5: every connection to the broker ends by RST."""
    return _reset(scene.broker)


def freeze_broker(scene: Scene, target: int) -> str:
    """F7: the broker is stopped, its connections stay open."""
    scene.servers.rabbitmq.pause()
    try:
        time.sleep(FROZEN)
    finally:
        scene.servers.rabbitmq.resume()
    return f"for {FROZEN:g} s"


def wipe_broker(scene: Scene, target: int) -> str:
    """F8: every queue is deleted with all that is in it; half of the times Redis is emptied, too."""
    messages = 0
    with BrokerConnection(scene.broker_url, connect_timeout=5) as connection, connection.channel() as channel:
        queues = [*application.app.amqp.queues.values(), *scene.shop_queues]
        for queue in [*queues, *dead_letter_queues(queues)]:
            messages += channel.queue_delete(queue.name)
    leases = flush_redis(scene, target) if target % 2 else "Redis kept"
    return f"{messages} messages were waiting, {leases}"


def flush_redis(scene: Scene, target: int) -> str:
    """F9: FLUSHALL."""
    with redis.Redis.from_url(scene.servers.redis_url) as client:
        leases = client.dbsize()
        client.flushall()
    return f"{leases} leases"


def black_hole_redis(scene: Scene, target: int) -> str:
    """F10: Redis takes everything and answers nothing."""
    swallowed = scene.redis.swallowed
    scene.redis.black_hole("replies")
    try:
        time.sleep(BLACK_HOLE)
    finally:
        scene.redis.black_hole(None)
    if scene.redis.swallowed == swallowed:
        raise Missed("there was no request")
    return f"for {BLACK_HOLE:g} s, {scene.redis.swallowed - swallowed} bytes"


def kill_postgres(scene: Scene, target: int) -> str:
    """F12: SIGKILL of Postgres and all its backends, and recovery from its log."""
    postgres, began = scene.servers.postgres, time.monotonic()
    with scene.restarting:
        postgres.kill()
        time.sleep(DOWN)
        postgres.start()
    return f"answers again after {time.monotonic() - began:.1f} s"


def reset_postgres(scene: Scene, target: int) -> str:
    """F13: every connection to Postgres ends by RST."""
    return _reset(scene.postgres)


def cut_commit(scene: Scene, target: int) -> str:
    """F13: the answer to a COMMIT never arrives."""
    cuts = scene.postgres.cuts
    scene.postgres.cut_reply_to(b"COMMIT", skip=target % 5)
    deadline = time.monotonic() + REACHED_WITHIN
    while scene.postgres.cuts == cuts:
        if time.monotonic() > deadline:
            raise Missed("no COMMIT came by")
        time.sleep(0.02)
    return "one answer lost"


def slow_postgres(scene: Scene, target: int) -> str:
    """Every byte to and from Postgres takes its time."""
    scene.postgres.latency(SLOW)
    try:
        time.sleep(SLOW_SECONDS)
    finally:
        scene.postgres.latency(0)
    return f"{SLOW * 1000:g} ms each way for {SLOW_SECONDS:g} s"


FAULTS: dict[str, Inflict] = {
    each.__name__: each
    for each in (
        kill_child,
        kill_worker,
        stop_worker,
        terminate_worker,
        kill_relay,
        kill_beat,
        kill_caller,
        deploy_worker,
        deploy_relay,
        kill_child_at_point,
        kill_worker_at_point,
        kill_relay_at_point,
        stop_child_at_point,
        stop_child_before_finish,
        stop_child_before_step,
        kill_shop_worker,
        kill_shop_relay,
        kill_shop_edge,
        kill_shop_at_point,
        kill_edge,
        stop_edge,
        terminate_edge,
        kill_edge_at_point,
        stop_edge_before_finish,
        reset_broker,
        freeze_broker,
        wipe_broker,
        flush_redis,
        black_hole_redis,
        kill_postgres,
        reset_postgres,
        cut_commit,
        slow_postgres,
    )
}


def _take(scene: Scene, kind: str, target: int) -> tuple[Member, psutil.Process]:
    deadline = time.monotonic() + REACHED_WITHIN
    while (taken := scene.fleet.take(kind, target)) is None:
        if time.monotonic() > deadline:
            raise Missed(f"no {kind} is running")
        time.sleep(0.1)  # started again in a moment
    return taken


def _kill(scene: Scene, kind: str, target: int) -> str:
    member, running = _take(scene, kind, target)
    process.signal_all(process.family(running), signal.SIGKILL)
    return f"{member.name}: {running.pid}"


def _kill_at(scene: Scene, points: Sequence[str], target: int, action: str, directory: Path | None = None) -> str:
    plan, _ = scene.reach(points, target, action, "reached", directory)
    return plan.name


def _stop(scene: Scene, kind: str, target: int) -> str:
    member, running = _take(scene, kind, target)
    family = process.family(running)
    process.signal_all(family, signal.SIGSTOP)
    time.sleep(STOPPED)
    process.signal_all(family, signal.SIGCONT)
    return f"{member.name}: {running.pid} for {STOPPED:g} s"


def _terminate(scene: Scene, kind: str, target: int) -> str:
    member, running = _take(scene, kind, target)
    scene.fleet.terminate(member, running)
    return f"{member.name}: {running.pid}"


@contextmanager
def _only_one_stopped(scene: Scene) -> Iterator[None]:
    if not scene.stopping_edge.acquire(timeout=EDGE_REACHED_WITHIN):
        raise Missed("another web server is stopped")
    try:
        yield
    finally:
        scene.stopping_edge.release()


def _deploy(scene: Scene, kind: str, target: int) -> str:
    member, running = _take(scene, kind, target)
    scene.fleet.deploy(member, running)
    return f"{member.name}: {member.application.rpartition('.')[2]}"


def _stop_until(scene: Scene, plan: Path, query: str, what: str) -> str:
    """Stop the process that reaches a point until the query is true of its operations, at most REPLACED_WITHIN."""
    pid = int(scene.wait_for(plan, "stopped"))
    replaced = False
    try:
        held = scene.ask(_HELD, {"pid": str(pid)})
        deadline = time.monotonic() + REPLACED_WITHIN
        while held and not replaced and time.monotonic() < deadline:
            time.sleep(0.02)
            # a web server carries out several at once, and it is not known which of them has stopped it
            replaced = all(any(row[0] for row in scene.ask(query, each._asdict())) for each in held)
    finally:
        goes_on = _continue(pid)
    of = f"{held[0].tenant} {held[0].task} {held[0].key}" if held else "nothing"
    if not goes_on:
        raise Missed(f"{pid} was killed meanwhile")
    return f"{pid}, {what if replaced else f'not {what}'} by another attempt meanwhile: {of}"


def _stop_at(scene: Scene, points: Sequence[str], target: int) -> str:
    plan, text = scene.reach(points, target, crashing.STOP, "stopped")
    pid = int(text)
    time.sleep(STOPPED)
    return f"{plan.name}: {pid} for {STOPPED:g} s" if _continue(pid) else f"{plan.name}: {pid}, killed meanwhile"


def _continue(pid: int) -> bool:
    """SIGCONT; whether the process is still there."""
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return False
    return True


def _reset(proxy: Proxies) -> str:
    resets = proxy.resets
    proxy.reset()
    if proxy.resets == resets:
        raise Missed("no connection was open")
    return f"{proxy.resets - resets} connections"
