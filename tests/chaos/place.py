"""Where a run takes place: three servers, or a cluster of each, and the proxies before them for the processes of each zone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import services
from services import cluster
from services.cluster import Cluster
from tests.support.proxy import Direction, Proxy

ZONES = ("a", "b")


class Proxies:
    """Several proxies that get each fault together."""

    def __init__(self, proxies: Sequence[Proxy]) -> None:
        self._proxies = tuple(proxies)

    @property
    def ports(self) -> list[int]:
        return [each.port for each in self._proxies]

    @property
    def cuts(self) -> int:
        return sum(each.cuts for each in self._proxies)

    @property
    def resets(self) -> int:
        return sum(each.resets for each in self._proxies)

    @property
    def swallowed(self) -> int:
        return sum(each.swallowed for each in self._proxies)

    def cut_reply_to(self, pattern: bytes, *, skip: int = 0) -> None:
        for each in self._proxies:
            each.cut_reply_to(pattern, skip=skip)

    def latency(self, seconds: float) -> None:
        for each in self._proxies:
            each.latency(seconds)

    def black_hole(self, direction: Direction | None) -> None:
        for each in self._proxies:
            each.black_hole(direction)

    def reset(self) -> None:
        for each in self._proxies:
            each.reset()

    def heal(self) -> None:
        for each in self._proxies:
            each.heal()


class Place(Protocol):
    """What a run and its faults need of the servers."""

    directory: Path
    postgres: Any
    rabbitmq: Any
    broker: str

    @property
    def proxies(self) -> Mapping[str, Proxies]:
        """Of all zones, by `postgres`, `redis` and `broker`."""

    @property
    def redis_url(self) -> str:
        """The Redis that takes writes now, past the proxies."""

    @property
    def broker_url(self) -> str:
        """The brokers, past the proxies."""

    def create_database(self, name: str) -> str:
        """Create an empty database; returns its address past the proxies."""

    def environments(self, database_url: str) -> list[dict[str, str]]:
        """The addresses through the proxies, for each zone."""


class Alone:
    """One server of each kind, one zone."""

    def __init__(self, servers: services.Services, stack: ExitStack) -> None:
        self._servers = servers
        self.directory = servers.directory
        self.broker: str = servers.broker
        self.postgres, self.rabbitmq = servers.postgres, servers.rabbitmq
        self.create_database = servers.create_database
        self.redis_url, self.broker_url = servers.redis_url, servers.broker_url
        urls = {"postgres": servers.database_url, "redis": servers.redis_url, "broker": servers.broker_url}
        self.proxies: Mapping[str, Proxies] = {
            name: Proxies([_before(urlsplit(url).port or 0, stack)]) for name, url in urls.items()
        }

    def environments(self, database_url: str) -> list[dict[str, str]]:
        return [
            {
                "DATABASE_URL": _through(database_url, self.proxies["postgres"]),
                "REDIS_URL": _through(self.redis_url, self.proxies["redis"]),
                "BROKER_URL": _through(self.broker_url, self.proxies["broker"]),
            }
        ]


class _Primary:
    """Postgres as a fault sees it that kills and restarts it: whichever node is the primary."""

    def __init__(self, servers: Cluster) -> None:
        self._pair = servers.postgres

    def kill(self) -> None:
        self._pair.primary.kill()

    def start(self) -> None:
        self._pair.primary.start()


class _Nodes:
    """RabbitMQ as the end of a storm sees it."""

    def __init__(self, servers: Cluster) -> None:
        self._trio = servers.rabbitmq

    def resume(self) -> None:
        for node in self._trio.nodes:
            if node.running:
                node.resume()


class Clustered:
    """A cluster of each kind, two zones, each with proxies of its own. Sentinels name Redis itself, which no proxy is before."""

    broker = "rabbitmq"

    def __init__(self, servers: Cluster, replication: Proxies, stack: ExitStack) -> None:
        self.servers = servers
        self.replication = replication
        self.directory = servers.directory
        self.postgres, self.rabbitmq = _Primary(servers), _Nodes(servers)
        ports = {
            "postgres": [node.port for node in servers.postgres.nodes],
            "redis": [each.port for each in servers.redis.sentinels],
            "broker": [node.port for node in servers.rabbitmq.nodes],
        }
        made = {(zone, name): [_before(port, stack) for port in ports[name]] for zone in ZONES for name in ports}
        self.of_zone = {key: Proxies(proxies) for key, proxies in made.items()}
        self.proxies: Mapping[str, Proxies] = {
            name: Proxies([proxy for zone in ZONES for proxy in made[zone, name]]) for name in ports
        }

    @property
    def redis_url(self) -> str:
        return self.servers.redis.primary.url

    @property
    def broker_url(self) -> str:
        return self.servers.rabbitmq.url()

    def create_database(self, name: str) -> str:
        return self.servers.postgres.create_database(name)

    def environments(self, database_url: str) -> list[dict[str, str]]:
        name = urlsplit(database_url).path.removeprefix("/")
        return [
            {
                "DATABASE_URL": self.servers.postgres.url(name, ports=self.of_zone[zone, "postgres"].ports),
                "REDIS_URL": self.servers.redis.address(self.of_zone[zone, "redis"].ports),
                "BROKER_URL": self.servers.rabbitmq.url(ports=self.of_zone[zone, "broker"].ports),
            }
            for zone in ZONES
        ]


@contextmanager
def alone() -> Iterator[Place]:
    with services.running() as servers, ExitStack() as stack:
        yield Alone(servers, stack)


@contextmanager
def clustered(*, is_synchronous: bool) -> Iterator[Clustered]:
    """`is_synchronous`: without it, a promotion may lose what was answered, which the checker has to find."""
    with ExitStack() as stack:
        between: list[Proxy] = []

        def prepare(servers: Cluster) -> None:
            servers.postgres.is_synchronous = is_synchronous
            for node in servers.postgres.nodes:
                between.append(_before(node.port, stack))
                node.reached_at = between[-1].port

        with cluster.running(prepare=prepare) as servers:
            yield Clustered(servers, Proxies(between), stack)


def _before(port: int, stack: ExitStack) -> Proxy:
    proxy = Proxy("127.0.0.1", port)
    close: Callable[[], None] = proxy.close
    stack.callback(close)
    return proxy


def _through(url: str, proxies: Proxies) -> str:
    """The same address, by way of the only proxy."""
    parts = urlsplit(url)
    login, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{login}{at}127.0.0.1:{proxies.ports[0]}"))
