"""The three servers together: given or started here, and ended together."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from services import packages, postgres
from services.postgres import Postgres
from services.rabbitmq import RabbitMQ
from services.rabbitmq_container import RabbitMQContainer, docker_answers
from services.redis import Redis, RedisBroker
from services.server import READY_SECONDS, Server, ServiceError

NEEDS = ("postgres", "redis", "rabbitmq")
_VARIABLES = {"postgres": "DATABASE_URL", "redis": "REDIS_URL", "rabbitmq": "BROKER_URL"}

_Server = TypeVar("_Server", bound=Server)
Broker = Literal["rabbitmq", "redis", "given"]


class Services:
    """The servers in one directory, and the addresses of all three.

    `needs`: the names of the required ones, by default all. Raises `ValueError` for an unknown name.
    """

    def __init__(
        self, directory: Path, *, needs: Sequence[str] = NEEDS, given: Mapping[str, str] | None = None
    ) -> None:
        unknown = sorted(set(needs) - set(NEEDS))
        if unknown:
            raise ValueError(f"needs: unknown service {unknown[0]!r}, must be among {', '.join(NEEDS)}")
        environment = os.environ if given is None else given
        self.directory = directory
        self._needs = tuple(needs)
        self._given = {
            name: environment[variable] for name, variable in _VARIABLES.items() if environment.get(variable)
        }
        self.servers: dict[str, Server] = {
            name: self._server(name) for name in NEEDS if name in needs and name not in self._given
        }

    @property
    def database_url(self) -> str:
        """The SQLAlchemy address of Postgres."""
        return self._url("postgres")

    @property
    def redis_url(self) -> str:
        """The address of the Redis for hints."""
        return self._url("redis")

    @property
    def broker_url(self) -> str:
        """The broker's address; see `broker` for its kind."""
        return self._url("rabbitmq")

    @property
    def broker(self) -> Broker:
        """The kind of broker: a RabbitMQ or a Redis started here, or one that was given."""
        if "rabbitmq" in self._given:
            return "given"
        return "redis" if isinstance(self.servers.get("rabbitmq"), Redis) else "rabbitmq"

    @property
    def postgres(self) -> Postgres:
        """The Postgres started here. Raises `ServiceError` if it was given or not required."""
        return self._started("postgres", Postgres)

    @property
    def redis(self) -> Redis:
        """The Redis for hints started here. Raises `ServiceError` if it was given or not required."""
        return self._started("redis", Redis)

    @property
    def rabbitmq(self) -> RabbitMQ:
        """The RabbitMQ started here. Raises `ServiceError` if it was given or Redis is the broker."""
        return self._started("rabbitmq", RabbitMQ)

    def environment(self) -> dict[str, str]:
        """The addresses as environment variables."""
        return {_VARIABLES[name]: self._url(name) for name in NEEDS if name in self._needs}

    def create_database(self, name: str) -> str:
        """Create an empty database and return its address."""
        return postgres.create_database(self.database_url, name)

    def drop_database(self, name: str) -> None:
        """Drop a database, if it exists, and end its connections."""
        postgres.drop_database(self.database_url, name)

    def create_vhost(self, name: str) -> str:
        """Create a virtual host in the RabbitMQ started here and return its address."""
        return self.rabbitmq.create_vhost(name)

    def delete_vhost(self, name: str) -> None:
        """Delete a virtual host of the RabbitMQ started here with everything in it."""
        self.rabbitmq.delete_vhost(name)

    def start(self, timeout: float = READY_SECONDS) -> None:
        """Start the servers that are not given or running, in parallel; return when all of them answer."""
        # RabbitMQ first, because it takes longest.
        if self.broker == "redis":
            print(
                "RabbitMQ is not installed and Docker is unavailable: using a second Redis as the broker",
                file=sys.stderr,
            )
        for name in reversed(NEEDS):
            if name in self.servers:
                self.servers[name].launch()
        for server in self.servers.values():
            server.wait_until_ready(timeout)

    def stop(self) -> None:
        """Shut down gracefully; the data is kept."""
        for server in self.servers.values():
            server.stop()

    def discard(self) -> None:
        """End immediately; data may be lost."""
        for server in self.servers.values():
            server.discard()

    def _server(self, name: str) -> Server:
        if name == "postgres":
            return Postgres(self.directory / name)
        if name == "redis":
            return Redis(self.directory / name)
        return self._broker()

    def _broker(self) -> Server:
        # Keep a running broker, even if a better one has been installed since.
        for kind in (RabbitMQ, RabbitMQContainer, RedisBroker):
            if (self.directory / kind.name).exists() and (server := kind(self.directory / kind.name)).running:
                return server
        if packages.rabbitmq_program() is not None:
            return RabbitMQ(self.directory / RabbitMQ.name)
        if docker_answers():
            return RabbitMQContainer(self.directory / RabbitMQContainer.name)
        return RedisBroker(self.directory / RedisBroker.name)

    def _url(self, name: str) -> str:
        if name in self._given:
            return self._given[name]
        if name not in self.servers:
            raise ServiceError(f"{name} is not among the required services: {', '.join(self._needs)}")
        return self.servers[name].url

    def _started(self, name: str, kind: type[_Server]) -> _Server:
        server = self.servers.get(name)
        if isinstance(server, kind):
            return server
        reason = f"{_VARIABLES[name]} is set" if name in self._given else f"running here: {', '.join(self.servers)}"
        raise ServiceError(f"{name} was not started here ({reason})")


def provide(needs: Sequence[str] = NEEDS) -> None:
    """Install RabbitMQ if it is required, missing, and this process may; otherwise another broker replaces it."""
    wanted = "rabbitmq" in needs and not os.environ.get(_VARIABLES["rabbitmq"])
    if wanted and packages.rabbitmq_program() is None and packages.can_install():
        try:
            packages.install("rabbitmq-server")
        except packages.PackageError as error:
            print(error, file=sys.stderr)


@contextlib.contextmanager
def running(directory: Path | None = None, *, needs: Sequence[str] = NEEDS) -> Iterator[Services]:
    """Start the servers for a `with` block, and end them after it.

    Without `directory`, they use a temporary one, which is removed even if this process is killed. With it, their data
    is kept. Raises `ServiceError` if a server cannot be started.
    """
    private = directory is None
    place = Path(tempfile.mkdtemp(prefix="services-")) if directory is None else directory
    watchdog: subprocess.Popen[bytes] | None = None
    try:
        watchdog = start_watchdog(place, remove=private)
        provide(needs)
        services = Services(place, needs=needs)
        try:
            services.start()
            yield services
        finally:
            services.discard() if private else services.stop()
    finally:
        if watchdog is not None:
            watchdog.kill()
            watchdog.wait()
        if private:
            shutil.rmtree(place, ignore_errors=True)


def start_watchdog(directory: Path, *, remove: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "services.watchdog", str(os.getpid()), str(directory)]
    return subprocess.Popen(
        command + ["--remove"] * remove,
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
