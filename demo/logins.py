"""A separate login for each kind of process, in Postgres, RabbitMQ and Redis, with the rights that it needs.

On a server that was given in the environment, all processes use its address as it is: its users may be in use elsewhere.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from amqp.exceptions import NotFound
from kombu import Connection
from rich.console import Console
from sqlalchemy import Engine, make_url

import services
from demo.processes import COMMAND_LINE, QUEUES, ROOT, ProcessError
from idempotency.broker.rights import KINDS
from idempotency.store import roles
from idempotency.store.rights import APPLICATION, RELAY, ROLES
from tasks.migrate import grant


@dataclass(frozen=True, slots=True)
class Logins:
    """Addresses by role of the database, and of the broker by kind of process."""

    databases: Mapping[str, str]
    brokers: Mapping[str, str]
    redis: str

    def environment(self, kind: str) -> dict[str, str]:
        """The addresses of a kind of process. Beats and relays look through all tenants."""
        role = RELAY if kind in ("relay", "beat") else APPLICATION
        return {"DATABASE_URL": self.databases[role], "BROKER_URL": self.brokers[kind], "REDIS_URL": self.redis}


def check_unused(servers: services.Services) -> None:
    """Raise `ProcessError` if workers are consuming queues of these names on a broker that was given."""
    if "rabbitmq" in servers.servers or not servers.broker_url.startswith("amqp"):
        return
    with Connection(servers.broker_url) as broker:
        for name in QUEUES:
            with suppress(NotFound), broker.channel() as channel:
                if channel.queue_declare(name, passive=True).consumer_count:
                    raise ProcessError(
                        f"BROKER_URL: workers consume the queue {name!r} there, and this run wipes its broker; stop them, or "
                        "unset BROKER_URL, DATABASE_URL and REDIS_URL: then it starts servers for itself"
                    )


def make_roles(servers: services.Services, engine: Engine, database_url: str, console: Console) -> Mapping[str, str]:
    """Make the roles of the database. Returns its address for each."""
    if "postgres" not in servers.servers:
        console.print("DATABASE_URL is given: its login does everything, and no roles are made")
        return dict.fromkeys(ROLES, database_url)
    passwords = {role: secrets.token_urlsafe(18) for role in ROLES}
    roles.create(engine, passwords)
    grant(engine)
    url = make_url(database_url)
    return {
        role: url.set(username=role, password=password).render_as_string(hide_password=False)
        for role, password in passwords.items()
    }


def make_logins(
    servers: services.Services, databases: Mapping[str, str], environment: Mapping[str, str], console: Console
) -> Logins:
    """Make the users of RabbitMQ and Redis, as `idempotency broker-users` writes them for an application with this environment."""
    passwords = {kind: secrets.token_urlsafe(18) for kind in (*KINDS, "hints")}
    variables = {f"IDEMPOTENCY_BROKER_{kind.upper()}_PASSWORD": passwords[kind] for kind in KINDS}
    variables["IDEMPOTENCY_REDIS_HINTS_PASSWORD"] = passwords["hints"]
    has_rabbitmq = servers.broker == "rabbitmq"
    files = {"--redis": servers.directory / "users.acl"}
    if has_rabbitmq:
        files["--rabbitmq"] = servers.directory / "definitions.json"
    _run("broker-users", files, {**os.environ, **environment, **variables})
    servers.redis.add_users(files["--redis"].read_text())
    hints = _as(servers.redis_url, "idempotency_hints", passwords["hints"])
    if not has_rabbitmq:
        console.print("the broker was not started here, or is Redis: its address is that of all processes")
        return Logins(databases, dict.fromkeys(KINDS, servers.broker_url), hints)
    servers.rabbitmq.import_definitions(files["--rabbitmq"].read_bytes())
    brokers = {kind: _as(servers.broker_url, f"idempotency_{kind}", passwords[kind]) for kind in KINDS}
    return Logins(databases, brokers, hints)


def _run(command: str, files: Mapping[str, Path], environment: Mapping[str, str]) -> None:
    options = [str(part) for option in files.items() for part in option]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND_LINE, command, "-A", "tasks", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ProcessError(f"idempotency {command}: {done.stderr.strip()}")


def _as(url: str, user: str, password: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{user}:{password}@{parts.netloc.rpartition('@')[2]}").geturl()
