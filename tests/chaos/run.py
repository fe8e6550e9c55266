"""One run: servers, application, traffic and faults, then quiet, then the ledgers are checked."""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from kombu import Connection as BrokerConnection
from rich.console import Console
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError

from idempotency.application import close_runtime
from idempotency.observe import metrics
from idempotency.store import schema
from tests.chaos import application, cluster_faults, ledgers
from tests.chaos.application import MANY_ATTEMPTS
from tests.chaos.attacks import ATTACKS
from tests.chaos.books import UNFINISHED, UNKNOWN, process_of
from tests.chaos.checker import Counts, Evidence, Findings, Id, Violation, check
from tests.chaos.checks.forged import REASONS as FORGED
from tests.chaos.edge import CRASHES, DECLINED
from tests.chaos.evidence import EDGE as EDGE_TASK
from tests.chaos.evidence import Accepted
from tests.chaos.expected import expected
from tests.chaos.faults import FAULTS
from tests.chaos.fleet import EDGE, Fleet
from tests.chaos.ledgers import Change
from tests.chaos.monitor import memory_kills, unexplained
from tests.chaos.people import WEIGHTS as COMMANDS
from tests.chaos.people import People
from tests.chaos.place import Place, alone, clustered
from tests.chaos.plan import WEIGHTS, Fault, plan
from tests.chaos.provider import FAULTS as PROVIDER_FAULTS
from tests.chaos.provider import Provider
from tests.chaos.report import LONG, Report, unproved
from tests.chaos.requests import STRUCK as REQUESTS_STRUCK
from tests.chaos.requests import Request, Requests
from tests.chaos.scene import Missed, Scene
from tests.chaos.shop import Shop
from tests.chaos.traffic import TENANTS, Traffic
from tests.chaos.verdict import announcements, messages_left, submitted, vanished

# Accepted and not ended: enough to keep every worker busy, few enough that the quiet afterwards is short.
WINDOW = 250
# Beyond the last attempt: the claim that ends the operation, and again for each time a fault kills that one.
SPARE_ATTEMPTS = 4
READY_WITHIN = 90.0
# A killed relay's rows are another one's after 30 s, and an unroutable one's pause grows to a minute.
QUIET_WITHIN = 120.0
# Of our metrics.
FENCED = "idempotency_fenced_writes_total"
# So long after the last operation that ended; a busy machine may need more for all of them, though not for ever.
QUIET_AT_MOST = 600.0
# After everything was healed: a lease, a server that starts, and the clients' own time limits.
ANSWERED_WITHIN = 90.0
STATUS_SECONDS = 10.0
# A long run goes on for so long at most until what it counts on has happened, and looks for it so often; what found nothing
# to hit is tried again after a pause.
OVERTIME, LOOK, TRY_AGAIN = 300.0, 10.0, 2.0
# After so long, and again, what is still open is said; so many of it.
SLOW_SECONDS, SHOWN = 30.0, 5


class NotHere(Exception):
    """The run needs what this machine does not have."""


@dataclass(frozen=True, slots=True)
class Options:
    """`rate` is accepted operations per second."""

    seconds: float
    seed: int
    workers: int = 4
    concurrency: int = 2
    relays: int = 2
    beats: int = 2
    callers: int = 2
    edges: int = 2
    rate: float = 30.0
    only: tuple[str, ...] = ()
    is_cluster: bool = False
    # Postgres' standby: then a promotion loses what was answered
    is_asynchronous: bool = False

    @property
    def kinds(self) -> Mapping[str, int]:
        """The kinds of faults, with their weights."""
        if not self.is_cluster:
            return WEIGHTS
        return {kind: weight for kind, weight in WEIGHTS.items() if kind not in cluster_faults.WITHOUT} | (
            cluster_faults.WEIGHTS
        )

    @property
    def lanes(self) -> Sequence[Collection[str]]:
        """The kinds that take the same servers."""
        return cluster_faults.LANES if self.is_cluster else ()

    @property
    def overtime(self) -> float:
        """How long it goes on at most if not all has happened; a short run may do without some, and one of some kinds proves nothing."""
        return OVERTIME if self.seconds >= LONG and not self.only else 0.0


def run(options: Options, console: Console) -> Report:
    """Start everything, let things go wrong for so many seconds, wait for quiet, check. Raises `NotHere`."""
    phases: dict[str, float] = {}
    with ExitStack() as stack:
        began = time.monotonic()
        # it stops, wipes and cuts its servers: they have to be its own
        servers = stack.enter_context(_own_servers(options))
        if servers.broker != "rabbitmq":
            raise NotHere("chaos needs a private RabbitMQ to freeze: install the package rabbitmq-server")
        phases["servers"] = time.monotonic() - began
        began = time.monotonic()
        stage = _Stage(servers, options, stack)
        try:
            stage.fleet.start()
            stage.fleet.wait_until_ready(READY_WITHIN)
            phases["start"] = time.monotonic() - began
            faults = plan(options.seed, options.seconds, options.only, options.kinds, options.lanes)
            weights = ", ".join(f"{kind} {weight}" for kind, weight in options.kinds.items())
            console.print(
                f"seed {options.seed}, {options.seconds:g} s, {len(faults)} faults planned; weights: {weights}"
            )
            began = time.monotonic()
            inflicted, missed = stage.storm(faults, console)
            phases["storm"] = time.monotonic() - began
            began = time.monotonic()
            stage.requests.finish(ANSWERED_WITHIN)
            phases["until answered"] = time.monotonic() - began
            open_work = stage.wait_for_quiet(console)
            phases["until quiet"] = time.monotonic() - began
            stage.fleet.stop()
            began = time.monotonic()
            findings = stage.check(open_work)
            phases["check"] = time.monotonic() - began
            report = stage.report(findings, inflicted, missed, phases)
        except Exception:
            console.print(f"logs: {keep_logs(servers.directory)}", highlight=False)
            raise
        if report.status or report.ended_by_themselves:
            report.logs = keep_logs(servers.directory)
        return report


def _own_servers(options: Options) -> AbstractContextManager[Place]:
    for variable in ("DATABASE_URL", "REDIS_URL", "BROKER_URL"):
        os.environ.pop(variable, None)
    return clustered(is_synchronous=not options.is_asynchronous) if options.is_cluster else alone()


class _Stage:
    """Everything that takes part, and what is known of it."""

    def __init__(self, servers: Place, options: Options, stack: ExitStack) -> None:
        self.servers, self.options = servers, options
        self.directory = servers.directory
        name = f"chaos_{os.getpid()}"
        database_url = servers.create_database(name)
        # straight to Postgres: what watches is not part of the storm
        self.engine = create_engine(database_url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
        stack.callback(self.engine.dispose)
        schema.migrate(self.engine.execution_options(isolation_level="READ COMMITTED"))
        with self.engine.connect() as connection:
            connection.exec_driver_sql(application.TABLES)
        ledgers.install(self.engine, application.BUSINESS)
        self.provider = Provider(options.seed)
        stack.callback(self.provider.close)
        proxies = servers.proxies
        zones = servers.environments(database_url)
        crash_directory, self.metrics = self.directory / "crash", self.directory / "metrics"
        (crash_directory / CRASHES).mkdir(parents=True)
        self.metrics.mkdir()
        # without the library's own variable: this process must not count among the application's
        environment = {
            **zones[0],
            "CHAOS_QUEUE": "chaos",
            "IDEMPOTENCY_MESSAGE_SECRETS": secrets.token_hex(32),
        }
        shop_name = f"chaos_shop_{os.getpid()}"
        shop_url = servers.create_database(shop_name)
        shop_engine = create_engine(shop_url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
        stack.callback(shop_engine.dispose)
        self.shop = Shop(
            stack,
            self.directory,
            shop_engine,
            environment | servers.environments(shop_url)[0],
            seed=options.seed,
            seconds=options.seconds,
        )
        application.configure(environment)
        stack.callback(close_runtime, application.app)
        self.submitting = create_engine(environment["DATABASE_URL"], connect_args={"connect_timeout": 5})
        stack.callback(self.submitting.dispose)
        self.fleet = Fleet(
            self.directory / "processes",
            environment | {"PROMETHEUS_MULTIPROC_DIR": str(self.metrics), "CRASH_DIRECTORY": str(crash_directory)},
            workers=options.workers,
            concurrency=options.concurrency,
            relays=options.relays,
            beats=options.beats,
            callers=options.callers,
            edges=options.edges,
            shop=self.shop.environment,
            shop_port=self.shop.port,
            zones=zones,
        )
        stack.callback(self.fleet.stop)
        self.scene = Scene(
            servers,
            self.fleet,
            proxies["postgres"],
            proxies["redis"],
            proxies["broker"],
            servers.broker_url,
            self.engine,
            crash_directory,
            self.shop.crashes,
            self.shop.queues,
            shop_engine,
            self.shop.webhooks_url,
            self.provider.url,
            environment["CHAOS_QUEUE"],
        )
        self.traffic = Traffic(
            self.submitting,
            seed=options.seed,
            rate=options.rate,
            url=self.provider.url,
            may_go_on=lambda: self.open < WINDOW,
        )
        self.requests = Requests(
            [member.url for member in self.fleet.of(EDGE)],
            TENANTS,
            seed=options.seed,
            url=self.provider.url,
        )
        stack.callback(self.requests.give_up)
        self.people = People(application.app, seed=options.seed, url=self.provider.url)
        self.open = 0
        self._killed_before = memory_kills()

    # ------------------------------------------------------------ the storm

    def storm(self, faults: Sequence[Fault], console: Console) -> tuple[Counter[str], Counter[str]]:
        """Traffic and faults for as long as the run is to last; returns what took place, and what was missed."""
        inflicted: Counter[str] = Counter()
        missed: Counter[str] = Counter()
        known = FAULTS | ATTACKS | (cluster_faults.FAULTS if self.options.is_cluster else {})
        over = threading.Event()
        began = time.monotonic()

        def inflict(fault: Fault) -> None:
            while not over.is_set():
                try:
                    what = known[fault.kind](self.scene, fault.target)
                    inflicted[fault.kind] += 1
                except Missed as error:
                    missed[fault.kind] += 1
                    what = f"missed: {error}"
                except Exception as error:
                    missed[fault.kind] += 1
                    what = f"not done: {type(error).__name__}: {error}"
                console.print(f"  {fault.second:6.1f} s  {fault.kind}: {what}", highlight=False, markup=False)
                # what has never hit is tried again, by each that was planned, until one of them has
                if inflicted[fault.kind]:
                    return
                over.wait(TRY_AGAIN)

        self.traffic.start()
        self.requests.start()
        self.people.start()
        self.shop.start()
        # each by its own clock: looking waits for a Postgres that is away
        threads = [threading.Timer(fault.second, inflict, (fault,)) for fault in faults]
        for thread in threads:
            thread.daemon = True
            thread.start()
        next_status, end = STATUS_SECONDS, self.options.seconds
        most = end + self.options.overtime
        while True:
            if (now := time.monotonic() - began) >= end:
                if end >= most or not (lacking := self._lacking(inflicted)):
                    break
                console.print(f"  {now:6.1f} s  goes on: {'; '.join(lacking)}", highlight=False, markup=False)
                end = min(now + LOOK, most)
            self._look()
            if now >= next_status:
                next_status += STATUS_SECONDS
                console.print(f"  {now:6.1f} s  {self._status()}", highlight=False)
            time.sleep(0.05)
        over.set()
        self.requests.stop()
        self.traffic.stop()
        self.people.stop()
        self.shop.stop()
        for thread in threads:
            thread.join(60)
        self.scene.heal()
        if self.options.is_cluster:
            cluster_faults.heal(self.scene)
        return inflicted, missed

    def wait_for_quiet(self, console: Console) -> list[str]:
        """Wait until all that was accepted has ended and the queues are empty; what is open when nothing moves any more."""
        began = time.monotonic()
        quiet, next_status, ended, moved = 0, SLOW_SECONDS, -1, 0.0
        while (now := time.monotonic() - began) < min(moved + QUIET_WITHIN, QUIET_AT_MOST):
            if (number := self.scene.ask(_ENDED)[0][0] + self.shop.ended()) != ended:
                ended, moved = number, now
            # twice, because a message between queue and worker is in neither
            is_open = self.shop.open_work() or self._open_work()
            quiet = quiet + 1 if not is_open and not self._waiting() else 0
            if is_open and now >= next_status:
                next_status += SLOW_SECONDS
                shown = "; ".join(is_open[:SHOWN])
                console.print(f"  open after {now:.0f} s: {len(is_open)}: {shown}", highlight=False, markup=False)
            if quiet == 2:
                return []
            time.sleep(0.5)
        return self._open_work() + self.shop.open_work() or [
            f"{number} messages in {name}" for name, number in self._waiting().items()
        ]

    def _lacking(self, inflicted: Mapping[str, int]) -> list[str]:
        """What the run counts on and has not seen yet, by the ledgers as they are now."""
        counters = metrics.totals(self.metrics)
        try:
            struck = self._struck(ledgers.read(self.engine), counters) | self.shop.struck()
        except DBAPIError:
            return ["Postgres is away"]
        # what the checker alone can count is not looked for now
        counts = Counts(accepted=1, completed=1, takeovers=1, fenced=counters.get(FENCED, 0))
        return unproved(self.options.seconds, inflicted, counts, struck, self.options.kinds)

    def _look(self) -> None:
        self.open = self.scene.ask(_OPEN)[0][0]

    def _status(self) -> str:
        tally = self.traffic.tally
        requests = f"{len(self.requests.answers)} of {len(self.requests.sent)} requests answered"
        return (
            f"{len(tally.certain)} accepted, {tally.unknown} unknown, {tally.copies} copies sent, {requests}, "
            f"{self.open} open; {self.shop.status()}"
        )

    def _open_work(self) -> list[str]:
        return [row[0] for row in self.scene.ask(_OPEN_WORK)]

    def _waiting(self) -> dict[str, int]:
        return messages_left(self.servers.broker_url)

    # ------------------------------------------------------------ the verdict

    def _asked(self, id: Id, request: Request) -> Accepted:
        """What a request is to come to. A client may be told that its payment was declined; then the provider must not have acted."""
        answers = self.requests.answers.get(id, [])
        whole = replace(expected(*id, request.account, request.amount), once_claimed=not answers)
        if request.kind == "paid" and any(answer.status == DECLINED for answer in answers):
            return replace(whole, rows=(), acts=0, status=DECLINED)
        return whole

    def check(self, open_work: Sequence[str]) -> Findings:
        """Read the ledgers; nothing is running any more. `open_work` is what did not come to an end in its time: each a violation."""
        accepted = submitted(self.engine)
        # a refused request has left no row that accepts it, and one that was never answered may have no record
        asked = [self._asked(id, request) for id, request in self.requests.sent.items()]
        findings = check(
            Evidence(
                self.engine,
                [*accepted, *asked],
                acts=dict(self.provider.acts),
                amounts=dict(self.provider.amounts),
                queues=self._waiting(),
                tenants=frozenset(TENANTS),
                revoked=frozenset(Id(id.tenant, id.task, id.key) for id in self.people.revoked),
                answers=self.requests.answers,
                # it had its time: what is open now stays open
                drained=True,
                max_attempts=MANY_ATTEMPTS,
                spare_attempts=SPARE_ATTEMPTS,
                fenced=metrics.totals(self.metrics).get(FENCED, 0),
            )
        )
        # without what clients have asked for: these rows are what was committed
        known = {each.id for each in accepted}
        gone = vanished([*self.traffic.tally.certain, *self.requests.certain], known)
        kept = [
            Violation("I3", "/".join(id), "not answered as carried out, and the row that accepts it is there")
            for id in known & (self.requests.answers.keys() - set(self.requests.certain))
        ]
        of_shop, self.shop_struck = self.shop.check()
        believed = [Violation("forged", "a message", what) for what in self.scene.believed]
        # what the shop has left, its own check says
        own = [what for what in open_work if not what.startswith("shop: ")]
        stuck = [Violation("I2", "a run", f"not over in its time: {what}") for what in own]
        refused = [Violation("traffic", "a submission", what) for what in self.traffic.tally.refused]
        more = (
            *believed,
            *stuck,
            *refused,
            *gone,
            *kept,
            *announcements(self.engine, accepted),
            *self.requests.violations,
            *of_shop,
        )
        # accepted, by what its submitter was told, and in no ledger that is left
        counts = findings.counts
        counts = replace(counts, accepted=counts.accepted + len(gone), lost=counts.lost + len(gone))
        return Findings((*findings.violations, *more), counts, findings.changes)

    def report(
        self,
        findings: Findings,
        inflicted: Mapping[str, int],
        missed: Mapping[str, int],
        phases: dict[str, float],
    ) -> Report:
        counters = metrics.totals(self.metrics)
        struck = self._struck(findings.changes, counters) | self.shop_struck
        problems = unproved(self.options.seconds, inflicted, findings.counts, struck, self.options.kinds)
        tally = self.traffic.tally
        if killed := memory_kills() - self._killed_before:
            problems.append(f"the kernel has killed {killed} processes for want of memory")
        if tally.copies < len(tally.certain):
            problems.append(f"only {tally.copies} copies of {len(tally.certain)} messages")
        report = Report(
            self.options.seed,
            self.options.seconds,
            inflicted,
            missed,
            findings.counts,
            [
                *findings.violations,
                *unexplained(self.fleet.ended_by_themselves),
                *(Violation("people", "a command", what) for what in self.people.surprises),
            ],
            problems,
            struck=struck,
            counters=counters,
            traffic={name: getattr(tally, name) for name in ("committed", "unknown", "copies", "unsent")}
            | {"requests": len(self.requests.sent), "copies of requests": self.requests.tally["copies"]},
            phases={name: round(seconds, 1) for name, seconds in phases.items()},
            versions=self._versions(),
            ended_by_themselves=self.fleet.ended_by_themselves,
            is_cluster=self.options.is_cluster,
            is_asynchronous=self.options.is_asynchronous,
        )
        for violation in findings.violations:
            report.histories.setdefault(violation.key, findings.history(violation))
        return report

    def _struck(self, changes: Sequence[Change], counters: Mapping[str, int]) -> dict[str, int]:
        """What has to have happened besides the faults of the plan, each with how often it did."""
        codes: Counter[str] = Counter()
        eager = broken = undone = refunded = taken_over = refused = forged = 0
        for change in changes:
            old, new = change.old or {}, change.new or {}
            if change.book == "records" and new.get("status") == "failed" and old.get("status") != "failed":
                codes[json.loads(new["error"])["code"]] += 1
            eager += change.book == "records" and change.writer in self.fleet.callers
            broken += change.book == "dead_letters" and not old and new["reason"] == "on_failed_error"
            undone += change.book == "reversals"
            forged += change.book == "dead_letters" and not old and new["reason"] in FORGED
            if change.book == "records" and new.get("task") == EDGE_TASK:
                # by the next request, or by recovery, which only lets go
                started = old.get("status") == "started" and new["token"] != old["token"]
                replaced = new["status"] == "started" or change.writer != process_of(old.get("locked_by"))
                taken_over += started and new["status"] in ("started", "released") and replaced
                refused += new["status"] == "completed" and new["response_code"] >= 400
            refunded += change.book == "reversals" and new["account"].endswith("/pay")
        struck = {name: self.provider.struck[name] for name in PROVIDER_FAULTS}
        struck |= {f"commands to {name}": self.people.done[name] for name in (*COMMANDS, "resolve and end")}
        struck |= {"eager writes": eager, "broken on_failed": broken, "rejected copies": self.traffic.tally.rejected}
        struck |= {f"ends as {code}": codes[code] for code in (UNKNOWN, UNFINISHED, "cancelled", "revoked")}
        struck |= {name: counters.get(f"idempotency_{name}_total", 0) for name in ("deferrals", "busy")}
        struck |= {"undone steps": undone, "refunds": refunded, "forged messages refused": forged}
        struck |= {name: self.requests.tally[name] for name in REQUESTS_STRUCK}
        struck |= {"requests taken over": taken_over, "requests refused": refused}
        return struck

    def _versions(self) -> dict[str, str]:
        packages = ("celery", "kombu", "amqp", "sqlalchemy", "psycopg", "redis")
        found = {"python": platform.python_version()} | {name: version(name) for name in packages}
        with self.engine.connect() as connection:
            found["postgres"] = str(connection.exec_driver_sql("SHOW server_version").scalar_one())
        with BrokerConnection(self.servers.broker_url, connect_timeout=5) as broker:
            broker.connect()
            found["rabbitmq"] = str(broker.connection.server_properties.get("version"))
        return found


_OPEN = """
SELECT (SELECT count(*) FROM idempotency.records WHERE status IN ('started', 'released'))
     + (SELECT count(*) FROM idempotency.outbox WHERE settled_at IS NULL)
"""
_ENDED = "SELECT count(*) FROM idempotency.records WHERE status IN ('completed', 'failed')"
_OPEN_WORK = """
SELECT task || ' ' || tenant || ' ' || key || ': ' || status FROM idempotency.records
WHERE status IN ('started', 'released')
UNION ALL
SELECT 'outbox row ' || id || ' of ' || task || ' ' || key || ': ' || status || coalesce(' ' || last_error, '')
FROM idempotency.outbox WHERE settled_at IS NULL
"""


def keep_logs(directory: Path) -> Path:
    """Copy the logs of all processes and servers to where they outlive the private directory."""
    kept = Path(tempfile.mkdtemp(prefix="chaos-"))
    for log in [*directory.glob("*/log"), *directory.glob("processes/*/log")]:
        shutil.copyfile(log, kept / f"{log.parent.name}.log")
    return kept
