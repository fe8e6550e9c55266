"""Failovers of a cluster at a low rate, one kind after the other: as many in an hour as a year may bring."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from services import ServiceError
from services.cluster import Cluster

# Seconds for which a node stays away.
AWAY = 4.0
# How long a busy machine may need to start one.
MENDED_WITHIN = 240.0


class Failovers:
    """A thread that brings one about after each pause, until `stop`. `done`: how many of each kind; `failed`: what did not end well."""

    def __init__(self, cluster: Cluster, queues: Sequence[str], database: str, pause: float) -> None:
        self._cluster, self._queues, self._database, self._pause = cluster, queues, database, pause
        self._kinds = (self.leader, self.standby, self.sentinel)
        self.done: Counter[str] = Counter()
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="failovers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Bring about no more; returns when the last one is over."""
        self._stop.set()
        self._thread.join(2 * MENDED_WITHIN)

    @property
    def lacking(self) -> list[str]:
        """Which kinds have not happened."""
        return [kind.__name__ for kind in self._kinds if not self.done[kind.__name__]]

    def redis_url(self) -> str:
        """The address of the Redis that takes writes now. Raises `ServiceError`."""
        return self._cluster.redis.primary.url

    def leader(self) -> None:
        """The node that leads one of the queues, each in its turn, dies, and comes back."""
        trio = self._cluster.rabbitmq
        queue = self._queues[self.done[self.leader.__name__] % len(self._queues)]
        name = trio.members(queue).leader
        if name is None:
            raise ServiceError(f"{queue} has no leader")
        trio.node(name).kill()
        time.sleep(AWAY)
        trio.mend(MENDED_WITHIN)

    def standby(self) -> None:
        """The primary of Postgres dies, its standby is promoted and gets its VACUUM, and a new one is built (docs/cluster.md)."""
        pair = self._cluster.postgres
        pair.primary.kill()
        pair.promote().execute("VACUUM (ANALYZE)", database=self._database)
        pair.rebuild()

    def sentinel(self) -> None:
        """The primary of Redis dies, the Sentinels choose another, and it comes back as a replica."""
        trio = self._cluster.redis
        former = trio.primary
        former.kill()
        try:
            trio.wait_for_failover(former)
        finally:
            former.start()

    def _work(self) -> None:
        number = 0
        while not self._stop.wait(self._pause):
            kind = self._kinds[number % len(self._kinds)]
            number += 1
            try:
                kind()
                self.done[kind.__name__] += 1
            except Exception as error:  # whatever it is, the run has to end with it, and not this thread alone
                self.failed.append(f"{kind.__name__}: {error}")
