"""One rollout: older code under load, the schema, the newest code zone by zone, a bad release and its way back; then the books.

The processes, the traffic, the provider and the checker are those of the chaos suite. Nothing is killed: what is measured
is what a release costs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from uuid import uuid4

from rich.console import Console
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError

from idempotency.application import close_runtime
from idempotency.store import schema
from services import process
from tests.chaos import application as chaos
from tests.chaos import ledgers
from tests.chaos.application import MANY_ATTEMPTS
from tests.chaos.checker import Evidence, Violation, check
from tests.chaos.fleet import BEAT, RELAY, RESTART_PAUSE, WORKER, Fleet, Member
from tests.chaos.monitor import unexplained
from tests.chaos.place import ZONES, Clustered, clustered
from tests.chaos.provider import Provider
from tests.chaos.run import SPARE_ATTEMPTS, keep_logs
from tests.chaos.traffic import SHARES, TENANTS, Traffic
from tests.chaos.verdict import announcements, messages_left, submitted, vanished
from tests.rollout import application, releases
from tests.rollout.waits import Wait, waits

APP = "tests.rollout.application"
OLD, NEW, BAD, BACK = "older", "newest", application.BAD, "older again"
# What ends by its first attempt, or by one more: how long others take is a matter of their pauses. The rest deposits.
KINDS = ("transfer", "announce", "ordered", "event", "waited", "deferred", "refused", "changed", "refunded")
# Open at once, at most: a machine that is behind is not what is measured.
WINDOW = 24
WORKERS, RELAYS, BEATS = 4, 2, 2
READY_WITHIN, QUIET_WITHIN = 120.0, 240.0
LOOK = 0.5
# What says that a process has begun its work.
READY = {WORKER: " ready.", RELAY: "relay_started", BEAT: " is starting."}

_OPEN = """
SELECT (SELECT count(*) FROM idempotency.records WHERE status IN ('started', 'released'))
     + (SELECT count(*) FROM idempotency.outbox WHERE settled_at IS NULL)
"""
_DELETE_UNPUBLISHED = """
DELETE FROM idempotency.outbox o WHERE status = 'pending' AND NOT EXISTS (
    SELECT FROM idempotency.records r WHERE (r.tenant, r.task, r.key) = (o.tenant, o.task, o.key))
"""


@dataclass(frozen=True, slots=True)
class Options:
    """`since`: what `releases.commit_of` takes. `rate` and `lease`: accepted operations per second, and seconds."""

    since: str
    seed: int = 1
    rate: float = 10.0
    lease: float = 60.0
    # for each part of the rollout
    seconds: float = 8.0
    # empty, or `delayed`: workers die at once and are away for longer than a lease; or `lost`: a release throws away what
    # waits to be published
    control: str = ""


class NotReady(Exception):
    """A release whose processes did not come to work in time; the message names one."""


@dataclass
class Result:
    """What has become of all operations. `ended`: how many were ended by which release on which schema."""

    lease: float
    # what a control has to be reported as: `delayed` or `lost`
    control: str = ""
    accepted: int = 0
    lost: int = 0
    doubled: int = 0
    slowest: Sequence[Wait] = ()
    violations: Sequence[Violation] = ()
    ended: Counter[str] = field(default_factory=Counter)
    # attempts that failed because of the bad release
    broken: int = 0
    parts: Sequence[tuple[str, datetime]] = ()
    # what nothing was accepted of
    missing: Sequence[str] = ()
    logs: Path | None = None

    @property
    def delayed(self) -> list[Wait]:
        """What took longer than a lease."""
        return [each for each in self.slowest if each.seconds > self.lease]

    @property
    def problems(self) -> list[str]:
        """Why a run without a violation would prove nothing."""
        wanted = (f"{OLD}, older tables", f"{OLD}, newest tables", f"{NEW}, newest tables", f"{BACK}, newest tables")
        found = [f"nothing was ended by: {each}" for each in wanted if not self.ended[each]]
        found += [f"nothing was accepted of: {each}" for each in self.missing]
        return found + ([] if self.broken else ["no attempt failed because of the bad release"])

    @property
    def status(self) -> int:
        """0: nothing lost, doubled or delayed; 1: something was; 2: nothing was proved. A control: 0 if it was seen, else 2."""
        if self.control:
            # an operation of which a row was deleted may have run by another delivery: the row is what was lost
            unsent = [each for each in self.violations if each.invariant == "I21" and "unsent" in each.what]
            return 0 if {"delayed": self.delayed, "lost": unsent}[self.control] else 2
        if self.violations or self.lost or self.doubled or self.delayed:
            return 1
        return 2 if self.problems else 0

    def line(self, seconds: float) -> str:
        """The last line of a run."""
        slowest = self.slowest[0].seconds if self.slowest else 0.0
        control = f"control={self.control} " if self.control else ""
        return (
            f"RESULT rollout cluster=1 {control}operations={self.accepted} lost={self.lost} doubled={self.doubled} "
            f"delayed={len(self.delayed)} slowest_seconds={slowest:.1f} lease={self.lease:g} "
            f"violations={len(self.violations)} seconds={seconds:.0f}"
        )


def run(options: Options, console: Console) -> Result:
    """Carry out one rollout. Raises `NoHistory`, `NotReady`, `ServiceError` and `TimeoutError`."""
    for variable in ("DATABASE_URL", "REDIS_URL", "BROKER_URL"):
        os.environ.pop(variable, None)
    commit = releases.commit_of(options.since)
    with ExitStack() as stack:
        servers = stack.enter_context(clustered(is_synchronous=True))
        older = releases.unpack(commit, servers.directory / "older")
        console.print(f"older code: {commit[:12]}, of schema {releases.revision_of(older)}", highlight=False)
        rollout = Rollout(servers, options, older, console, stack)
        try:
            rollout.run()
            result = rollout.judge()
        except Exception:
            console.print(f"logs: {keep_logs(servers.directory)}", highlight=False)
            raise
        if result.status:
            result.logs = keep_logs(servers.directory)
        return result


class Rollout:
    """The processes of a run, and what is known of them."""

    def __init__(self, servers: Clustered, options: Options, older: Path, console: Console, stack: ExitStack) -> None:
        self.servers, self.options, self.older, self.console = servers, options, older, console
        name = f"rollout_{os.getpid()}"
        database_url = servers.create_database(name)
        self.engine = create_engine(database_url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
        stack.callback(self.engine.dispose)
        self.provider = Provider(options.seed)
        stack.callback(self.provider.close)
        zones = dict(zip(ZONES, servers.environments(database_url), strict=True))
        self._addresses = {releases.ROOT: zones, older: zones}
        if not releases.knows_clusters(older):
            # one address each, as of a proxy that leads to the primary: nothing fails over here
            single = {
                "DATABASE_URL": servers.servers.postgres.primary.url.rpartition("/")[0] + f"/{name}",
                "REDIS_URL": servers.redis_url,
            }
            nodes = zip(ZONES, servers.servers.rabbitmq.nodes, strict=False)
            self._addresses[older] = {zone: {**single, "BROKER_URL": node.url} for zone, node in nodes}
        environment = {
            **zones[ZONES[0]],
            "CHAOS_QUEUE": "rollout",
            "IDEMPOTENCY_MESSAGE_SECRETS": uuid4().hex * 2,
            "ROLLOUT_LEASE": f"{options.lease:g}",
        }
        self._environment = {**os.environ, **environment}
        # the last time; and first with the code that is there: the tables that it knows, and the ledgers over them
        self.migrated = datetime.now(UTC)
        self.migrate(older)
        with self.engine.connect() as connection:
            connection.exec_driver_sql(chaos.TABLES)
        ledgers.install(self.engine, chaos.BUSINESS)
        # callers are of the newest code from the beginning: it has to run on the tables of before
        chaos.configure(environment)
        application.configure(options.lease)
        stack.callback(close_runtime, chaos.app)
        submitting = create_engine(environment["DATABASE_URL"], connect_args={"connect_timeout": 5})
        stack.callback(submitting.dispose)
        self.fleet = Fleet(
            servers.directory / "processes",
            environment,
            workers=WORKERS,
            concurrency=2,
            relays=RELAYS,
            beats=BEATS,
            callers=0,
            zones=[{"ZONE": zone, **self._addresses[older][zone]} for zone in ZONES],
            deployed=False,
        )
        stack.callback(self.fleet.stop)
        for member in self.fleet.members:
            member.application, member.root = APP, older
        self.traffic = Traffic(
            submitting,
            seed=options.seed,
            rate=options.rate,
            url=self.provider.url,
            may_go_on=lambda: self.open < WINDOW,
            shares={kind: SHARES[kind] for kind in KINDS},
            rare={},
        )
        self.open = 0
        # rows of operations and deliveries, and messages
        self.left = (0, 0)
        self.parts: list[tuple[str, datetime]] = []
        # which release each process is of
        self._release: dict[int, str] = {}
        self._named: dict[str, str] = {member.name: OLD for member in self.fleet.members}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="looking", daemon=True)
        stack.callback(self._stop.set)

    def run(self) -> None:
        """The whole rollout, until all that was accepted has ended, or nothing moves any more."""
        self.fleet.start()
        self.fleet.wait_until_ready(READY_WITHIN)
        self._thread.start()
        self.traffic.start()
        self.part("older code alone")
        self.part("the schema, while older code runs", self.migrate, releases.ROOT)
        self.release(NEW, releases.ROOT, (RELAY, WORKER, BEAT))
        if self.options.control == "delayed":
            self.part("a control: all workers die, and are away for longer than a lease", self.kill_workers)
        if self.options.control == "lost":
            self.part("a control: what nobody has published or claimed yet is deleted", self.delete_unpublished)
        self.part("newest code alone")
        self.release(BAD, releases.ROOT, (WORKER,), zones=ZONES[:1])
        self.release(BACK, self.older, (WORKER, RELAY, BEAT))
        self.part("older code again, on the newest tables")
        self.traffic.stop()
        self.wait_for_quiet()
        self._stop.set()
        self._thread.join()
        self.fleet.stop()

    # ------------------------------------------------------------ the parts

    def part(self, what: str, act: Callable[..., object] = lambda: None, *arguments: object) -> None:
        """One part of the rollout, which takes its time under load."""
        self.parts.append((what, datetime.now(UTC)))
        tally = self.traffic.tally
        self.console.print(f"{what}: {len(tally.certain)} accepted, {self.open} open", highlight=False, markup=False)
        act(*arguments)
        time.sleep(self.options.seconds)

    def migrate(self, root: Path) -> None:
        """What an operator does first: the command of the code that is deployed."""
        command = [sys.executable, "-m", "idempotency.cli", "migrate", "-A", APP]
        environment = {**self._environment, **self._addresses[root][ZONES[0]], "PYTHONPATH": str(root)}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=READY_WITHIN)
        if done.returncode != 0:
            raise RuntimeError(f"migrate failed: {done.stderr.strip()[-500:]}")
        self.migrated = datetime.now(UTC)

    def release(self, name: str, root: Path, kinds: Sequence[str], *, zones: Sequence[str] = ZONES) -> None:
        """Replace these processes, one zone after the other, each kind once those before it work."""
        for kind in kinds:
            for zone in zones:
                members = [each for each in self.fleet.of(kind) if each.zone["ZONE"] == zone]
                self.part(f"{name} release: {kind} in zone {zone}", self._replace, name, root, members)

    def _replace(self, name: str, root: Path, members: Sequence[Member]) -> None:
        starts = {member.name: member.starts for member in members}
        for member in members:
            self._named[member.name] = name
            addresses = self._addresses[root][member.zone["ZONE"]]
            self.fleet.release(member, root, {"ROLLOUT_RELEASE": name, **addresses})
        deadline = time.monotonic() + READY_WITHIN
        for member in members:
            while member.starts == starts[member.name] or not _is_ready(member):
                if time.monotonic() > deadline:
                    raise NotReady(f"{member.name} of the {name} release is not ready after {READY_WITHIN:g} s")
                time.sleep(0.1)

    def kill_workers(self) -> None:
        """SIGKILL, and nothing takes over for longer than a lease."""
        for member in self.fleet.of(WORKER):
            member.pause = self.options.lease + 5.0
            if (running := member.running) is not None:
                process.end(running, signal.SIGKILL, timeout=5)
        time.sleep(self.options.lease + 5.0)
        for member in self.fleet.of(WORKER):
            member.pause = RESTART_PAUSE

    def delete_unpublished(self) -> None:
        """As a migration might that takes the outbox for a cache."""
        deadline = time.monotonic() + READY_WITHIN
        with self.engine.connect() as connection:
            while not connection.exec_driver_sql(_DELETE_UNPUBLISHED).rowcount:
                if time.monotonic() > deadline:
                    return  # it shows nothing, and says so at the end
                time.sleep(0.01)

    def wait_for_quiet(self) -> None:
        """Return once all has ended twice in a row, or after its time; `self.left` is how much is left then."""
        self.parts.append(("until quiet", datetime.now(UTC)))
        deadline, quiet = time.monotonic() + QUIET_WITHIN, 0
        while quiet < 2 and time.monotonic() < deadline:
            self.left = self._ask(), sum(messages_left(self.servers.broker_url).values())
            quiet = 0 if any(self.left) else quiet + 1
            time.sleep(LOOK)

    # ------------------------------------------------------------ what is seen

    def _look(self) -> None:
        """Count what is open, and note of which release each process is, for as long as the run lasts."""
        while not self._stop.wait(LOOK):
            try:
                self.open = self._ask()
            except DBAPIError:
                continue
            sessions = {member.pid: self._named[member.name] for member in self.fleet.members}
            for entry in Path("/proc").glob("[0-9]*"):
                pid = int(entry.name)
                try:
                    session = os.getsid(pid)
                except OSError:
                    continue
                if session in sessions:
                    self._release.setdefault(pid, sessions[session])

    def _ask(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.exec_driver_sql(_OPEN).scalar_one())

    # ------------------------------------------------------------ the verdict

    def judge(self) -> Result:
        """Read the ledgers; nothing is running any more."""
        accepted = submitted(self.engine)
        findings = check(
            Evidence(
                self.engine,
                accepted,
                acts=dict(self.provider.acts),
                amounts=dict(self.provider.amounts),
                queues=messages_left(self.servers.broker_url),
                tenants=frozenset(TENANTS),
                # it had its time: what is open now stays open
                drained=True,
                max_attempts=MANY_ATTEMPTS,
                spare_attempts=SPARE_ATTEMPTS,
            )
        )
        known = {each.id for each in accepted}
        gone = vanished(self.traffic.tally.certain, known)
        counts = findings.counts
        counts = replace(counts, accepted=counts.accepted + len(gone), lost=counts.lost + len(gone))
        slowest = waits(findings.changes, known)
        violations = [
            *findings.violations,
            *gone,
            *announcements(self.engine, accepted),
            *unexplained(self.fleet.ended_by_themselves),
            # nothing is killed here, so that every submission has an answer
            *(Violation("traffic", "a submission", what) for what in self.traffic.tally.refused),
        ]
        if unknown := self.traffic.tally.unknown:
            violations.append(Violation("traffic", "submissions", f"{unknown} without an answer"))
        if any(self.left):
            rows, messages = self.left
            violations.append(Violation("I2", "a run", f"not over in its time: {rows} rows, {messages} messages"))
        with self.engine.connect() as connection:
            revision = schema.current_revision(connection)
        if revision != releases.revision_of(releases.ROOT):
            violations.append(Violation("schema", "the database", f"is of {revision} at the end"))
        return Result(
            lease=self.options.lease,
            control=self.options.control,
            accepted=counts.accepted,
            lost=counts.lost,
            doubled=counts.doubled,
            slowest=slowest,
            violations=violations,
            ended=self._ended(slowest),
            broken=sum(
                change.book == "records" and application.BROKEN in str(change.row.get("error"))
                for change in findings.changes
            ),
            parts=self.parts,
            missing=[kind for kind in KINDS if not self.traffic.tally.kinds[kind]],
        )

    def _ended(self, found: Sequence[Wait]) -> Counter[str]:
        """How many operations were ended by which release on which tables."""
        ended: Counter[str] = Counter()
        for each in found:
            pid = each.ended_by.removeprefix("pid ")
            name = self._release.get(int(pid), "unknown") if pid.isdecimal() else "unknown"
            at = each.accepted.timestamp() + each.seconds
            tables = "newest tables" if at > self.migrated.timestamp() else "older tables"
            ended[f"{name}, {tables}"] += 1
        return ended


def _is_ready(member: Member) -> bool:
    text = member.log.read_bytes()[member.log_start :].decode(errors="replace")
    return READY[member.kind] in text


def shown(result: Result) -> Mapping[str, str]:
    """Tables of a run for people, by their titles."""
    return {
        "slowest": "; ".join(map(str, result.slowest[:5])),
        "slowest of what each part accepted": "; ".join(
            f"{part} {seconds:.1f}" for part, seconds in slowest_of_parts(result.parts, result.slowest).items()
        ),
        "attempts of the bad release": str(result.broken),
        "ended by": ", ".join(f"{name} {number}" for name, number in sorted(result.ended.items())),
    }


def slowest_of_parts(parts: Sequence[tuple[str, datetime]], found: Sequence[Wait]) -> dict[str, float]:
    """Seconds of the slowest operation that was accepted in each part, in the order of the parts."""
    slowest: dict[str, float] = {}
    for (part, began), following in zip_longest(parts, parts[1:]):
        ended = following[1] if following is not None else None
        own = [each.seconds for each in found if each.accepted >= began and (ended is None or each.accepted < ended)]
        if own:
            slowest[part] = max(own)
    return slowest
