"""One run, from starting the servers to the verdict."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from rich.console import Console
from sqlalchemy import Engine, create_engine, text

import services
from demo.faults import CARRIER_FAULTS, MAIL_FAULTS, PROVIDER_FAULTS, Faults, faults_option
from demo.flows import Engines, Options, Orders, Payments
from demo.input import Intake
from demo.logins import check_unused, make_logins, make_roles
from demo.processes import Processes
from demo.progress import Counted, Counter, Display
from demo.report import Report
from idempotency.store import schema
from idempotency.store.rights import APPLICATION, OPERATOR
from sandbox import ledger
from sandbox import process as sandbox
from sandbox.process import Sandbox
from services.server import free_port
from tasks.migrate import migrate

if TYPE_CHECKING:
    from demo.submission import Submission

# Shorter than in production, so that recovery from the faults fits into the run.
TIMES = {
    "IDEMPOTENCY_LEASE": "15",
    "IDEMPOTENCY_HEARTBEAT": "5",
    "IDEMPOTENCY_SWEEP": "5",
    "IDEMPOTENCY_RESEND_AFTER": "5",
    # Only with Redis as the broker: a killed worker's messages come back after this.
    "BROKER_VISIBILITY_TIMEOUT": "20",
    "STRIPE_TIMEOUT": "2",
    "CARRIER_TIMEOUT": "2",
    # Unlike Stripe's, the sandbox's search does not lag.
    "STRIPE_SEARCH_LAG": "0.2",
}
# Every charge is accepted, and decided some time later.
UNDECIDED = {"undecided": 1.0, "decision_ms": 300.0}
BATCH = 20
# Smaller for a short file, or all of it would be accepted before the first fault.
WINDOW_SHARE, LEAST_WINDOW = 0.2, 20
PAUSE = 0.05
# Longer than any deferral or back-off in the run: without any change for this long, nothing more will happen.
STALLED_SECONDS = 90.0


class Stalled(Exception):
    """An accepted operation does not end; the message lists what is open."""


class Webhooks(NamedTuple):
    """Where the provider sends its webhooks: to a server of the application on this port."""

    port: int
    secret: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/webhooks/stripe"

    @property
    def environment(self) -> dict[str, str]:
        """No charge is asked about, unless a webhook says that it is decided."""
        return {"STRIPE_WEBHOOK_SECRETS": self.secret, "STRIPE_FIRST_POLL": "3600"}


class Stopwatch:
    """How long each phase took, in seconds."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = time.monotonic() - began


def run(intake: Intake, options: Options, console: Console) -> Report:
    """Start everything, submit every line, inject the faults, wait until all work has ended, and compare the ledgers.

    Raises `ProcessError` and `services.ServiceError`. If anything is wrong, the logs are kept and their path is printed.
    """
    watch = Stopwatch()
    flow = Orders(intake, options) if options.flow == "orders" else Payments(intake, options)
    if os.environ.pop("REDIS_URL", None):
        console.print("REDIS_URL is ignored: this run wipes its Redis, so it starts its own")
    with ExitStack() as stack:
        with watch.phase("servers"):
            servers = stack.enter_context(services.running())
        check_unused(servers)
        broker = "redis" if urlsplit(servers.broker_url).scheme.startswith("redis") else "rabbitmq"
        console.print(f"servers: Postgres, Redis, {broker}; faults: {faults_option(PROVIDER_FAULTS | MAIL_FAULTS)}")
        console.print(f"shorter times than in production: {', '.join(f'{k}={v}' for k, v in TIMES.items())}")
        directory = servers.directory
        with watch.phase("tables and sandboxes"):
            seed = str(options.seed)
            webhooks = Webhooks(free_port(), secrets.token_hex(16)) if options.webhooks else None
            provider_options = [
                "--seed",
                seed,
                "--faults",
                faults_option(PROVIDER_FAULTS | (UNDECIDED if webhooks else {})),
            ]
            if webhooks:
                provider_options += ["--webhook-url", webhooks.url, "--webhook-secret", webhooks.secret]
            provider = stack.enter_context(sandbox.running("provider", directory / "provider", *provider_options))
            mail = stack.enter_context(
                sandbox.running("mail", directory / "mail", "--seed", seed, "--faults", faults_option(MAIL_FAULTS))
            )
            carrier = Sandbox(
                "carrier", directory / "carrier", "--seed", seed, "--faults", faults_option(CARRIER_FAULTS)
            )
            if options.flow == "orders":
                stack.callback(carrier.stop)
                carrier.start()
            # A separate database, because the check accounts for every row.
            name = f"demo_{os.getpid()}"
            database_url = servers.create_database(name)
            stack.callback(servers.drop_database, name)
            with suppress(services.ServiceError):  # a server given in the environment has only that address
                database_url = servers.postgres.nearest_url(name)
            engine = create_engine(database_url, hide_parameters=True)
            stack.callback(engine.dispose)
            schema.migrate(engine)
            migrate(engine)
            urls = make_roles(servers, engine, database_url, console)
            # what the run itself looks at: all tenants, like an operator
            looking = create_engine(urls[OPERATOR], hide_parameters=True)
            stack.callback(looking.dispose)
            submitting = create_engine(urls[APPLICATION], hide_parameters=True)
            stack.callback(submitting.dispose)
        counters = directory / "metrics"
        counters.mkdir()
        environment = {
            **servers.environment(),
            **TIMES,
            "DATABASE_URL": database_url,
            "STRIPE_API_BASE": provider.url,
            "SMTP_URL": mail.url,
            "IDEMPOTENCY_MESSAGE_SECRETS": secrets.token_hex(32),
            "PROMETHEUS_MULTIPROC_DIR": str(counters),
            **({"CARRIER_URL": carrier.url} if options.flow == "orders" else {}),
            **(webhooks.environment if webhooks else {}),
        }
        logins = make_logins(servers, urls, environment, console)
        processes = Processes(directory, environment, logins.environment)
        stack.callback(processes.stop)
        try:
            with watch.phase("start of the application"):
                victim, *_ = [processes.start_worker() for _ in range(options.workers)]
                processes.start_relay()
                processes.start_beat()
                if webhooks:
                    processes.start_server(webhooks.port)
                os.environ.update({**environment, **logins.environment("application")})
                submission = flow.start(Engines(engine, looking, submitting), processes, carrier.url)
                stack.callback(submission.close)
            faults = Faults(processes, victim, servers.redis_url, lambda: submission.wipe_broker(servers.broker_url))
            display = Display(console, flow.bars)
            work = _Work(intake, flow, submission, Counter(looking, flow.count), processes, faults, display)
            problems: list[str] = []
            with display:
                try:
                    with watch.phase("submitting"):
                        work.submit()
                        for event in submission.events:
                            display.event(event)
                    with watch.phase("until quiet"):
                        work.wait_for_quiet()
                except Stalled as stalled:
                    # Go on: the ledgers show what is missing.
                    problems.append(str(stalled))
            with watch.phase("stop of the application"):
                processes.stop()
            with watch.phase("check"):
                by_webhook = _told(looking, provider.data, problems) if webhooks else None
                report = flow.report(
                    looking,
                    {"provider": provider.data, "mail": mail.data, "carrier": carrier.data},
                    counters,
                    broker=broker,
                    started=options.started,
                    events=faults.events,
                    problems=problems + [f"did not take place: {name}" for name in faults.missing],
                    phases=watch.phases,
                    by_webhook=by_webhook,
                )
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt | SystemExit):
                console.print(f"logs: {processes.keep_logs()}", highlight=False)
            raise
        if not report.agrees:
            console.print(f"logs: {processes.keep_logs()}", highlight=False)
        return report


def _told(engine: Engine, provider: Path, problems: list[str]) -> int:
    """How many charges and declines a webhook has told of; adds to the problems if one was not told."""
    query = """SELECT charge_id FROM payment_events
        WHERE object = 'charge' AND state IN ('succeeded', 'failed') AND is_applied"""
    with engine.connect() as connection:
        told = set(connection.execute(text(query)).scalars())
    if missing := {charge.id for charge in ledger.read(provider).charges} - told:
        problems.append(f"charges that no webhook has told of: {len(missing)}")
    return len(told)


class _Work:
    """Submits as fast as operations end, and injects the faults when they are due."""

    def __init__(
        self,
        intake: Intake,
        flow: Payments | Orders,
        submission: Submission,
        counter: Counter,
        processes: Processes,
        faults: Faults,
        display: Display,
    ) -> None:
        self._intake = intake
        self._submission = submission
        self._counter = counter
        self._processes = processes
        self._faults = faults
        self._display = display
        self._lines = flow.lines
        self._window = max(LEAST_WINDOW, min(flow.window, int(WINDOW_SHARE * self._lines)))
        self._to_come = 0
        self._last: Counted | None = None
        self._changed_at = time.monotonic()

    def submit(self) -> None:
        """Submit every line, with at most a window of operations and events in progress."""
        for batch in self._intake.batches(min(BATCH, self._window // 2)):
            self._submission.submit(batch)
            while self._under_way(self._look()) > self._window - BATCH // 2:
                time.sleep(PAUSE)

    def wait_for_quiet(self) -> None:
        """Wait until every operation has ended, every message has left the outbox, and the queues are empty."""
        quiet = 0
        while quiet < 2:
            counts = self._look()
            done = not (self._under_way(counts) or counts.open or counts.pending or self._to_come)
            # Twice, because a message on its way from the queue to a worker is not counted.
            quiet = quiet + 1 if done and not self._submission.messages_waiting() else 0
            time.sleep(4 * PAUSE)

    def _look(self) -> Counted:
        counts = self._counter.look()
        accepted, refused = self._submission.accepted, self._intake.refused_lines
        for event in self._faults.take(counts.ended, self._lines - refused):
            self._display.event(event)
        self._to_come = self._submission.go_on()
        self._processes.check()
        self._display.show(counts, accepted=accepted, refused=refused)
        if counts != self._last:
            self._last, self._changed_at = counts, time.monotonic()
        elif time.monotonic() - self._changed_at > STALLED_SECONDS:
            still_open = self._counter.open_work() or [f"{self._submission.messages_waiting()} messages in the queues"]
            raise Stalled(f"no change for {STALLED_SECONDS:.0f} s; still open:\n  " + "\n  ".join(still_open))
        return counts

    def _under_way(self, counts: Counted) -> int:
        """Accepted operations that have not ended, and their events that have not been handled."""
        return self._submission.accepted - counts.ended + counts.events_expected - counts.events_handled
