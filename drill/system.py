"""A running system: servers, provider, workers, relay, beat, figures and Prometheus; and whether all is well in it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError

import httpx
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError

import services
from drill.receiver import Receiver
from drill.runbook import DIRECTORY as RUNBOOKS
from idempotency.store import schema
from sandbox import process as sandbox
from services import packages, process
from services.prometheus import Prometheus
from services.server import free_port

if TYPE_CHECKING:
    from celery import Celery

ROOT = Path(__file__).parent.parent
APP = "drill.application"
RULES = ROOT / "monitoring" / "rules.yml"
# Shorter than in production: what is measured begins with the alert.
TIMES = {
    "LEASE": "8",
    "HEARTBEAT": "2",
    "SWEEP": "2",
    "RESEND_AFTER": "3",
    "SIGN_OF_LIFE": "1",
    "ALARM_SILENCE": "5",
    "ALARM_UNCONSUMED": "2",
    "ALARM_ACCEPTED": "60",
    "ALERT_INTERVAL": "1",
    "UNKNOWN_TASK_GRACE": "4",
    "RETRY_BASE": "0.1",
    "RETRY_CAP": "1",
}
SILENCE = TIMES["ALARM_SILENCE"]
# Seconds: for Prometheus' patience, and for a process to start or stop.
PATIENCE, START, STOP = 3, 60.0, 15.0


class DrillError(RuntimeError):
    """The system does not come up, or does not become well again between two incidents."""


class System:
    """Everything that runs. Its processes end with it, or by the servers' watchdog."""

    def __init__(self, servers: services.Services, provider: str, receiver: Receiver) -> None:
        self.servers, self.provider = servers, provider
        self.directory = servers.directory
        self.hall_is_broken = self.directory / "hall-is-broken"
        database = servers.create_database("drill")
        engine = create_engine(database)
        schema.migrate(engine)
        engine.dispose()
        self.environment = {
            **{f"IDEMPOTENCY_{name}": value for name, value in TIMES.items()},
            **servers.environment(),
            "DATABASE_URL": database,
            "CELERY_APP": APP,
            "STRIPE_API_BASE": provider,
            "DRILL_HALL_IS_BROKEN": str(self.hall_is_broken),
            "IDEMPOTENCY_ENVIRONMENT": "drill",
            "IDEMPOTENCY_RUNBOOKS_AT": RUNBOOKS.as_uri(),
            "IDEMPOTENCY_ALERT_WEBHOOK_URL": receiver.webhook,
            "PROMETHEUS_MULTIPROC_DIR": str(self.directory / "counters"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            # for psql, as a superuser
            "PGHOST": "127.0.0.1",
            "PGPORT": str(servers.postgres.port),
            "PGUSER": "postgres",
            "PGPASSWORD": servers.postgres.password,
            "PGDATABASE": "postgres",
        }
        self._port = free_port()
        self._prometheus: Prometheus | None = None
        if packages.prometheus_program() is not None:
            self._prometheus = Prometheus(
                self.directory / "prometheus",
                rules=self._rules(),
                target=f"127.0.0.1:{self._port}",
                alertmanagers=[receiver.address],
                external_labels={"environment": "drill", "runbooks": RUNBOOKS.as_uri()},
                interval=2000,
            )
        self._application: Celery | None = None
        self._old: list[str] = []

    @property
    def has_prometheus(self) -> bool:
        return self._prometheus is not None

    @property
    def app(self) -> Celery:
        """The application, in this process: as a web server has it."""
        if self._application is None:
            os.environ.update(self.environment)
            from drill.application import app

            self._application = app
        return self._application

    def start(self) -> None:
        """Start what is not running, and wait until all is well."""
        for name, command in self._baseline().items():
            if process.find(self._record(name)) is None:
                self.launch(name, *command)
        if self._prometheus is not None and not self._prometheus.running:
            self._prometheus.start()
        self.wait_until_well()

    def launch(self, name: str, *command: str, **environment: str) -> None:
        """Start a process of the application under a name."""
        (self.directory / name).mkdir(exist_ok=True)
        process.launch(
            [sys.executable, *command],
            record=self._record(name),
            log=self.directory / name / "log",
            directory=ROOT,
            environment={**os.environ, **self.environment, **environment},
        )
        deadline = time.monotonic() + 10
        while process.find(self._record(name)) is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def launch_old(self, name: str, *command: str) -> None:
        """Start a process of version 1; `end_old` ends it."""
        self.launch(name, *command, DRILL_VERSION="1")
        self._old.append(name)

    def end_old(self) -> None:
        """End all processes of version 1."""
        while self._old:
            self.end(self._old.pop())

    def tell(self, name: str, which: signal.Signals) -> None:
        """Send a signal to a process and all its children."""
        if (found := process.find(self._record(name))) is not None:
            process.signal_all(process.family(found), which)

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End a process and its children."""
        if (found := process.find(self._record(name))) is not None:
            process.end(found, how, timeout=STOP)

    def stop(self) -> None:
        """End everything that was started here."""
        for name in ("beat", "relay", "metrics", *(path.parent.name for path in self.directory.glob("*-worker/pid"))):
            self.end(name)
        if self._prometheus is not None:
            self._prometheus.discard()

    def trouble(self) -> str | None:
        """What is not well, in words; None if all is. Looks at the system itself, and not at alerts."""
        from idempotency.application import settings_of
        from idempotency.store.overview import monitoring_connection
        from idempotency.upkeep import overview
        from idempotency.upkeep.alarms import lasting

        settings = settings_of(self.app)
        try:
            with monitoring_connection(settings) as connection:
                found = overview.take_snapshot(connection, self.app, settings)
        except DBAPIError as error:
            return f"Postgres: {type(error.orig).__name__}"
        open_work = {
            f"{task} {status}": number
            for task, by_status in found.operations.items()
            for status, number in by_status.items()
            if number
        }
        alive = {row.kind for row in found.processes if row.silent_seconds <= settings.alarm_silence}
        return next(
            filter(
                None,
                (
                    "Postgres takes no writes" if not found.takes_writes else None,
                    "the broker does not answer" if not found.broker_answered else None,
                    ", ".join(sorted({"worker", "relay", "beat"} - alive)),
                    ", ".join(alarm.name for alarm in lasting(found, settings)),
                    ", ".join(f"{row.letters} {row.reason}" for row in found.letters),
                    ", ".join(f"{number} {what}" for what, number in open_work.items()),
                    f"{found.outbox.pending} rows to send" if found.outbox.pending else None,
                ),
            ),
            None,
        )

    def wait_until_well(self, timeout: float = START) -> None:
        """Wait until all is well, also as Prometheus sees it. Raises `DrillError` with what is not."""
        deadline = time.monotonic() + timeout
        while (trouble := self.trouble() or self._fires()) is not None:
            if time.monotonic() > deadline:
                raise DrillError(f"not well after {timeout:.0f} s: {trouble}")
            time.sleep(0.3)

    def _fires(self) -> str | None:
        if self._prometheus is None:
            return None
        try:
            return ", ".join(sorted(set(self._prometheus.firing()) - {"Watchdog"})) or None
        except URLError as error:
            return f"Prometheus: {error.reason}"

    def add_person(self, name: str) -> str:
        """Add an admin; returns the token."""
        command = [sys.executable, "-m", "idempotency.cli", "operators", "add", name, "--role", "admin", "--as-owner"]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **self.environment}, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def fault(self, name: str, payment_id: str) -> None:
        """Let the provider's next call about a payment fail in this way."""
        about = {"next": [name], "only": {"purchase_id": payment_id}}
        httpx.post(f"{self.provider}/_sandbox/faults", json=about, timeout=5).raise_for_status()

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """A session of the application, committed at its end."""
        from sqlalchemy.orm import Session

        engine = create_engine(self.environment["DATABASE_URL"])
        try:
            with Session(engine) as session, session.begin():
                yield session
        finally:
            engine.dispose()

    def _baseline(self) -> Mapping[str, list[str]]:
        return {
            "shop-worker": _worker("shop", "shop"),
            "mail-worker": _worker("mail", "mail"),
            "relay": ["-m", "idempotency.cli", "relay"],
            "beat": ["-m", "celery", "-A", APP, "beat", "-s", str(self.directory / "schedule"), "--pidfile", ""],
            "metrics": ["-m", "idempotency.cli", "metrics", "--port", str(self._port)],
        }

    def _rules(self) -> str:
        """The rules as a team adapts them: what starts the servers here, and the times of this drill."""
        rules = RULES.read_text()
        for unit, name in (("rabbitmq-server", "rabbitmq"), ("postgresql", "postgres")):
            start = f"systemctl start {unit}"
            assert start in rules
            rules = rules.replace(start, f"python -m drill.start {name} {self.directory}")
        rules, changed = re.subn(r"(idempotency_last_sign_seconds[^<>\n]* [<>]) 60\b", rf"\1 {SILENCE}", rules)
        assert changed >= 3
        rules = re.sub(r"^( +for: )\w+$", rf"\g<1>{PATIENCE}s", rules, flags=re.MULTILINE)
        return re.sub(r"\[\d+m\]", "[10s]", rules)

    def _record(self, name: str) -> Path:
        return self.directory / name / "pid"


def _worker(name: str, queues: str) -> list[str]:
    options = ["--hostname", f"{name}@%h", "--queues", queues, "--concurrency", "2", "--loglevel", "WARNING"]
    return ["-m", "celery", "-A", APP, "worker", *options, "--without-mingle", "--without-gossip"]


@contextmanager
def running(receiver: Receiver, say: Callable[[str], None]) -> Iterator[System]:
    """The whole system, on servers of its own."""
    for variable in ("DATABASE_URL", "REDIS_URL", "BROKER_URL"):
        if os.environ.pop(variable, None):
            say(f"{variable} is ignored: this run breaks its servers, so it starts its own")
    with services.running() as servers:
        if servers.broker != "rabbitmq":
            raise DrillError("a drill needs RabbitMQ: install the package rabbitmq-server")
        with sandbox.running("provider", servers.directory / "provider") as provider:
            system = System(servers, provider.url, receiver)
            try:
                system.start()
                yield system
            finally:
                system.stop()
