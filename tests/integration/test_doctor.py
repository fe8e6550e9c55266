"""What the doctor finds on real servers. A faulty set-up differs in one thing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from tests.support.processes import Processes


def refusals(app: Celery) -> list[str]:
    return [str(finding) for finding in doctor(app) if finding.level is Level.REFUSAL]


def about(app: Celery, subject: str) -> list[Finding]:
    return [finding for finding in doctor(app) if finding.subject == subject and "not there yet" not in finding.found]


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


@pytest.mark.few(3)
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
    bank_module.forget_queues(configured)
    found = about(configured, "queue reports")
    assert [(each.level, each.found) for each in found] == [
        (Level.WARNING, "not as quorum_queue declares it: x-queue-type and 4 more")
    ]


def test_a_route_to_a_queue_that_nobody_declared_is_refused_by_the_names_of_both(
    configured: Celery, rabbitmq: None
) -> None:
    configured.conf.task_create_missing_queues = False
    configured.conf.task_routes = {bank_module.deposit.name: {"queue": "nobody"}}
    bank_module.forget_queues(configured)
    assert [(each.level, each.found) for each in about(configured, f"task {bank_module.deposit.name}")] == [
        (Level.REFUSAL, "routed to nowhere: Queue 'nobody' missing from task_queues")
    ]


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_the_queue_that_is_there_must_be_the_one_that_is_declared(configured: Celery, rabbitmq: None) -> None:
    name = configured.conf.task_default_queue
    other = quorum_queue(name, exchange=name, dead_letter_queue=f"{name}-dead", limit=50)
    with configured.connection_for_write() as connection:
        other(connection.default_channel).declare()
    (refused,) = refusals(configured)
    assert f"queue {name}: inequivalent arg 'x-delivery-limit'" in refused
    assert "'20'" in refused
    assert "'50'" in refused


@pytest.mark.long
def test_the_doctor_declares_nothing(configured: Celery, rabbitmq: None) -> None:
    name = configured.conf.task_default_queue
    for _ in range(2):
        assert f"queue {name}: not there yet; a worker or the relay declares it" in map(str, doctor(configured))


@pytest.mark.long
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


@pytest.mark.few(1)
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.few(1)
@pytest.mark.parametrize(("pool", "expected"), [("threads", 1), ("gevent", 1), ("prefork", 0)])
def test_a_pool_smaller_than_the_concurrency_of_one_process_is_a_warning(
    configured: Celery, monkeypatch: pytest.MonkeyPatch, pool: str, expected: int
) -> None:
    configured.conf.worker_pool, configured.conf.worker_concurrency = pool, 21
    assert len(about(configured, "idempotency_pool_size")) == expected
    configured.conf.worker_concurrency = 20
    assert about(configured, "idempotency_pool_size") == []


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("password", "unreachable: wrong password"),
        ("port", "unreachable: connection refused"),
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
