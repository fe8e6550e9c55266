"""`idempotency migrate, relay, doctor, metrics, recover, purge`: what a deployment runs."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
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
from ..checks.startup import require_safe_setup
from ..checks.unreachable import WRONG_ADDRESS, reason
from ..environment import environment, role_passwords
from ..errors import SettingsError
from ..extras import extra
from ..letters.consumer import DeadLetterConsumer
from ..observe import metrics, outages
from ..observe.logs import log
from ..observe.outages import Pauses
from ..relay.relay import Relay
from ..relay.resend import resend_lost
from ..store import roles, schema
from ..store.connections import make_migrations_engine
from ..store.statements import is_news
from ..upkeep import alarms, alerts, maintenance
from ..upkeep.presence import SignOfLife
from .options import AppOption, JsonOption
from .terminal import application as _app
from .terminal import console, print_json

commands = typer.Typer()

# How often upkeep checks whether anything is due.
UPKEEP_PAUSE = 1.0
# How often the relay checks for dead holders: a killed worker's operations go on within 5 s on the same host.
DEATH_WATCH = 2.0
# How often it checks for something to alert about; each service and reason also keeps to alert_interval.
ALERT_WATCH = 5.0
# How often it purges, and how many rows at a time; while there are more, it goes on without a pause.
PURGE_WATCH = 60.0
PURGE_LIMIT = 5_000


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
    as_json: JsonOption = False,
) -> None:
    """Bring the database's tables to this version."""
    engine = make_migrations_engine(settings_of(_app(app)))
    revision = schema.migrate(engine)
    done = roles.create(engine, role_passwords()) if with_roles else []
    if as_json:
        print_json({"revision": revision} | ({"statements": done} if with_roles else {}))
    else:
        console.print(f"database schema at revision {revision}")
        for statement in done:
            console.print(statement, markup=False, highlight=False, soft_wrap=True)


@commands.command()
def relay(app: AppOption = "") -> None:
    """Publish the outbox until stopped; also recover, resend, store dead letters, alert and purge. Run any number."""
    celery = _app(app)
    celery.loader.import_default_modules()  # the check looks at its tasks
    unanswered = require_safe_setup(celery)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())
    require_broker_address(celery)
    _wait_for_postgres(celery, stop, unanswered)
    log.info("relay_started")
    run_relay(celery, stop)
    log.info("relay_stopped")


def run_relay(celery: Celery, stop: threading.Event) -> None:
    """Run the relay's three loops until `stop` is set: publishing, dead letters, upkeep.

    Each has its own thread, so that a slow alert receiver, a waiting `on_failed` or a long purge delays neither messages
    nor each other. If one of them hangs, the relay gives no more signs of life, which other relays notice.
    """
    sweep = runtime_of(celery).settings.sweep
    running, life = Relay(celery), SignOfLife(celery, "relay")
    due = {"recover": time.monotonic(), "resend": time.monotonic() + sweep}

    def between_passes() -> None:
        life.progressed(loop="publishing")
        now = time.monotonic()
        if now >= due["recover"]:
            due["recover"] = now + DEATH_WATCH
            if recovered := maintenance.recover(celery):
                log.info("recovered", operations=recovered)
        if now >= due["resend"]:
            due["resend"] = now + sweep
            resend_lost(celery, publisher=running.publisher)

    letters, progressed = DeadLetterConsumer(celery), partial(life.progressed, loop="letters")
    threads = [
        threading.Thread(target=letters.run, args=(stop, progressed), daemon=True),
        threading.Thread(target=_upkeep, args=(celery, stop, partial(life.progressed, loop="upkeep")), daemon=True),
    ]
    for thread in threads:
        thread.start()
    life.start()
    running.run(stop, between_passes)
    patience = time.monotonic() + 10
    for thread in threads:
        thread.join(max(patience - time.monotonic(), 0))
    life.end()


def _upkeep(celery: Celery, stop: threading.Event, progressed: Callable[[], object]) -> None:
    """Send alerts, raise alarms and purge until `stop` is set."""
    alert_at = purge_at = time.monotonic()
    pauses = Pauses()
    while not stop.is_set():
        progressed()
        now, pause = time.monotonic(), UPKEEP_PAUSE
        try:
            if now >= alert_at:
                alert_at = now + ALERT_WATCH
                alerts.run_once(celery)
                alarms.run_once(celery)
            if now >= purge_at:
                purge_at = now + PURGE_WATCH
                if maintenance.purge_once(celery, limit=PURGE_LIMIT).more:
                    purge_at = now
            pauses.end()
        except OperationalError as error:
            pause = pauses.next()
            if is_news(error):
                log.warning("postgres_unavailable", error=type(error.orig).__name__)
        except Exception:  # an unexpected error must not end the thread
            log.exception("upkeep_failed")
        stop.wait(pause)


def _wait_for_postgres(celery: Celery, stop: threading.Event, unanswered: str | None) -> None:
    """Return once the set-up is checked against the database, which may be starting. Raises what waiting cannot fix."""
    pauses = Pauses()
    while not stop.is_set():
        if unanswered is None:
            try:
                with runtime_of(celery).autocommit() as connection:
                    schema.require_compatible(connection)
                return
            except OperationalError as error:
                unanswered = reason(error)
        if unanswered in WRONG_ADDRESS:
            raise SettingsError(f"idempotency_database_url: {unanswered}")
        if outages.postgres.is_news():
            log.warning("postgres_unavailable", error=unanswered)
        stop.wait(pauses.next())
        unanswered = require_safe_setup(celery)


@commands.command()
def doctor(app: AppOption = "", as_json: JsonOption = False) -> None:
    """Check for anything that would lose work or do it twice. Exit status 1 if there is."""
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


@commands.command("metrics")
def serve_metrics(
    port: Annotated[int, typer.Option(min=1, max=65535)] = 9540,
    address: Annotated[str, typer.Option(help="Where to listen; there is no password.")] = "127.0.0.1",
    app: Annotated[
        str | None,
        typer.Option("--app", "-A", help="Also serve the backlog and the workers of this Celery application."),
    ] = None,
) -> None:
    """Serve what all processes with the same PROMETHEUS_MULTIPROC_DIR have counted, for Prometheus, until stopped."""
    if environment().prometheus_multiproc_dir is None:
        raise SettingsError(
            "PROMETHEUS_MULTIPROC_DIR: not set; workers, relays and this command need the same directory there"
        )
    counted = metrics.combined_registry()
    with extra("metrics"):
        from prometheus_client import start_http_server

        from ..upkeep.backlog import Backlog
    if app is not None:
        counted.register(Backlog(_app(app)))
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())
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
    _print_count("recovered", maintenance.recover(_app(app)), as_json)


@commands.command()
def purge(app: AppOption = "", as_json: JsonOption = False) -> None:
    """Delete what is past its retention, once."""
    _print_count("purged", maintenance.purge(_app(app)), as_json)


def _print_count(what: str, count: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps({what: count}))  # noqa: T201
    else:
        console.print(f"{what}: {count}")
