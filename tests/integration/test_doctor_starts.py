"""Which workers, relays and beats do not start, and which wait. A faulty set-up differs in one thing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from celery import Celery

from tests.integration.test_doctor import PASSWORD, spoil
from tests.support import bank as bank_module
from tests.support.processes import Processes, eventually
from tests.support.proxy import Proxy

FAULTS = {
    "a classic queue": (
        "app.conf.task_queues = [Queue(name, Exchange(name, type='topic'), routing_key=name)]",
        "x-queue-type is not set, need quorum",
    ),
    "no delivery limit": (
        "app.conf.task_queues[0].queue_arguments.pop('x-delivery-limit')",
        "x-delivery-limit is not set, need at least 20",
    ),
    "early acknowledgement": (
        "app.task(base=IdempotentTask, key='{a}', name='early', acks_late=False)(body)",
        "task early: acks_late=False, need True",
    ),
    "pickle accepted": ("app.conf.accept_content = ['json', 'pickle']", "accept_content: pickle beside json"),
    "no lease": ("app.conf.idempotency_lease = 0", "idempotency_lease: Input should be greater than 0, got 0"),
    "a slow heartbeat": ("app.conf.idempotency_heartbeat = 30.0", "heartbeat=30.0 lease=60.0"),
    "a short retention": (
        "app.task(base=IdempotentTask, key='{a}', name='brief', retention_completed=60.0)(body)",
        "task brief: retention_completed=60.0 below redelivery_horizon=86400.0",
    ),
}

# The doctor finds each of them; that a worker asks it, the first shows, and all in `make long`.


def variant(directory: Path, change: str) -> str:
    """A module with the test application and one change to it."""
    module = f"variant_{uuid4().hex[:8]}"
    (directory / f"{module}.py").write_text(
        textwrap.dedent(f"""
            from kombu import Exchange, Queue
            from idempotency import IdempotentTask
            from tests.support.bank import app
            name = app.conf.task_default_queue
            def body(a): ...
            {change}
        """)
    )
    return module


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_that_would_lose_work_does_not_start(
    processes: Processes, environment: dict[str, str], tmp_path: Path, rabbitmq: None, fault: str
) -> None:
    change, line = FAULTS[fault]
    module = variant(tmp_path, change)
    path = f"{environment['PYTHONPATH']}:{tmp_path}"
    # as root Celery itself refuses pickle, unless told otherwise
    worker = processes.start("-P", "solo", app=module, PYTHONPATH=path, C_FORCE_ROOT="1")
    assert worker.process.wait(30) == 1
    assert [text for text in worker.log.splitlines() if "refused to start" in text and line in text], worker.log
    assert "Traceback" not in worker.log


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("variable", "setting"),
    [
        ("DATABASE_URL", "idempotency_database_url"),
        ("REDIS_URL", "idempotency_redis_url"),
        ("BROKER_URL", "broker_url"),
    ],
)
def test_neither_worker_nor_relay_starts_with_an_invalid_address(
    processes: Processes, environment: dict[str, str], variable: str, setting: str
) -> None:
    # taken for a port, the password would be in the error of what parses it
    spoiled = {variable: spoil(environment[variable], "address")}
    worker = processes.start("--concurrency", "1", "-P", "solo", **spoiled)
    assert worker.process.wait(30) == 1
    relay = subprocess.run(
        [sys.executable, "-m", "idempotency.cli", "relay", "-A", "tests.support.bank"],
        env=environment | spoiled,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert relay.returncode == 1
    refused = f"idempotency: refused to start: {setting}: not an address; correct it"
    assert relay.stderr.splitlines() == [refused]
    assert refused in worker.log
    for said in (worker.log, relay.stdout + relay.stderr):
        assert PASSWORD not in said
        assert "Traceback" not in said


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("process", "fault"),
    [
        ("relay", "no delivery limit"),
        ("beat", "a slow heartbeat"),
        ("relay", "a slow heartbeat"),
        ("beat", "no delivery limit"),
    ],
)
def test_a_relay_or_a_beat_that_would_lose_work_does_not_start(
    environment: dict[str, str], tmp_path: Path, rabbitmq: None, process: str, fault: str
) -> None:
    change, line = FAULTS[fault]
    done = start(process, variant(tmp_path, change), environment, tmp_path)
    try:
        assert done.wait(60) == 1
    finally:
        done.kill()
        done.wait(30)
    said = (tmp_path / "log").read_text()
    assert [text for text in said.splitlines() if "refused to start" in text and line in text], said
    assert "Traceback" not in said


@pytest.mark.long
@pytest.mark.parametrize("process", ["relay", "beat"])
def test_a_sound_relay_or_beat_starts(
    bank: Celery, environment: dict[str, str], tmp_path: Path, rabbitmq: None, process: str
) -> None:
    running = start(process, variant(tmp_path, ""), environment, tmp_path)
    ready = {"relay": "relay_started", "beat": "beat: Starting..."}[process]
    try:
        eventually(lambda: ready in (tmp_path / "log").read_text() or running.poll() is not None, timeout=60)
        if process == "beat":  # its schedule is opened after the check
            eventually(lambda: list(tmp_path.glob("schedule*")) or running.poll() is not None, timeout=60)
        assert running.poll() is None, (tmp_path / "log").read_text()
        assert "refused" not in (tmp_path / "log").read_text()
    finally:
        running.terminate()
        running.wait(30)


@pytest.mark.long
def test_a_relay_waits_for_a_postgres_that_is_away_at_its_start(
    bank: Celery, environment: dict[str, str], tmp_path: Path, rabbitmq: None
) -> None:
    address = urlsplit(environment["DATABASE_URL"])
    with Proxy(address.hostname or "", address.port or 0) as proxy:
        proxy.refuse()
        through = environment["DATABASE_URL"].replace(f":{address.port}/", f":{proxy.port}/")
        running = start("relay", variant(tmp_path, ""), environment | {"DATABASE_URL": through}, tmp_path)
        log = tmp_path / "log"
        try:
            eventually(lambda: "postgres_unavailable" in log.read_text() or running.poll() is not None, timeout=60)
            assert running.poll() is None, log.read_text()
            assert proxy.refusals >= 1
            proxy.refuse(False)
            eventually(lambda: "relay_started" in log.read_text() or running.poll() is not None, timeout=60)
            assert running.poll() is None, log.read_text()
        finally:
            running.terminate()
            assert running.wait(30) == 0


@pytest.mark.long
def test_a_relay_asked_to_stop_while_it_waits_for_postgres_ends(
    bank: Celery, environment: dict[str, str], tmp_path: Path, rabbitmq: None
) -> None:
    away = environment | {"DATABASE_URL": spoil(environment["DATABASE_URL"], "port")}
    running = start("relay", variant(tmp_path, ""), away, tmp_path)
    log = tmp_path / "log"
    eventually(lambda: "postgres_unavailable" in log.read_text() or running.poll() is not None, timeout=60)
    running.terminate()
    assert running.wait(30) == 0, log.read_text()


@pytest.mark.long
@pytest.mark.parametrize("process", ["relay", "worker", "beat"])
def test_a_process_with_a_wrong_address_does_not_wait(
    process: str, bank: Celery, environment: dict[str, str], tmp_path: Path, rabbitmq: None
) -> None:
    wrong = environment | {"DATABASE_URL": environment["DATABASE_URL"] + "_not_there"}
    running = start(process, variant(tmp_path, ""), wrong, tmp_path)
    assert running.wait(60) == 1
    refused = "idempotency: refused to start: idempotency_database_url: no such database or user; correct it"
    assert refused in (tmp_path / "log").read_text()


def start(process: str, module: str, environment: dict[str, str], directory: Path) -> subprocess.Popen[bytes]:
    options = {
        "relay": ["idempotency.cli", "relay", "-A", module],
        "worker": ["celery", "-A", module, "worker", "-l", "INFO", "--concurrency", "1"],
        "beat": ["celery", "-A", module, "beat", "-l", "INFO", "-s", directory / "schedule", "--pidfile", ""],
    }[process]
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *options],
            env=environment | {"PYTHONPATH": f"{environment['PYTHONPATH']}:{directory}"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def test_a_worker_on_old_tables_does_not_start(processes: Processes, empty_database: str) -> None:
    worker = processes.start("--concurrency", "1", DATABASE_URL=empty_database)
    assert worker.process.wait(30) == 1
    assert "idempotency: refused to start: database schema: at none, need " in worker.log


def test_a_worker_starts_while_its_database_is_away(bank: Celery, processes: Processes, database: str) -> None:
    away = spoil(database, "port")
    worker = processes.worker("--concurrency", "1", "-P", "solo", DATABASE_URL=away)
    assert "the database does not answer (connection refused): claims wait" in worker.log
    assert PASSWORD not in worker.log


@pytest.mark.long
def test_an_application_without_idempotent_tasks_is_left_alone(
    bank: Celery, processes: Processes, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "plain_application.py").write_text(
        "import os\nimport idempotency\nfrom celery import Celery\n"
        "app = Celery('plain', broker=os.environ['BROKER_URL'])\n"
        "app.conf.update(task_default_queue=os.environ['BANK_QUEUE'], accept_content=['json', 'yaml'])\n"
        "@app.task\ndef plain(): ...\n"
    )
    path = f"{environment['PYTHONPATH']}:{tmp_path}"
    processes.worker("--concurrency", "1", "-P", "solo", app="plain_application", PYTHONPATH=path)


def test_a_sound_worker_starts_and_works(bank: Celery, processes: Processes, tmp_path: Path) -> None:
    path = f"{processes.environment['PYTHONPATH']}:{tmp_path}"
    worker = processes.worker("--concurrency", "1", app=variant(tmp_path, ""), PYTHONPATH=path)
    account = uuid4().hex
    bank_module.deposit.delay(account=account)
    eventually(lambda: "succeeded" in worker.log, what="the deposit")
