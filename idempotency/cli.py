"""`idempotency …`: what an operator does from a shell. Tables for people, `--json` for programs."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from typing import Annotated, Any

import typer
from celery import Celery
from celery.app.utils import find_app
from rich.console import Console
from rich.table import Table
from sqlalchemy.exc import OperationalError

from . import dead_letters, maintenance, schema
from .attempt import describe
from .errors import IdempotencyError
from .logs import log
from .outbox import Relay
from .runtime import Runtime

cli = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Operate celery-idempotency.")
letters = typer.Typer(no_args_is_help=True, help="What has ended without success and waits for a person.")
cli.add_typer(letters, name="dead-letters")
console = Console()

# The relay looks for dead holders this often: a killed worker's operations go on within 5 s on the same host.
DEATH_WATCH = 2.0

AppOption = Annotated[
    str, typer.Option("--app", "-A", envvar="CELERY_APP", help="The Celery application, as for celery -A.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@cli.command()
def migrate(app: AppOption = "tasks") -> None:
    """Bring the database's tables to this version."""
    revision = schema.migrate(Runtime.of(_app(app)).engine)
    console.print(f"database schema at revision {revision}")


@cli.command()
def relay(app: AppOption = "tasks") -> None:
    """Publish the outbox until stopped; also recovers what has lost its holder. Any number at once."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    celery = _app(app)
    with Runtime.of(celery).autocommit() as connection:
        schema.require_current(connection)
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())
    due = time.monotonic()

    def periodic() -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + DEATH_WATCH
            if recovered := maintenance.recover(celery):
                log.info("recovered", operations=recovered)

    log.info("relay_started")
    Relay(celery).run(stop, periodic)
    log.info("relay_stopped")


@cli.command()
def recover(app: AppOption = "tasks", as_json: JsonOption = False) -> None:
    """Release operations that have lost their holder, once."""
    _print_count("recovered", maintenance.recover(_app(app)), as_json)


@cli.command()
def purge(app: AppOption = "tasks", as_json: JsonOption = False) -> None:
    """Delete what is past its retention, once."""
    _print_count("purged", maintenance.purge(_app(app)), as_json)


@letters.command("list")
def list_letters(
    app: AppOption = "tasks",
    status: Annotated[str, typer.Option(help="open, replayed, discarded or all")] = "open",
    operation: Annotated[str | None, typer.Option(help="Only this task name.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000)] = 100,
    as_json: JsonOption = False,
) -> None:
    """The newest dead letters."""
    with Runtime.of(_app(app)).autocommit() as connection:
        rows = dead_letters.list_letters(
            connection, status=None if status == "all" else status, operation=operation, limit=limit
        )
    if as_json:
        print(json.dumps([_plain(row._asdict()) for row in rows]))  # noqa: T201
        return
    table = Table("id", "operation", "key", "reason", "attempts", "status", "failed at")
    for row in rows:
        table.add_row(
            str(row.id), row.operation, row.key, row.reason, str(row.attempts), row.status, f"{row.failed_at:%F %T}"
        )
    console.print(table)


@letters.command("show")
def show_letter(letter: int, app: AppOption = "tasks", as_json: JsonOption = False) -> None:
    """One dead letter with its errors; the payload only with --json."""
    with Runtime.of(_app(app)).autocommit() as connection:
        fields = _plain(dead_letters.show(connection, letter)._asdict())
    if as_json:
        print(json.dumps(fields))  # noqa: T201
        return
    table = Table("field", "value", show_header=False)
    for name, value in fields.items():
        if name not in ("payload", "headers") and value is not None:
            table.add_row(name, str(value))
    console.print(table)


@letters.command("replay")
def replay_letter(letter: int, app: AppOption = "tasks", as_json: JsonOption = False) -> None:
    """Send a dead letter again, under the same key."""
    with Runtime.of(_app(app)).engine.begin() as connection:
        id = dead_letters.replay(connection, letter)
    if as_json:
        print(json.dumps({"replayed": letter, "operation": id.operation, "key": id.key}))  # noqa: T201
    else:
        console.print(f"dead letter {letter} replayed: {id.operation} {id.key}")


def main() -> None:
    """Run the command line; an error is one line on stderr and exit status 1."""
    try:
        cli()
    except IdempotencyError as error:
        raise SystemExit(f"idempotency: {error}") from None
    except OperationalError as error:
        # SQLAlchemy's own text would show the address
        raise SystemExit(f"idempotency: the database did not answer: {describe(error)}") from None


def _app(name: str) -> Celery:
    try:
        return find_app(name)
    except (ImportError, AttributeError) as error:
        raise IdempotencyError(f"--app {name}: {error}") from None


def _print_count(what: str, count: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps({what: count}))  # noqa: T201
    else:
        console.print(f"{what}: {count}")


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value.isoformat() if hasattr(value, "isoformat") else value for name, value in fields.items()}


if __name__ == "__main__":
    main()
