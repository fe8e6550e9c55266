"""`idempotency …`: what an operator does from a shell. Tables for people, `--json` for programs."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer
from prometheus_client import start_http_server
from rich.markup import escape
from rich.table import Column, Table
from sqlalchemy.exc import DBAPIError, OperationalError

from . import dead_letters, maintenance, metrics, operators, records, schema
from .attempt import describe
from .doctor import Level
from .doctor import doctor as diagnose
from .errors import IdempotencyError, SettingsError
from .logs import log
from .operator_commands import ActorOption
from .operator_commands import commands as operator_commands
from .reconcile import reconcile
from .relay import Relay
from .runtime import Runtime
from .terminal import AppOption, JsonOption, console, print_json
from .terminal import application as _app

cli = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Operate celery-idempotency.")
letters = typer.Typer(no_args_is_help=True, help="What has ended without success and waits for a person.")
cli.add_typer(operator_commands)
cli.add_typer(letters, name="dead-letters")

# The relay looks for dead holders this often: a killed worker's operations go on within 5 s on the same host.
DEATH_WATCH = 2.0


@cli.command()
def migrate(app: AppOption = "tasks", as_json: JsonOption = False) -> None:
    """Bring the database's tables to this version."""
    revision = schema.migrate(Runtime.of(_app(app)).engine)
    if as_json:
        print_json({"revision": revision})
    else:
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
    sweep = Runtime.of(celery).settings.sweep
    running = Relay(celery)
    due = {"recover": time.monotonic(), "reconcile": time.monotonic() + sweep}

    def periodic() -> None:
        now = time.monotonic()
        if now >= due["recover"]:
            due["recover"] = now + DEATH_WATCH
            if recovered := maintenance.recover(celery):
                log.info("recovered", operations=recovered)
        if now >= due["reconcile"]:
            due["reconcile"] = now + sweep
            reconcile(celery, running.publisher.depth)

    log.info("relay_started")
    running.run(stop, periodic)
    log.info("relay_stopped")


@cli.command()
def doctor(app: AppOption = "tasks", as_json: JsonOption = False) -> None:
    """Look for what would lose work or do it twice. Exit status 1 if there is any."""
    findings = diagnose(_app(app))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))  # noqa: T201
    else:
        table = Table("", *(Column(name, overflow="fold") for name in ("what", "found", "what to do or why")))
        colours = {Level.REFUSAL: "red", Level.WARNING: "yellow", Level.OK: "green"}
        for finding in findings:
            cells = (finding.subject, finding.found, finding.advice)
            table.add_row(f"[{colours[finding.level]}]{finding.level}[/]", *map(escape, cells))
        console.print(table)
    if any(finding.level is Level.REFUSAL for finding in findings):
        raise typer.Exit(1)


@cli.command("metrics")
def serve_metrics(
    port: Annotated[int, typer.Option(min=1, max=65535)] = 9540,
    address: Annotated[str, typer.Option(help="Where to listen; there is no password.")] = "127.0.0.1",
) -> None:
    """Serve what all processes with the same PROMETHEUS_MULTIPROC_DIR have counted, for Prometheus, until stopped."""
    if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        raise SettingsError("PROMETHEUS_MULTIPROC_DIR: not set; workers, relays and this need the same directory there")
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())
    try:
        server, thread = start_http_server(port, address, registry=metrics.of_all_processes())
    except OSError as error:
        raise SettingsError(f"--address {address} --port {port}: {error.strerror or error}") from None
    console.print(f"metrics at http://{address}:{port}/metrics")
    stop.wait()
    server.shutdown()
    thread.join()


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
def replay_letter(
    letter: int,
    actor: ActorOption,
    reason: Annotated[str, typer.Option(help="Why; kept in the audit table.")] = "replay",
    app: AppOption = "tasks",
    as_json: JsonOption = False,
) -> None:
    """Send a dead letter again, under the same key."""
    change = operators.Change(actor, reason)
    with Runtime.of(_app(app)).engine.begin() as connection:
        id = dead_letters.replay(connection, letter)
        row = records.read_locked(connection, id)
        operators.audit(connection, change, "replay", id, row, details={"dead_letter": letter})
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
    except DBAPIError as error:
        raise SystemExit(f"idempotency: the database refused: {describe(error)}") from None


def _print_count(what: str, count: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps({what: count}))  # noqa: T201
    else:
        console.print(f"{what}: {count}")


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value.isoformat() if hasattr(value, "isoformat") else value for name, value in fields.items()}


if __name__ == "__main__":
    main()
