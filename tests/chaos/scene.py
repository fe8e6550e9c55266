"""What a fault can act on, and the crash points at which it can wait for work."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kombu import Queue
from sqlalchemy import Engine, Row
from sqlalchemy.exc import DBAPIError

from services import process
from tests.chaos.edge import CRASHES
from tests.chaos.fleet import Fleet
from tests.chaos.place import Place, Proxies
from tests.support import crashing

# How long a crash point may take to be reached before another one is tried; after so many the fault counts as missed.
REACHED_WITHIN = 10.0
POINTS_TRIED = 3
# There are two web servers, of which one may be stopped while the other starts.
EDGE_REACHED_WITHIN = 25.0
# So long the watching connections wait for Postgres.
PATIENCE = 30.0

ATTEMPT_POINTS = (
    "hint.left",
    "claimed",
    "body.entered",
    "body.done",
    "finish.written",
    "finish.committed",
    "released",
    "step.entered",
    "step.recorded",
    "step.committed",
    "effect.begun",
    "effect.called",
    "effect.recorded",
)
# Where a fault of one kind waits for one task.
OWN_POINTS = ("charge.reserving",)
# A request has no hint in Redis; and one that is answered with a 5xx is released.
EDGE_POINTS = (
    "claimed",
    "body.entered",
    "body.done",
    "finish.written",
    "finish.committed",
    "released",
    "effect.begun",
    "effect.called",
    "effect.recorded",
)
# Of the shop's workers; the last ones are those of sagas and of webhooks to its customer.
SHOP_POINTS = (
    "claimed",
    "step.committed",
    "effect.called",
    "finish.written",
    "finish.committed",
    "saga.waits",
    "saga.waiting",
    "wait.decided",
    "saga.compensating",
    "webhook.recorded",
    "webhook.posted",
)
RELAY_POINTS = ("relay.selected", "relay.published", "relay.confirmed", "relay.marked")


class Missed(Exception):
    """There was nothing to hit, or it did not come in time."""


@dataclass
class Scene:
    """Everything that a fault can act on."""

    servers: Place
    fleet: Fleet
    postgres: Proxies
    redis: Proxies
    broker: Proxies
    # the broker's own address, past the proxy
    broker_url: str
    # the database, past the proxy
    engine: Engine
    crash_directory: Path
    # where the shop's own crash points are planned, and the queues that it works on
    shop_crashes: Path
    shop_queues: Sequence[Queue]
    # for attacks: the shop's database, past the proxy; where it takes webhooks; the payment provider; the queue of the work
    shop_engine: Engine
    webhooks_url: str
    provider_url: str
    queue: str
    # signed messages that were overheard, the oldest first, and what was believed that should not have been
    overheard: list[Any] = field(default_factory=list)
    believed: list[str] = field(default_factory=list)
    # one restart of Postgres at a time
    restarting: threading.Lock = field(default_factory=threading.Lock)
    # one web server stopped at a time: the other has to take over
    stopping_edge: threading.Lock = field(default_factory=threading.Lock)
    _armed: set[Path] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def edge_crashes(self) -> Path:
        """Where the web servers' own crash points are planned."""
        return self.crash_directory / CRASHES

    def heal(self) -> None:
        """Undo whatever may still be in force."""
        for proxy in (self.postgres, self.redis, self.broker):
            proxy.heal()
        self.fleet.finish_deploy()
        self.servers.rabbitmq.resume()
        with self.restarting:
            self.servers.postgres.start()  # nothing happens when it runs
        for point in (*ATTEMPT_POINTS, *OWN_POINTS, *RELAY_POINTS):
            (self.crash_directory / point).unlink(missing_ok=True)
        for point in EDGE_POINTS:
            (self.edge_crashes / point).unlink(missing_ok=True)
        for point in SHOP_POINTS:
            (self.shop_crashes / point).unlink(missing_ok=True)
        for member in self.fleet.members:
            if (running := member.running) is not None:
                process.signal_all(process.family(running), signal.SIGCONT)

    def ask(
        self, query: str, parameters: Mapping[str, Any] | None = None, engine: Engine | None = None
    ) -> Sequence[Row[Any]]:
        """Read from the database, or another one, past the proxy, as often as it takes while Postgres is away."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                with (engine or self.engine).connect() as connection:
                    return connection.exec_driver_sql(query, dict(parameters or {})).all()
            except DBAPIError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def arm(self, points: Sequence[str], target: int, action: str, directory: Path | None = None) -> Path:
        """Plan an action at one of these points that has none yet; returns the plan, whose name is the point's."""
        directory = directory or self.crash_directory
        deadline = time.monotonic() + REACHED_WITHIN
        while (plan := self._take(points, target, directory)) is None:
            if time.monotonic() > deadline:
                raise Missed("every point has a plan already")
            time.sleep(0.1)
        crashing.plan(directory, plan.name, action)
        return plan

    def _take(self, points: Sequence[str], target: int, directory: Path) -> Path | None:
        with self._lock:
            free = [plan for point in points if (plan := directory / point) not in self._armed]
            if not free:
                return None
            plan = free[target % len(free)]
            self._armed.add(plan)
            return plan

    def reach(
        self, points: Sequence[str], target: int, action: str, sign: str, directory: Path | None = None
    ) -> tuple[Path, str]:
        """Plan an action at one of these points, and at another one if it is not reached in time; the plan and its sign's text.

        Which point is drawn says nothing about how often work comes by it: few returns of a shop are undone in a minute.
        """
        # the next one that is tried is not of the same kind, which stand side by side
        stride = len(points) // POINTS_TRIED + 1
        for number in range(POINTS_TRIED):
            plan = self.arm(points, target + number * stride, action, directory)
            try:
                return plan, self.wait_for(plan, sign)
            except Missed as error:
                missed = error
        raise missed

    def wait_for(self, plan: Path, sign: str) -> str:
        """Wait until a point is reached and return the sign's text; Missed when it is not reached in time."""
        path = plan.with_name(f"{plan.name}.{sign}")
        within = EDGE_REACHED_WITHIN if plan.parent == self.edge_crashes else REACHED_WITHIN
        try:
            deadline = time.monotonic() + within
            while not path.exists():
                if time.monotonic() > deadline and self._disarm(plan):
                    raise Missed(f"{plan.name} was not reached within {within:g} s")
                time.sleep(0.02)
            text = path.read_text()
            path.unlink()
            return text
        finally:
            with self._lock:
                self._armed.discard(plan)

    def _disarm(self, plan: Path) -> bool:
        try:
            plan.unlink()
        except FileNotFoundError:
            return False  # reached just now
        return True
