"""The users of `broker-users` in tests: made by the command, in a virtual host of the test's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Connection

import services
from idempotency.broker.rights import KINDS
from tests.support.commands import Run

PASSWORDS = {kind: f"of the {kind} 100%'\\é" for kind in (*KINDS, "hints")}


@dataclass(frozen=True)
class Users:
    """`broker`, `redis`: addresses of the servers' own users, who may do everything."""

    prefix: str
    broker: str
    redis: str

    def url(self, kind: str) -> str:
        """The address of the test's virtual host for a user."""
        return _as(self.broker, f"{self.prefix}_{kind}", PASSWORDS[kind])

    @property
    def hints_url(self) -> str:
        return _as(self.redis, f"{self.prefix}_hints", PASSWORDS["hints"])

    @contextmanager
    def connected(self, app: Celery, kind: str) -> Iterator[Connection]:
        """A connection of the application's for a user."""
        with app.connection_for_write(self.url(kind)) as connection:
            connection.connect()
            yield connection


@contextmanager
def virtual_host(servers: services.Services) -> Iterator[str]:
    """The address of a new virtual host. Skips the test without a RabbitMQ that was started here."""
    if servers.broker != "rabbitmq":
        pytest.skip("needs a RabbitMQ that was started here")
    name = f"users-{uuid4().hex[:8]}"
    yield servers.create_vhost(name)
    servers.delete_vhost(name)


def make_users(
    run: Run, servers: services.Services, environment: dict[str, str], place: Path, patch: pytest.MonkeyPatch
) -> Users:
    """Make them, by the files that the command writes."""
    for kind in KINDS:
        patch.setenv(f"IDEMPOTENCY_BROKER_{kind.upper()}_PASSWORD", PASSWORDS[kind])
    patch.setenv("IDEMPOTENCY_REDIS_HINTS_PASSWORD", PASSWORDS["hints"])
    prefix, rabbitmq, redis = f"u{uuid4().hex[:6]}", place / "rabbitmq.json", place / "redis.acl"
    answer = run("broker-users", "--prefix", prefix, "--rabbitmq", rabbitmq, "--redis", redis)
    assert (answer.status, answer.out, "--without-mingle --without-gossip" in answer.error) == (0, "", True)
    assert not any(password in file.read_text() for password in PASSWORDS.values() for file in (rabbitmq, redis))
    servers.rabbitmq.import_definitions(rabbitmq.read_bytes())
    servers.redis.add_users(redis.read_text())
    return Users(prefix, environment["BROKER_URL"], environment["REDIS_URL"])


def _as(url: str, user: str, password: str) -> str:
    return re.sub(r"//[^@]*@", lambda _: f"//{user}:{quote(password, safe='')}@", url)
