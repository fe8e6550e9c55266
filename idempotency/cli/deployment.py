"""`idempotency migrate, relay, doctor, metrics, recover, purge`: what a deployment runs."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import Annotated

import typer
from celery import Celery
from rich.markup import escape
from rich.table import Column, Table
from sqlalchemy.exc import OperationalError

from ..application import runtime_of, settings_of
from ..checks.broker import require_broker_address
from ..checks.doctor import doctor as diagnose
from ..checks.findings import Level
from ..checks.postgres import require_all_tenants
from ..checks.startup import require_safe_setup
from ..environment import environment, role_passwords
from ..errors import SettingsError
from ..extras import extra
from ..observe import metrics, outages
from ..observe.logs import log
from ..observe.outages import Pauses
from ..observe.unreachable import reason
from ..store import partitioning, roles, schema
from ..store.connections import make_migrations_engine
from ..text import number_of
from ..upkeep import maintenance, objects
from ..upkeep.loops import run_relay
from .options import AppOption, JsonOption
from .terminal import application, console, errors, log_to_stderr, plain, print_json, print_line, stopped_by_signals

commands = typer.Typer()


@commands.command()
def migrate(
    app: AppOption = "",
    with_roles: Annotated[
        bool,
        typer.Option(
            "--roles",
            help="Also make the database roles, their rights and row-level security. IDEMPOTENCY_APPLICATION_PASSWORD, "
            "…_RELAY_…, …_OPERATOR_…, …_READ_ONLY_… and …_OWNER_… let a role log in.",
        ),
    ] = False,
    partitioned: Annotated[
        str | None,
        typer.Option(
            help="Also put the records into partitions by creation, one for each hour, day or week. There is no way back.",
            metavar="hour|day|week",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Bring the database's tables to this version."""
    if partitioned is not None:
        partitioning.require_width(partitioned)
    engine = make_migrations_engine(settings_of(application(app)))
    with errors.status("changing the tables; what runs goes on"):
        revision = schema.migrate(engine)
        if partitioned is not None:
            partitioning.partition(engine, partitioned)
        else:
            partitioning.renew(engine)
        done = roles.create(engine, role_passwords()) if with_roles else []
    if as_json:
        width = {} if partitioned is None else {"partitioned": partitioned}
        print_json({"revision": revision} | width | ({"statements": done} if with_roles else {}))
    else:
        console.print(f"database schema at revision {revision}")
        if partitioned is not None:
            console.print(f"records in partitions, one for each {partitioned}")
        if done:
            console.print(
                f"roles, rights and row-level security: {number_of(len(done), 'statement')}, which --json shows"
            )


@commands.command()
def relay(app: AppOption = "") -> None:
    """Publish the outbox until stopped; also recover, resend, store dead letters, alert and purge. Run any number."""
    celery = application(app)
    celery.loader.import_default_modules()  # the check looks at its tasks
    unanswered = require_safe_setup(celery)
    log_to_stderr()
    stop = stopped_by_signals()
    require_broker_address(celery)
    _wait_for_postgres(celery, stop, unanswered)
    log.info("relay_started")
    run_relay(celery, stop)
    log.info("relay_stopped")


def _wait_for_postgres(celery: Celery, stop: threading.Event, unanswered: str | None) -> None:
    """Return once the set-up is checked against the database, which may be starting. Raises `SystemExit` for what waiting cannot fix."""
    pauses = Pauses()
    while not stop.is_set():
        if unanswered is None:
            try:
                with runtime_of(celery).autocommit() as connection:
                    schema.require_compatible(connection)
                    require_all_tenants(connection)
                return
            except OperationalError as error:
                unanswered = reason(error)
        if outages.postgres.is_news():
            log.warning("postgres_unavailable", error=unanswered)
        stop.wait(pauses.next())
        unanswered = require_safe_setup(celery)


@commands.command()
def doctor(
    app: AppOption = "",
    problems: Annotated[bool, typer.Option("--problems", help="Leave out what is as it should be.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check for anything that would lose work, do it twice or expose it. Exit status 1 if there is."""
    findings = [each for each in diagnose(application(app)) if not (problems and each.level is Level.OK)]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    elif not findings:
        print_line("no problems")
    else:
        table = Table("", *(Column(name, overflow="fold") for name in ("what", "found", "what to do or why")))
        colours = {Level.REFUSAL: "red", Level.WARNING: "yellow", Level.OK: "green"}
        for finding in findings:
            cells = map(plain, (finding.subject, finding.found, finding.advice))  # names in them come from elsewhere
            table.add_row(f"[{colours[finding.level]}]{finding.level}[/]", *map(escape, cells))
        console.print(table)
    if any(finding.level is Level.REFUSAL for finding in findings):
        raise typer.Exit(1)


@commands.command("metrics")
def serve_metrics(
    port: Annotated[int, typer.Option(min=1, max=65535)] = 9540,
    address: Annotated[str, typer.Option(help="Where to listen; there is no password.")] = "127.0.0.1",
    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            "-A",
            envvar="CELERY_APP",
            show_default=False,
            help="Also serve the backlog and the workers of this Celery application.",
        ),
    ] = None,
) -> None:
    """Serve what all processes with the same PROMETHEUS_MULTIPROC_DIR have counted, for Prometheus, until stopped."""
    if (directory := environment().prometheus_multiproc_dir) is None:
        raise SettingsError(
            "PROMETHEUS_MULTIPROC_DIR: not set; workers, relays and this command need the same directory there"
        )
    directory.mkdir(parents=True, exist_ok=True)  # whichever process is started first
    counted = metrics.combined_registry()
    with extra("metrics"):
        from prometheus_client import start_http_server

        from ..upkeep.backlog import Backlog
    if app:
        counted.register(Backlog(application(app)))
    stop = stopped_by_signals()
    try:
        server, thread = start_http_server(port, address, registry=counted)
    except OSError as error:
        raise SettingsError(f"--address {address} --port {port}: {error.strerror or error}") from None
    console.print(f"metrics at http://{address}:{port}/metrics")
    stop.wait()
    server.shutdown()
    thread.join()


@commands.command()
def recover(app: AppOption = "", as_json: JsonOption = False) -> None:
    """Release operations that have lost their holder, once."""
    _print_count("recovered", maintenance.recover(application(app)), as_json)


@commands.command()
def purge(app: AppOption = "", as_json: JsonOption = False) -> None:
    """Delete what is past its retention, once, and large results that nothing refers to."""
    celery = application(app)
    _print_count("purged", maintenance.purge(celery), as_json)
    objects.sweep(celery)


def _print_count(what: str, count: int, as_json: bool) -> None:
    if as_json:
        print_json({what: count})
    else:
        console.print(f"{what}: {count}")
