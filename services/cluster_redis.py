"""A Redis primary, its replica, and three Sentinels that replace the primary when it is gone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redis import Redis as Client
from redis.exceptions import RedisError

from services.redis import Redis
from services.server import READY_SECONDS, Server, ServiceError

NAMES, SENTINELS = ("redis-a", "redis-b"), ("sentinel-a", "sentinel-b", "sentinel-c")
# What the Sentinels call the primary, whichever it is.
PRIMARY = "hints"
# Milliseconds without an answer after which a Sentinel holds the primary for dead, and for one try to replace it.
DOWN_AFTER, FAILOVER_TIMEOUT = 1500, 5000


class RedisNode(Redis):
    """One of the two. Begins as the replica of `replica_of`, if that is given; later Sentinels say."""

    replica_of: RedisNode | None = None

    def _command(self) -> Sequence[str | Path]:
        program, config = super()._command()
        lines = f"masterauth {self.password}\n"
        if self.replica_of is not None:
            lines += f"replicaof 127.0.0.1 {self.replica_of.port}\n"
        with Path(config).open("a") as file:
            file.write(lines)
        return [program, config]

    @property
    def is_primary(self) -> bool:
        return str(self._replication().get("role")) == "master"

    @property
    def is_followed(self) -> bool:
        """Whether a replica has what this one has."""
        return "online" in str(self._replication().get("slave0"))

    def _replication(self) -> dict[str, Any]:
        """Nothing if it does not answer: a Sentinel that changes its role closes its clients' connections."""
        try:
            with Client.from_url(self.url, socket_timeout=1, socket_connect_timeout=1) as client:
                found: Any = client.info("replication")
        except RedisError:
            return {}
        return dict(found)


class Sentinel(Server):
    """One that watches the primary. What it has learnt is in its file, which it writes itself."""

    name = "sentinel"

    def __init__(self, directory: Path, first: RedisNode) -> None:
        self._first = first
        super().__init__(directory)

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}"

    def _command(self) -> Sequence[str | Path]:
        config = self.directory / "sentinel.conf"
        if not config.exists():
            config.touch(mode=0o600)
            config.write_text(
                "bind 127.0.0.1\n"
                f"port {self.port}\n"
                f"requirepass {self.password}\n"
                f"sentinel sentinel-pass {self.password}\n"
                f'dir "{self.directory}"\n'
                f"sentinel monitor {PRIMARY} 127.0.0.1 {self._first.port} {len(SENTINELS) // 2 + 1}\n"
                f"sentinel auth-pass {PRIMARY} {self._first.password}\n"
                f"sentinel down-after-milliseconds {PRIMARY} {DOWN_AFTER}\n"
                f"sentinel failover-timeout {PRIMARY} {FAILOVER_TIMEOUT}\n"
                f"sentinel parallel-syncs {PRIMARY} 1\n"
            )
        return [self._first.program(), config, "--sentinel"]

    def _check(self) -> None:
        with Client.from_url(self.url, socket_timeout=1, socket_connect_timeout=1) as client:
            client.ping()

    def others(self) -> int:
        """How many other Sentinels this one knows."""
        with Client.from_url(self.url, socket_timeout=1, socket_connect_timeout=1) as client:
            return len(client.execute_command("SENTINEL", "SENTINELS", PRIMARY))


class SentinelSet:
    """Primary, replica and three Sentinels."""

    def __init__(self, directory: Path, password: str) -> None:
        for name in (*NAMES, *SENTINELS):
            Server.share_password(directory / name, password)
        self.nodes = tuple(RedisNode(directory / name) for name in NAMES)
        self.nodes[1].replica_of = self.nodes[0]
        self.sentinels = tuple(Sentinel(directory / name, self.nodes[0]) for name in SENTINELS)

    @property
    def servers(self) -> tuple[Server, ...]:
        return (*self.nodes, *self.sentinels)

    @property
    def url(self) -> str:
        """The address of the primary, by way of the Sentinels."""
        return self.address([each.port for each in self.sentinels])

    def address(self, ports: Sequence[int]) -> str:
        """The same, by way of these ports, as of proxies before the Sentinels."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        return f"sentinel://:{self.sentinels[0].password}@{hosts}/{PRIMARY}"

    @property
    def primary(self) -> RedisNode:
        """The node that says that it is the primary. Raises `ServiceError` if none does."""
        for node in self.nodes:
            if node.running and node.answers() and node.is_primary:
                return node
        raise ServiceError("no Redis is the primary")

    def launch(self) -> None:
        for node in self.nodes:
            node.launch()

    def wait_until_ready(self, timeout: float = READY_SECONDS) -> None:
        for node in self.nodes:
            node.wait_until_ready(timeout)
        deadline = time.monotonic() + timeout
        # a Sentinel that finds no replica at first asks again only after ten seconds
        while not any(node.is_followed for node in self.nodes):
            if time.monotonic() > deadline:
                raise ServiceError(f"no Redis is a replica of the other within {timeout:g} s")
            time.sleep(0.1)
        for sentinel in self.sentinels:
            sentinel.start(timeout)
        while any(each.others() < len(SENTINELS) - 1 for each in self.sentinels):
            if time.monotonic() > deadline:
                raise ServiceError(f"the Sentinels have not found each other within {timeout:g} s")
            time.sleep(0.1)

    def wait_for_failover(self, former: RedisNode, timeout: float = READY_SECONDS) -> RedisNode:
        """Return the new primary, once a Sentinel has made one of what is left."""
        deadline = time.monotonic() + timeout
        while True:
            for node in self.nodes:
                if node is not former and node.answers() and node.is_primary:
                    return node
            if time.monotonic() > deadline:
                raise ServiceError(f"no Redis has become the primary within {timeout:g} s")
            time.sleep(0.1)

    def stop(self) -> None:
        for server in reversed(self.servers):
            server.stop()

    def discard(self) -> None:
        for server in reversed(self.servers):
            server.discard()
