"""The processes of the application, old code beside new, and the orchestrator that starts them again when they end.

Whatever ends is started again after a moment, for whatever reason it ended, as an orchestrator does, and nothing else is
done for a process by hand.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from services import process
from tests.chaos.monitor import Ended, last_words

ROOT = Path(__file__).parent.parent.parent
# Before and after a deploy.
SHOP = "tests.chaos.shop_application"
OLD, NEW = "tests.chaos.old_application", "tests.chaos.application"
# About as long as an orchestrator takes to notice and to schedule.
RESTART_PAUSE = 0.5
# What is told to end and does not is killed after this time.
GRACE = 20.0
WATCH = 0.1

WORKER, RELAY, BEAT, CALLER, EDGE = "worker", "relay", "beat", "caller", "edge"
SHOP_WORKER, SHOP_RELAY, SHOP_EDGE = "shop-worker", "shop-relay", "shop-edge"
SHOP_WORKERS, SHOP_QUEUES = 2, "payments,refunds,orders,notifications,webhooks"
# The first of each begins with the old code.
DEPLOYED = (WORKER, RELAY)


@dataclass
class Member:
    """One process that is started again, however often it ends."""

    name: str
    kind: str
    directory: Path
    arguments: list[str]
    application: str = NEW
    # what its environment has in addition to that of all
    zone: Mapping[str, str] = field(default_factory=dict)
    # below which its code is
    root: Path = ROOT
    # how long it is away once it has ended
    pause: float = RESTART_PAUSE
    # where it listens; None: nowhere
    port: int | None = None
    pid: int = 0
    # where the log of the present process begins
    log_start: int = 0
    starts: int = 0
    # when to start it again, and when to kill it because it was told to end, by the monotonic clock
    due: float | None = None
    overdue: float | None = None
    # how it ended each time: an exit status, or minus the signal
    ends: list[int] = field(default_factory=list)

    @property
    def command(self) -> list[str]:
        """What is run, with the code that is deployed."""
        if self.kind == CALLER:
            return [sys.executable, "-m", "tests.chaos.caller"]
        if self.kind == EDGE:
            listening = ["--port", str(self.port), "--log-level", "warning"]
            return [sys.executable, "-m", "uvicorn", "tests.chaos.edge:app", *listening]
        if self.kind == SHOP_EDGE:
            listening = ["--port", str(self.port), "--log-level", "warning"]
            return [sys.executable, "-m", "uvicorn", "--factory", "api.application:create_app", *listening]
        if self.kind in (RELAY, SHOP_RELAY):
            return [sys.executable, "-m", "idempotency.cli", "relay", "-A", self.application]
        return [sys.executable, "-m", "celery", "-A", self.application, *self.arguments]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def record(self) -> Path:
        return self.directory / "pid"

    @property
    def running(self) -> psutil.Process | None:
        return process.find(self.record)


class Fleet:
    """Workers, relays, beats, callers and web servers, each in its own session. Their records and logs are below `directory`."""

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        *,
        workers: int,
        concurrency: int,
        relays: int,
        beats: int,
        callers: int,
        edges: int = 0,
        shop: Mapping[str, str] | None = None,
        shop_port: int | None = None,
        zones: Sequence[Mapping[str, str]] = ({},),
        deployed: bool = True,
    ) -> None:
        # `deployed`: the first of some kinds begin with older code of the application
        # which addresses the members have, in turns; the shop is in the first zone
        self._zones = zones
        self._environment = {**os.environ, **environment, "PYTHONUNBUFFERED": "1"}
        # of the worked application, which has its own database; None: it takes no part
        self._of_shop = self._environment | dict(shop or {})
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="orchestrator", daemon=True)
        self.members: list[Member] = []
        # what ended without having been told to
        self.ended_by_themselves: list[Ended] = []
        # every process that calls eagerly, as it signs its lines
        self.callers: set[str] = set()
        pool = ["--concurrency", str(concurrency), "--pool", "prefork", "--without-mingle", "--without-gossip"]
        for number in range(workers):
            hostname = f"{WORKER}-{number + 1}@%h"
            self._add(directory, WORKER, "worker", "--loglevel", "INFO", "--hostname", hostname, *pool)
        for _ in range(relays):
            self._add(directory, RELAY)
        for _ in range(beats):
            self._add(directory, BEAT, "beat", "--pidfile", "", "--schedule", "schedule")
        for _ in range(callers):
            self._add(directory, CALLER)
        if shop is not None:
            for number in range(SHOP_WORKERS):
                hostname = f"{SHOP_WORKER}-{number + 1}@%h"
                options = ["--loglevel", "INFO", "--hostname", hostname, "--queues", SHOP_QUEUES, *pool]
                self._add(directory, SHOP_WORKER, "worker", *options).application = SHOP
            self._add(directory, SHOP_RELAY).application = SHOP
            served = self._add(directory, SHOP_EDGE)
            served.application, served.port = SHOP, shop_port
        # bound here and never listening, so that no other program is given a server's port while it is down
        self._ports = [reserved_port() for _ in range(edges)]
        for reserved in self._ports:
            self._add(directory, EDGE).port = reserved.getsockname()[1]
        for kind in DEPLOYED if deployed else ():
            self.of(kind)[0].application = OLD

    def start(self) -> None:
        """Start all, and watch over them."""
        for member in self.members:
            self._start(member)
        self._thread.start()

    def wait_until_ready(self, timeout: float) -> None:
        """Return when every worker takes messages; TimeoutError names one that does not."""
        deadline = time.monotonic() + timeout
        for member in [*self.of(WORKER), *self.of(SHOP_WORKER)]:
            while " ready." not in member.log.read_text(errors="replace"):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{member.name} is not ready after {timeout:g} s")
                time.sleep(0.05)

    def of(self, kind: str) -> list[Member]:
        """The members of a kind, in their order."""
        return [member for member in self.members if member.kind == kind]

    def take(self, kind: str, target: int) -> tuple[Member, psutil.Process] | None:
        """One running member of a kind: the one that `target` names, or the next that runs."""
        members = self.of(kind)
        for offset in range(len(members)):
            member = members[(target + offset) % len(members)]
            if (running := member.running) is not None and member.overdue is None:
                return member, running
        return None

    def terminate(self, member: Member, running: psutil.Process) -> None:
        """SIGTERM: a warm shutdown, which becomes a SIGKILL when it takes too long."""
        member.overdue = time.monotonic() + GRACE
        running.send_signal(signal.SIGTERM)

    def deploy(self, member: Member, running: psutil.Process) -> None:
        """A warm shutdown; what is started instead has the other code."""
        member.application = NEW if member.application == OLD else OLD
        self.terminate(member, running)

    def release(self, member: Member, root: Path, zone: Mapping[str, str]) -> None:
        """A warm shutdown; what is started instead has the code below this directory, and these variables too."""
        member.root, member.zone = root, {**member.zone, **zone}
        if (running := member.running) is not None:
            self.terminate(member, running)

    def finish_deploy(self) -> None:
        """Deploy the new code everywhere."""
        for member in self.members:
            if member.application == OLD:
                member.application = NEW
                if (running := member.running) is not None:
                    self.terminate(member, running)

    def stop(self) -> None:
        """Let every process finish what it is doing; kill it after a while. Nothing is started any more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)
        stopping = [running for member in self.members if (running := member.running) is not None]
        for running in stopping:
            process.signal_all(process.family(running), signal.SIGCONT)
            with contextlib.suppress(psutil.NoSuchProcess):
                running.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        for running in stopping:
            process.end(running, signal.SIGTERM, timeout=max(deadline - time.monotonic(), 0.1))
        for reserved in self._ports:
            reserved.close()

    def _add(self, directory: Path, kind: str, *arguments: str) -> Member:
        name = f"{kind}-{len(self.of(kind)) + 1}"
        place = directory / name
        place.mkdir(parents=True)
        zone = self._zones[len(self.of(kind)) % len(self._zones)]
        self.members.append(Member(name, kind, place, list(arguments), zone=zone))
        return self.members[-1]

    def _start(self, member: Member) -> None:
        # before it is there: from then on a fault may tell it to stop
        member.due = member.overdue = None
        member.log_start = member.log.stat().st_size if member.log.exists() else 0
        environment = self._of_shop if member.application == SHOP else self._environment | dict(member.zone)
        # its own directory: a beat's schedule file is its own
        member.pid = process.launch(
            member.command,
            record=member.record,
            log=member.log,
            directory=member.directory,
            environment={**environment, "PYTHONPATH": str(member.root)},
        )
        member.starts += 1
        if member.kind == CALLER:
            self.callers.add(f"pid {member.pid}")

    def _watch(self) -> None:
        while not self._stop.wait(WATCH):
            now = time.monotonic()
            for member in self.members:
                if member.due is not None:
                    if now >= member.due:
                        self._start(member)
                    continue
                if (status := _ended(member.pid)) is not None:
                    # a SIGTERM before the process has its handlers ends it, too
                    told = {-signal.SIGKILL} | ({0, -signal.SIGTERM} if member.overdue is not None else set())
                    if status not in told:
                        log = member.log.read_bytes()[member.log_start :].decode(errors="replace")
                        self.ended_by_themselves.append(Ended(member.name, member.kind, status, last_words(log)))
                    member.ends.append(status)
                    _kill_orphans(member.pid)
                    member.due = now + member.pause
                elif member.overdue is not None and now > member.overdue and (running := member.running) is not None:
                    process.end(running, signal.SIGKILL, timeout=5)


def reserved_port() -> socket.socket:
    """A socket on a free port, where a server that says SO_REUSEADDR, as asyncio's do, may listen all the same."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def _ended(pid: int) -> int | None:
    """How our child has ended: its exit status, or minus its signal; None while it runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return -signal.SIGKILL  # reaped where it was killed
    return os.waitstatus_to_exitcode(status) if ended else None


def _kill_orphans(leader: int) -> None:
    """End what a killed parent has left: a container that ends takes all its processes with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
