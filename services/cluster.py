"""A cluster of everything on one machine: ``python -m services.cluster up | down | env``, kept in var/cluster.

    with cluster.running() as servers:
        servers.postgres.primary.kill()
        servers.postgres.promote()

Three RabbitMQ nodes, a Postgres primary with a synchronous standby, a Redis with a replica and three Sentinels: separate
processes in private directories, on loopback. Not a cluster to run on: all of them share this machine's fate.
"""

from __future__ import annotations

import argparse
import fcntl
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services import packages
from services.cluster_postgres import PostgresPair
from services.cluster_rabbitmq import RabbitMQTrio
from services.cluster_redis import SentinelSet
from services.local import start_watchdog
from services.server import READY_SECONDS, ServiceError

STATE = Path(__file__).parent.parent / "var" / "cluster"
LOGIN = "login"


class Cluster:
    """The servers below one directory, which another process finds there again.

    `needs`: which of `postgres`, `rabbitmq` and `redis`.
    """

    def __init__(self, directory: Path, *, needs: tuple[str, ...] = ("postgres", "rabbitmq", "redis")) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = directory / LOGIN
        if not file.exists():
            file.touch(mode=0o600)
            file.write_text(secrets.token_urlsafe(18))
        password = file.read_text()
        self.postgres = PostgresPair(directory, password)
        self.rabbitmq = RabbitMQTrio(directory, password)
        self.redis = SentinelSet(directory, password)
        known: dict[str, PostgresPair | RabbitMQTrio | SentinelSet] = {
            "rabbitmq": self.rabbitmq,
            "postgres": self.postgres,
            "redis": self.redis,
        }
        self._parts = [part for name, part in known.items() if name in needs]

    def start(self, timeout: float = READY_SECONDS) -> None:
        """Start all that does not run, and return once they are clusters. Raises `ServiceError`."""
        if self.rabbitmq in self._parts and packages.rabbitmq_program() is None:
            raise ServiceError("RabbitMQ not found: install the package rabbitmq-server")
        for part in self._parts:
            part.launch()
        for part in self._parts:
            part.wait_until_ready(timeout)

    def environment(self) -> dict[str, str]:
        """The addresses as environment variables."""
        return {
            "DATABASE_URL": self.postgres.url(),
            "REDIS_URL": self.redis.url,
            "BROKER_URL": self.rabbitmq.url(),
        }

    def stop(self) -> None:
        """Shut down gracefully; the data is kept."""
        for part in self._parts:
            part.stop()

    def discard(self) -> None:
        """End immediately; data may be lost."""
        for part in self._parts:
            part.discard()


@contextmanager
def running(
    *,
    needs: tuple[str, ...] = ("postgres", "rabbitmq", "redis"),
    prepare: Callable[[Cluster], object] = lambda cluster: None,
) -> Iterator[Cluster]:
    """A cluster for a `with` block, in a directory that is removed even if this process is killed. Raises `ServiceError`.

    `prepare` gets it before it starts.
    """
    place = Path(tempfile.mkdtemp(prefix="cluster-"))
    watchdog: subprocess.Popen[bytes] | None = None
    try:
        watchdog = start_watchdog(place, remove=True)
        cluster = Cluster(place, needs=needs)
        prepare(cluster)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.discard()
    finally:
        if watchdog is not None:
            watchdog.kill()
            watchdog.wait()
        shutil.rmtree(place, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.cluster", description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("up", "down", "env"))
    command = parser.parse_args().command
    STATE.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        # two concurrent `up` would each start servers
        with (STATE / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _do(command, Cluster(STATE))
    except ServiceError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _do(command: str, cluster: Cluster) -> None:
    began = time.monotonic()
    if command == "up":
        cluster.start()
        print(f"running: RabbitMQ 3, Postgres 2, Redis 2, Sentinel 3 ({time.monotonic() - began:.1f} s)")
        print(f"the primary of Postgres: {cluster.postgres.primary.directory.name}")
        print('their addresses, with passwords: eval "$(python -m services.cluster env)"')
    elif command == "down":
        cluster.stop()
        print("stopped; the data is kept in var/cluster")
    else:
        for variable, address in cluster.environment().items():
            print(f"export {variable}={shlex.quote(address)}")


if __name__ == "__main__":
    sys.exit(main())
