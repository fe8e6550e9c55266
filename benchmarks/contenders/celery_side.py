"""Celery's tasks as contenders: plain ones, ours, and those of celery-once and Powertools.

A worker is told to consume a queue at time zero (`add_consumer`), when all messages are in it, and to leave it after
that. One worker of each pool size is shared by all that are fastest with it; it idles without using the processor.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..jobs import app
from . import tasks
from .contender import Contender, Layout
from .stopped import WITH_US

POOLS = tuple(Layout(1, children) for children in (4, 2, 8))
READY = 60.0
# Messages that a worker takes in advance for each process, of all queues: a batch of a hundred, and one that waits. A worker takes whole
# batches in advance by itself only where it has started with their queue, and here the queues are added.
PREFETCH = 200


class Workers:
    """Prefork workers, one of each pool size, started when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}

    def node(self, children: int) -> str:
        """The name of a running worker with so many pool children."""
        if children not in self._started:
            self._started[children] = self._start(children)
        return self._started[children][0]

    def keep(self, sizes: Sequence[int]) -> None:
        """End the workers of other sizes."""
        for children in set(self._started) - set(sizes):
            process = self._started.pop(children)[1]
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()  # a warm shutdown waits for what is in hand, of which there may be much if a run fails
                process.wait(30)

    def _start(self, children: int) -> tuple[str, subprocess.Popen[bytes]]:
        node, path = f"pool{children}@bench", self._directory / f"pool{children}.log"
        command = [sys.executable, "-m", "celery", "-A", tasks.__name__, "worker", "-Q", "idle", "-n", node]
        command += ["--concurrency", str(children), "--prefetch-multiplier", str(PREFETCH), "--loglevel", "WARNING"]
        command += ["--without-mingle", "--without-gossip", "--without-heartbeat"]
        with path.open("wb") as log:
            process = subprocess.Popen([*WITH_US, *command], stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + READY
        while not app.control.ping(destination=[node], timeout=0.5, limit=1):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the worker did not start: {path.read_text()[-500:]}")
        return node, process


class CeleryTask(Contender):
    """A task, in the queue of its name."""

    layouts = POOLS

    def __init__(self, workers: Workers, task: Any, name: str, like: str) -> None:
        self.name = name
        self._like = like
        self.task = task
        self._workers = workers
        self._broker: Any = None

    @property
    def like(self) -> str:
        return self._like

    @property
    def settings(self) -> dict[str, object]:
        names = ("task_acks_late", "task_reject_on_worker_lost", "task_ignore_result")
        chosen: dict[str, object] = {name: app.conf[name] for name in names}
        chosen |= {
            "worker_prefetch_multiplier": PREFETCH,
            "queue": "quorum",
            "pool": "prefork",
            "publisher_confirms": True,
        }
        if self.name == "celery_once":
            chosen |= {"backend": "Redis", "keys": ["number"], "default_timeout": tasks.EXPIRES}
        if self.name == "powertools":
            chosen |= {"persistence": "RedisCachePersistenceLayer", "expires_after_seconds": tasks.EXPIRES}
        return chosen

    def start(self, layout: Layout) -> None:
        self.layout = layout
        self._workers.node(layout.concurrency)

    def send(self, numbers: Sequence[int]) -> None:
        with app.producer_pool.acquire(block=True) as producer:
            for number in numbers:
                self.task.apply_async((number,), producer=producer)

    def begin(self) -> None:
        app.control.add_consumer(self.name, **self._where())

    def carry_out(self) -> None:
        """Wait until what the worker has taken is acknowledged."""
        while self._in_hand():
            time.sleep(0.02)

    def end(self) -> None:
        self.carry_out()
        app.control.cancel_consumer(self.name, **self._where())
        # The worker answers before it does so, and would take the first messages of the next turn as they are sent.
        while self._declared().consumer_count:
            time.sleep(0.01)

    def stop(self) -> None:
        # the worker is shared
        if self._broker is not None:
            self._broker.release()
            self._broker = None

    def waiting(self) -> int:
        """The messages that no worker has taken."""
        return int(self._declared().message_count)

    def _declared(self) -> Any:
        """What the broker says of its queue, which is exact."""
        if self._broker is None:
            # one channel for all that is asked, which is up to a hundred times a second
            self._broker = app.connection_for_read()
        return self._broker.default_channel.queue_declare(self.name, passive=True)

    def _in_hand(self) -> int:
        """What the worker has taken and not acknowledged. In this order: what is reserved becomes active."""
        asked = app.control.inspect([self._node], timeout=10, limit=1)
        return sum(len(found) for ask in (asked.reserved, asked.active) for found in (ask() or {}).values())

    def _where(self) -> dict[str, Any]:
        return {"destination": [self._node], "reply": True, "timeout": 30, "limit": 1}

    @property
    def _node(self) -> str:
        return self._workers.node(self.layout.concurrency)
