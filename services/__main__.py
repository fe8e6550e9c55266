"""``python -m services up | down | status | env``: the servers for development, kept in var/services; `kafka`: one in memory."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table

from services.local import NEEDS, Services, provide
from services.server import Server, ServiceError

STATE = Path(__file__).parent.parent / "var" / "services"

app = typer.Typer(help="Postgres, Redis and RabbitMQ for development.", add_completion=False, no_args_is_help=True)


@app.command()
def up() -> None:
    """Start the servers that are not running, with the data of earlier runs."""
    with _exclusive():
        provide()
        services = _services()
        began = time.monotonic()
        services.start()
        given = "" if len(services.servers) == len(NEEDS) else ", the others are given in the environment"
        names = ", ".join(server.name for server in services.servers.values()) or "nothing"
        print(f"running: {names} ({time.monotonic() - began:.1f} s){given}")


@app.command()
def down() -> None:
    """Stop what `up` started; the data is kept."""
    with _exclusive():
        # given={}: stop servers that were started here even if their address is set in the environment now.
        services = Services(STATE, given={})
        stopped = [server.name for server in services.servers.values() if server.running]
        services.stop()
        print(f"stopped: {', '.join(stopped) or 'nothing was running'}")


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array instead of a table.")] = False,
) -> None:
    """Show each server: its state, its pid, and its address without the password."""
    services = _services()
    rows = [_row(services, name) for name in NEEDS]
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("service", "state", "pid", "address")
    colours = {"running": "green", "given": "cyan", "silent": "red", "stopped": "yellow"}
    for row in rows:
        colour = colours[str(row["state"])]
        table.add_row(str(row["service"]), f"[{colour}]{row['state']}[/]", str(row["pid"] or ""), str(row["address"]))
    Console().print(table)


@app.command()
def env() -> None:
    """Print the addresses as export lines, for eval "$(python -m services env)"."""
    services = _services()
    for server in services.servers.values():
        if not server.running:
            raise ServiceError(f"{server.name} is not running; start it with: make up")
    for name in sorted(set(NEEDS) - set(services.servers)):
        print(f"{name}: not from here; its address is set in the environment, and stays", file=sys.stderr)
    for variable, address in services.environment().items():
        print(f"export {variable}={shlex.quote(address)}")


@app.command()
def kafka(
    topic: Annotated[list[str], typer.Option(metavar="NAME:PARTITIONS", help="A topic to make; may be given again.")],
) -> None:
    """A Kafka in memory for trying streams out, until it is interrupted: prints its address. Needs the extra `services`."""
    topics = {}
    for each in topic:
        name, _, many = each.rpartition(":")
        if not name or not many.isdecimal() or int(many) == 0:
            raise typer.BadParameter(f"{each!r}: NAME:PARTITIONS, as orders:3", param_hint="--topic")
        topics[name] = int(many)
    try:
        from services.kafka import KafkaCluster
    except ModuleNotFoundError as error:
        raise ServiceError(f"{error.name} is not installed: pip install '.[services]'") from None
    cluster = KafkaCluster()
    for name, partitions in topics.items():
        cluster.create_topic(name, partitions)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    print(cluster.servers, flush=True)
    ended.wait()
    cluster.close()


def _services() -> Services:
    """Those of the state directory. An address that `env` has put into this shell is not another server's."""
    ours = Services(STATE, given={}).environment().items() if STATE.exists() else ()
    return Services(STATE, given=dict(os.environ.items() - ours))


def _row(services: Services, name: str) -> dict[str, str | int | None]:
    server = services.servers.get(name)
    if server is None:
        given = {"postgres": "database_url", "redis": "redis_url", "rabbitmq": "broker_url"}
        return {"service": name, "state": "given", "pid": None, "address": _public(getattr(services, given[name]))}
    pid = server.pid if server.running else None
    return {"service": server.name, "state": _state(server), "pid": pid, "address": _public(server.url)}


def _state(server: Server) -> str:
    if not server.running:
        return "stopped"
    return "running" if server.answers() else "silent"


def _public(address: str) -> str:
    """The address without user, password and options, which may also contain a password."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@contextmanager
def _exclusive() -> Iterator[None]:
    """Two concurrent `up` would each start servers."""
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    try:
        app()
    except ServiceError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
