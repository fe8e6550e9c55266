"""What the doctor finds on real servers, and which workers, relays and beats do not start. A faulty set-up differs in one thing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import redis
from celery import Celery
from kombu import Queue
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import make_url

import services
from idempotency.application import settings_of
from idempotency.checks.broker import check_remote_control
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Finding, Level
from idempotency.queues import dead_letter_queues, quorum_queue
from idempotency.store import people
from idempotency.store.driver import CheckedConnection
from tests.support import bank as bank_module
from tests.support.pooler import Pooler
from tests.support.processes import Processes, eventually
from tests.support.proxy import Proxy


def refusals(app: Celery) -> list[str]:
    return [str(finding) for finding in doctor(app) if finding.level is Level.REFUSAL]


def about(app: Celery, subject: str) -> list[Finding]:
    return [finding for finding in doctor(app) if finding.subject == subject and "not there yet" not in finding.found]


@pytest.fixture
def rabbitmq(servers: services.Services) -> None:
    if servers.broker == "redis":
        pytest.skip("needs RabbitMQ")


# ---------------------------------------------------------------- configuration


def test_a_sound_set_up_has_nothing_to_refuse(configured: Celery, rabbitmq: None) -> None:
    with configured.connection_for_write() as connection:
        queues = list(configured.amqp.queues.values())
        for queue in [*queues, *dead_letter_queues(queues)]:
            queue(connection.default_channel).declare()
    configured.conf.task_time_limit = None
    findings = doctor(configured)
    assert [str(finding) for finding in findings if finding.level is not Level.OK] == []
    assert {"tasks", "retention", "database", "database schema", "redis", "broker"} <= {f.subject for f in findings}


@pytest.mark.parametrize(
    ("setting", "value", "line"),
    [
        ("accept_content", ["json", "pickle"], "accept_content: pickle beside json, need json alone"),
        ("task_protocol", 1, "task_protocol: 1, need 2"),
        ("broker_transport_options", {}, "broker_transport_options: confirm_publish off, need True"),
        ("idempotency_lease", -1.0, "idempotency_lease: Input should be greater than 0, got -1.0"),
        ("idempotency_heartbeat", 40.0, "heartbeat=40.0 lease=60.0"),
        ("idempotency_retention_completed", 60.0, "retention_completed=60.0 redelivery_horizon=86400.0"),
        (
            "beat_schedule",
            {"nightly": {"task": "tests.support.bank.deposit", "schedule": 60, "options": {"expires": 5}}},
            "beat_schedule nightly: expires=5 for the idempotent task tests.support.bank.deposit, need none",
        ),
        (
            "beat_schedule",
            {"nightly": {"task": "tests.support.bank.deposit", "schedule": 60, "options": {"expiration": 5}}},
            "beat_schedule nightly: expiration=5 for the idempotent task tests.support.bank.deposit, need none",
        ),
        (
            "beat_schedule",
            {"nightly": {"task": "tests.support.bank.deposit", "schedule": 60, "kwargs": {"amount": 5}}},
            "beat_schedule nightly: arguments: missing a required argument: 'account' of the idempotent task tests.support",
        ),
    ],
)
def test_a_setting_that_would_lose_work_is_refused_with_both_values(
    configured: Celery, rabbitmq: None, setting: str, value: object, line: str
) -> None:
    configured.conf[setting] = value
    assert any(line in refused for refused in refusals(configured))


@pytest.mark.parametrize("setting", ["idempotency_message_secrets", "idempotency_message_secret"])
def test_a_secret_that_is_refused_is_not_shown(configured: Celery, setting: str) -> None:
    """Nor one under a name that is misspelt."""
    configured.conf[setting] = ["too-short"]
    found = refusals(configured)
    assert any(setting in each for each in found)
    assert "too-short" not in "".join(found)


def test_a_queue_that_no_idempotent_task_uses_may_be_of_any_kind(configured: Celery, rabbitmq: None) -> None:
    configured.conf.task_queues = [*configured.conf.task_queues, Queue("reports")]
    configured.amqp.__dict__.pop("queues", None)
    found = about(configured, "queue reports")
    assert [(each.level, each.found) for each in found] == [
        (Level.WARNING, "not as quorum_queue declares it: x-queue-type and 4 more")
    ]


def test_money_that_no_one_may_touch_is_a_warning(
    configured: Celery, rabbitmq: None, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warned() -> list[str]:
        return [each.found for each in about(configured, "tokens") if each.level is Level.WARNING]

    assert warned() == []
    monkeypatch.setattr(configured.tasks[bank_module.deposit.name], "moves_money", True)
    assert warned() == [f"none has a valid token, and 1 task moves money ({bank_module.deposit.name}, for one)"]
    with engine.connect() as connection:
        people.add(connection, "ann", "admin", token_hash="a" * 64, days=1)
    assert warned() == []


def test_a_message_that_may_outlive_its_record_is_a_warning(configured: Celery, rabbitmq: None) -> None:
    queue = configured.conf.task_default_queue
    task = configured.tasks["tests.support.bank.deposit"]
    task.time_limit = 3600
    try:
        assert about(configured, f"queue {queue}")[0].level is Level.OK
        task.time_limit = 5000
        late = about(configured, f"queue {queue}")[0]
        assert late.level is Level.WARNING
        assert "100000 s above redelivery_horizon=86400.0" in late.found
    finally:
        task.time_limit = None


@pytest.mark.parametrize(
    ("changes", "level", "found"),
    [
        ({}, Level.OK, "is on; the broker listens on loopback"),
        ({"worker_enable_remote_control": False}, Level.OK, "is off"),
        ({"idempotency_message_secrets": "a" * 32}, Level.WARNING, "is on, and unlike messages it is not signed"),
        ({"broker_url": "amqp://broker.example//"}, Level.WARNING, "is on"),
        ({"broker_url": "amqp://127.0.0.1;amqp://broker.example"}, Level.WARNING, "is on"),
        ({"broker_url": ["amqp://127.0.0.1", "amqp://broker.example"]}, Level.WARNING, "is on"),
        ({"broker_read_url": "amqp://broker.example//"}, Level.WARNING, "is on"),
    ],
)
def test_remote_control_is_reported_where_others_may_publish(
    configured: Celery, changes: dict[str, Any], level: Level, found: str
) -> None:
    configured.conf.update(changes)
    (finding,) = check_remote_control(configured, settings_of(configured))
    assert (finding.level, finding.found) == (level, found)
    assert level is Level.OK or "stop workers and revoke tasks" in finding.advice


# ---------------------------------------------------------------- servers


def test_the_queue_that_is_there_must_be_the_one_that_is_declared(configured: Celery, rabbitmq: None) -> None:
    name = configured.conf.task_default_queue
    other = quorum_queue(name, exchange=name, dead_letter_queue=f"{name}-dead", limit=50)
    with configured.connection_for_write() as connection:
        other(connection.default_channel).declare()
    (refused,) = refusals(configured)
    assert f"queue {name}: inequivalent arg 'x-delivery-limit'" in refused
    assert "'20'" in refused
    assert "'50'" in refused


def test_the_doctor_declares_nothing(configured: Celery, rabbitmq: None) -> None:
    name = configured.conf.task_default_queue
    for _ in range(2):
        assert f"queue {name}: not there yet; a worker or the relay declares it" in map(str, doctor(configured))


@pytest.mark.parametrize(
    ("change", "level", "line"),
    [
        ("synchronous_commit = off", Level.WARNING, "database synchronous_commit: off, need on"),
        (
            "default_transaction_isolation = 'serializable'",
            Level.REFUSAL,
            "database default_transaction_isolation: serializable, need read committed",
        ),
        ("default_transaction_read_only = on", Level.REFUSAL, "database: read-only, need the writable primary"),
    ],
)
def test_a_database_that_weakens_the_promise_is_found(
    configured: Celery, database: str, change: str, level: Level, line: str
) -> None:
    engine = create_engine(database, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {make_url(database).database} SET {change}"))
    engine.dispose()
    assert any(finding.level is level and str(finding).startswith(line) for finding in doctor(configured))


@pytest.mark.parametrize(
    ("mode", "ignores_options", "level", "line"),
    [
        ("transaction", True, Level.OK, "database pooler: in between: our settings go with each transaction"),
        ("transaction", False, Level.OK, "database pooler: in between: our settings go with each transaction"),
        ("session", True, Level.OK, "database pooler: in between: our settings go with each transaction"),
        ("statement", True, Level.REFUSAL, "database pooler: allows no transactions (statement mode)"),
    ],
)
def test_a_pooler_is_named_with_its_mode(
    configured: Celery, database: str, mode: str, ignores_options: bool, level: Level, line: str
) -> None:
    with Pooler(database, mode=mode, ignores_options=ignores_options) as pooler:
        configured.conf.idempotency_database_url = pooler.url
        found = doctor(configured)
    assert [str(finding) for finding in found if finding.level is level and str(finding).startswith(line)], found
    about_database = [str(each) for each in found if each.level is not Level.OK and each.subject.startswith("database")]
    assert about_database == ([] if level is Level.OK else [str(found[0])])


def test_a_connection_that_misses_a_vanished_server_for_long_is_a_warning(
    configured: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert about(configured, "database TCP_USER_TIMEOUT") == []
    original = CheckedConnection.connect
    monkeypatch.setattr(
        CheckedConnection, "connect", lambda *args, tcp_user_timeout=None, **options: original(*args, **options)
    )
    (found,) = about(configured, "database TCP_USER_TIMEOUT")
    assert found.level is Level.WARNING


def test_a_task_that_may_outrun_its_lease_renewal_is_a_warning(configured: Celery) -> None:
    task = configured.tasks["tests.support.bank.deposit"]
    for limit, expected in ((600, 0), (601, 1)):
        task.time_limit = limit
        try:
            found = [each for each in about(configured, "task tests.support.bank.deposit") if "max_run" in each.found]
        finally:
            task.time_limit = None
        assert len(found) == expected
    assert found[0].found == "time_limit=601 above max_run=600"
    assert found[0].level is Level.WARNING


@pytest.mark.parametrize(("pool", "expected"), [("threads", 1), ("gevent", 1), ("prefork", 0)])
def test_a_pool_smaller_than_the_concurrency_of_one_process_is_a_warning(
    configured: Celery, monkeypatch: pytest.MonkeyPatch, pool: str, expected: int
) -> None:
    configured.conf.worker_pool, configured.conf.worker_concurrency = pool, 21
    assert len(about(configured, "idempotency_pool_size")) == expected
    configured.conf.worker_concurrency = 20
    assert about(configured, "idempotency_pool_size") == []


def test_a_worker_with_more_threads_than_connections_says_so_and_starts(bank: Celery, processes: Processes) -> None:
    worker = processes.worker("-P", "threads", "--concurrency", "50")
    line = "idempotency: warning: idempotency_pool_size: 10, enough for 20 attempts at once, and concurrency is 50"
    assert line in worker.log


def test_a_database_that_forgets_in_a_power_cut_is_refused(
    configured: Celery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fsync", "full_page_writes"):
        monkeypatch.setitem(services.postgres._SETTINGS, name, "off")
    directory = Path(tempfile.mkdtemp(prefix="services-"))  # pytest's own are closed to the account it runs as
    server = services.Postgres(directory)
    try:
        server.launch()
        server.wait_until_ready()
        configured.conf.idempotency_database_url = server.url
        refused = refusals(configured)
    finally:
        server.discard()
        shutil.rmtree(directory)
    assert "database fsync: off, need on; a power cut can lose committed data" in refused
    assert "database full_page_writes: off, need on; a power cut can lose committed data" in refused


def test_a_redis_that_forgets_or_refuses_hints_is_a_warning(configured: Celery, servers: services.Services) -> None:
    with redis.Redis.from_url(servers.redis_url) as client:
        before = client.config_get("maxmemory-policy")["maxmemory-policy"]
        try:
            client.config_set("maxmemory-policy", "allkeys-lru")
            client.replicaof("127.0.0.1", "1")
            findings = doctor(configured)
        finally:
            client.replicaof("NO", "ONE")
            client.config_set("maxmemory-policy", before)
    warned = [str(finding) for finding in findings if finding.level is Level.WARNING]
    assert any(line.startswith("redis maxmemory-policy: allkeys-lru, need noeviction") for line in warned)
    assert any(line.startswith("redis: role slave, need master") for line in warned)


def test_clocks_that_differ_are_a_warning_only(configured: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    for server in ("postgres", "redis"):
        fast = SimpleNamespace(time=lambda: time.time() + 100)
        monkeypatch.setattr(f"idempotency.checks.{server}.time", fast)
    for subject in ("database clock", "redis clock"):
        (found,) = about(configured, subject)
        assert found.level is Level.WARNING
        assert re.match(r"(99\.9|100\.)\d+ s behind this host, at most 1 s$", found.found)
        assert found.advice == "costs latency and confuses logs; loses nothing"


def test_a_database_without_our_tables_is_refused_by_both_revisions(configured: Celery, empty_database: str) -> None:
    configured.conf.idempotency_database_url = empty_database
    assert any(line.startswith("database schema: at none, need ") for line in refusals(configured))


PASSWORD = "hunter2-9f3c"


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("password", "unreachable: wrong password"),
        pytest.param("port", "unreachable: connection refused", marks=pytest.mark.long),
        ("address", "not an address"),
    ],
)
def test_a_failing_address_is_reported_without_its_password(
    environment: dict[str, str], fault: str, found: str
) -> None:
    addresses = {name: spoil(environment[name], fault) for name in ("DATABASE_URL", "REDIS_URL", "BROKER_URL")}
    done = subprocess.run(
        [sys.executable, "-m", "idempotency.cli", "doctor", "-A", "tests.support.bank", "--json", "--problems"],
        env=environment | addresses,
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stdout + done.stderr
    assert PASSWORD not in said
    assert "Traceback" not in said
    told = {(finding["subject"], finding["level"]) for finding in json.loads(done.stdout) if finding["found"] == found}
    subjects = ("idempotency_database_url", "idempotency_redis_url", "broker_url")
    levels = ("refusal", "refusal", "refusal")  # no process starts with an address that it cannot read
    if fault != "address":
        subjects, levels = ("database", "redis", "broker"), ("refusal", "warning", "refusal")
    assert "ok" not in {finding["level"] for finding in json.loads(done.stdout)}
    # without Redis the promise holds
    assert told == set(zip(subjects, levels, strict=True))
    assert done.returncode == 1


def test_an_address_that_lacks_its_password_is_reported(configured: Celery, environment: dict[str, str]) -> None:
    url = make_url(environment["DATABASE_URL"])._replace(password=None)
    configured.conf.idempotency_database_url = str(url)
    (refused,) = [finding for finding in doctor(configured) if finding.subject == "database"]
    assert (refused.level, refused.found) == (Level.REFUSAL, "unreachable: the address has no password")


def spoil(address: str, fault: str) -> str:
    url = make_url(address)
    if fault == "port":
        url = url.set(port=1)
    text = url.set(password=PASSWORD).render_as_string(hide_password=False)
    return text.replace(f":{url.port}", f":{PASSWORD}") if fault == "address" else text


# ---------------------------------------------------------------- workers

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

# The doctor finds each of them above; that a worker asks it, two show.
USUAL_FAULTS = ("a classic queue", "no lease")


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


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[pytest.mark.long] * (fault not in USUAL_FAULTS)) for fault in FAULTS]
)
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


@pytest.mark.parametrize(
    ("variable", "setting"),
    [
        ("DATABASE_URL", "idempotency_database_url"),
        pytest.param("REDIS_URL", "idempotency_redis_url", marks=pytest.mark.long),
        pytest.param("BROKER_URL", "broker_url", marks=pytest.mark.long),
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


@pytest.mark.parametrize(
    ("process", "fault"),
    [
        ("relay", "no delivery limit"),
        ("beat", "a slow heartbeat"),
        pytest.param("relay", "a slow heartbeat", marks=pytest.mark.long),
        pytest.param("beat", "no delivery limit", marks=pytest.mark.long),
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


def test_a_relay_asked_to_stop_while_it_waits_for_postgres_ends(
    bank: Celery, environment: dict[str, str], tmp_path: Path, rabbitmq: None
) -> None:
    away = environment | {"DATABASE_URL": spoil(environment["DATABASE_URL"], "port")}
    running = start("relay", variant(tmp_path, ""), away, tmp_path)
    log = tmp_path / "log"
    eventually(lambda: "postgres_unavailable" in log.read_text() or running.poll() is not None, timeout=60)
    running.terminate()
    assert running.wait(30) == 0, log.read_text()


@pytest.mark.few(1)
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
