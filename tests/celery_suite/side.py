"""One side's run: Celery's tests in a process of their own, with a worker inside it, and for ours a relay beside it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import redis
from sqlalchemy import create_engine

import services
from idempotency.store import schema

ROOT = Path(__file__).parent.parent.parent
SIDES = ("plain", "ours")
PASSED = "passed"


@dataclass(frozen=True, slots=True)
class Seen:
    """How a test ended, and the line that says why."""

    outcome: str
    error: str = ""
    seconds: float = 0.0
    patience: float | None = None
    """The seconds that it was given when it was run again for having timed out."""

    @property
    def has_timed_out(self) -> bool:
        """Whether it waited too long: a `TimeoutError` of the test's own, or the limit of each test."""
        return self.outcome == "failed" and ("TimeoutError: " in self.error or "from pytest-timeout" in self.error)


NOT_RUN = Seen("not run")
# Alembic keeps the migration that runs in a module.
_migrating = threading.Lock()


def run(
    side: str,
    servers: services.Services,
    source: Path,
    place: Path,
    arguments: Sequence[str],
    *,
    limit: float,
    patience: float | None = None,
) -> dict[str, Seen]:
    """Run Celery's tests on one side and return what became of each; output goes to files in `place`.

    The virtual host, the database and the Redis are its own. After `limit` seconds the run is ended; the tests it has
    not reached are missing from the answer. With `patience`, each test waits for as many seconds, not for its module's.
    """
    run_id = uuid4().hex[:8]
    name = f"suite_{run_id}"
    outcomes = place / f"{side}-{run_id}.jsonl"
    outcomes.touch()
    broker = servers.create_vhost(name)
    database = servers.create_database(name)
    try:
        with services.running(needs=["redis"]) as own:
            _admit_all(own.redis_url)
            environment = _environment(
                side, source, outcomes, broker=broker, database=database, redis_url=own.redis_url
            )
            if patience is not None:
                environment["CELERY_SUITE_PATIENCE"] = str(patience)
            command = [sys.executable, "-m", "pytest", "-q", "-rN", "--tb=short", "-p", "tests.celery_suite.plugin"]
            # a module that needs a package which is not installed here is left out
            command += [
                "-p",
                "celery.contrib.pytest",
                "--continue-on-collection-errors",
                "-p",
                "no:cacheprovider",
                *arguments,
            ]
            with (
                _relay(side, source, place, environment),
                _process(command, source, place / f"{side}.log", environment) as process,
                contextlib.suppress(subprocess.TimeoutExpired),
            ):
                process.wait(limit)
    finally:
        servers.drop_database(name)
        servers.delete_vhost(name)
    return {test: replace(seen, patience=patience) for test, seen in _read(outcomes).items()}


def _admit_all(redis_url: str) -> None:
    """Remove the password: the suite's tasks connect with a host and a port alone."""
    client = redis.Redis.from_url(redis_url)
    client.config_set("requirepass", "")
    client.close()


def _environment(
    side: str, source: Path, outcomes: Path, *, broker: str, database: str, redis_url: str
) -> dict[str, str]:
    address = urlsplit(redis_url)
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # for tests that call `celery`
        "CELERY_SUITE_SIDE": side,
        "CELERY_SUITE_OUTCOMES": str(outcomes),
        "TEST_BROKER": broker,
        "TEST_BACKEND": f"redis://{address.hostname}:{address.port}/0",
        "REDIS_HOST": str(address.hostname),
        "REDIS_PORT": str(address.port),
        "HINTS_URL": f"redis://{address.hostname}:{address.port}/1",
        "DATABASE_URL": database,
        "PYTHONPATH": f"{source}{os.pathsep}{ROOT}",
    }


@contextlib.contextmanager
def _relay(side: str, source: Path, place: Path, environment: dict[str, str]) -> Iterator[None]:
    if side != "ours":
        yield
        return
    engine = create_engine(environment["DATABASE_URL"])
    with _migrating:
        schema.migrate(engine)
    engine.dispose()
    command = [sys.executable, "-m", "idempotency.cli", "relay", "-A", "tests.celery_suite.application"]
    with _process(command, source, place / "relay.log", environment):
        yield


@contextlib.contextmanager
def _process(
    command: Sequence[str], source: Path, log: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which ends with the block."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=source, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(outcomes: Path) -> dict[str, Seen]:
    """What became of each test; of several lines about one, the first that is not `passed`."""
    seen: dict[str, Seen] = {}
    for line in outcomes.read_text().splitlines():
        fields = json.loads(line)
        if seen.get(fields["test"], Seen(PASSED)).outcome == PASSED:
            seen[fields["test"]] = Seen(fields["outcome"], fields["error"], fields["seconds"])
    return seen
