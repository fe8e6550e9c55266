"""Settings, servers, addresses and machines with which nothing starts."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from amqp.exceptions import AMQPError
from celery import Celery
from kombu.exceptions import OperationalError as BrokerError
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.exc import OperationalError

import services
from idempotency import lookup
from idempotency.application import close_runtime, settings_of
from idempotency.checks.doctor import check_configuration, doctor
from idempotency.checks.findings import Level
from idempotency.checks.startup import check_worker_start
from idempotency.relay.relay import Relay, Relayed
from tests.integration.bad_inputs.cases import cases
from tests.integration.bad_inputs.rows import write
from tests.support import bank as b
from tests.support.deliveries import Deliveries
from tests.support.refused_messages import SECRET

# ---------------------------------------------------------------- settings, servers, addresses


def refusals(app: Celery) -> list[str]:
    """Why a worker does not start: one line for each reason."""
    try:
        check_worker_start(SimpleNamespace(app=app))
    except SystemExit as refused:
        return str(refused.code).splitlines()
    return []


SETTINGS = {
    "28-lease-zero": ("idempotency_lease", 0.0, "idempotency_lease: Input should be greater than 0, got 0.0"),
    "28-lease-negative": ("idempotency_lease", -1.0, "idempotency_lease: Input should be greater than 0, got -1.0"),
    "28-heartbeat-half-the-lease": ("idempotency_heartbeat", 30.0, "heartbeat=30.0 lease=60.0"),
    "28-retention-below-the-horizon": (
        "idempotency_retention_completed",
        60.0,
        "retention_completed=60.0 redelivery_horizon=86400.0",
    ),
    "28-confirms-off": ("broker_transport_options", {}, "broker_transport_options: confirm_publish off, need True"),
    "28-content-other-than-JSON": (
        "accept_content",
        ["json", "pickle"],
        "accept_content: pickle beside json, need json alone",
    ),
    "30-address-no-address": (
        "idempotency_database_url",
        f"postgresql+psycopg://u@127.0.0.1:{SECRET}/db",
        "idempotency_database_url: not an address",
    ),
}


@pytest.mark.parametrize(("setting", "value", "line"), cases(SETTINGS))
def test_a_setting_that_breaks_the_promise_prevents_the_start_in_one_line(
    setting: str, value: Any, line: str, configured: Celery
) -> None:
    assert refusals(configured) == []
    configured.conf[setting] = value
    (said,) = refusals(configured)
    assert said.startswith("idempotency: refused to start: ")
    assert line in said
    assert SECRET not in said


QUEUES = {
    "28-delivery-limit-unset": ("x-delivery-limit", None, "x-delivery-limit is not set, need at least 20"),
    "28-delivery-limit-low": ("x-delivery-limit", 3, "x-delivery-limit is 3, need at least 20"),
    "28-classic-queue": ("x-queue-type", "classic", "x-queue-type is classic, need quorum"),
}


@pytest.mark.parametrize(("argument", "value", "line"), cases(QUEUES))
def test_a_queue_that_would_lose_messages_refuses_to_start(
    argument: str, value: Any, line: str, configured: Celery, servers: services.Services
) -> None:
    if servers.broker == "redis":
        pytest.skip("needs RabbitMQ")
    arguments = configured.conf.task_queues[0].queue_arguments
    arguments.pop(argument)
    if value is not None:
        arguments[argument] = value
    assert [said for said in refusals(configured) if line in said]


@pytest.mark.parametrize(
    ("option", "value"),
    cases({"28-acks-late-off": ("acks_late", False), "28-lost-worker": ("reject_on_worker_lost", False)}),
)
def test_a_task_that_would_lose_messages_refuses_to_start(
    option: str, value: Any, configured: Celery, task_of: Callable[..., Any]
) -> None:
    task = task_of(lambda self, account: None, key="{account}", **{option: value})
    (said,) = refusals(configured)
    assert f"task {task.name}: {option}={value}, need {not value}" in said


@pytest.mark.parametrize(
    ("change", "line"),
    cases(
        {
            "29-isolation": (
                "default_transaction_isolation = 'serializable'",
                "default_transaction_isolation: serializable, need read committed",
            ),
            "29-read-only": ("default_transaction_read_only = on", "database: read-only, need the writable primary"),
        }
    ),
)
def test_a_database_that_cannot_keep_the_promise_refuses_to_start(
    change: str, line: str, configured: Celery, connection: Connection, database: str
) -> None:
    connection.execute(text(f"ALTER DATABASE {make_url(database).database} SET {change}"))
    (said,) = refusals(configured)
    assert line in said


@pytest.mark.parametrize("oldest", cases({"29-redis-too-old": 99}))
def test_a_redis_that_is_too_old_is_a_warning(oldest: int, configured: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [found for found in doctor(configured) if found.subject == "redis" and found.level != "ok"]
    monkeypatch.setattr("idempotency.checks.redis.OLDEST_REDIS", oldest)
    (found,) = [found for found in doctor(configured) if found.subject == "redis"]
    assert (found.level, found.found.endswith("need at least 99")) == ("warning", True)


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", cases({"30-wrong-password": "password", "30-wrong-host": "host"}))
def test_a_wrong_address_is_an_error_without_its_password(
    fault: str, environment: dict[str, str], bank: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    def spoilt(name: str) -> str:
        url = make_url(environment[name]).set(password=SECRET)
        if fault == "host":
            url = url.set(host="nowhere.invalid")  # can never be (RFC 2606)
        return url.render_as_string(hide_password=False)

    with create_engine(environment["DATABASE_URL"], isolation_level="AUTOCOMMIT").connect() as connection:
        write(connection, "a1")
    errors = []
    try:
        with caplog.at_level(logging.DEBUG):
            b.configure(environment | {"DATABASE_URL": spoilt("DATABASE_URL")})
            close_runtime(bank)
            with pytest.raises(OperationalError) as refused:
                lookup(bank, b.deposit.name, "a1")
            errors.append(refused.value)
            b.configure(environment | {"BROKER_URL": spoilt("BROKER_URL"), "REDIS_URL": spoilt("REDIS_URL")})
            close_runtime(bank)
            with pytest.raises((BrokerError, AMQPError)) as refused:
                b.deposit.apply_async(("a1",), retry=False)
            errors.append(refused.value)
            relay = Relay(bank, confirm_timeout=5)
            assert relay.run_once() == Relayed(0, 0, broker_unavailable=True)
            relay.close()
            # without Redis the work goes on
            assert Deliveries(bank).deliver(b.deposit, "a1").state == "SUCCESS"
    finally:
        b.configure(environment)
        close_runtime(bank)
    said = "".join(line for error in errors for line in [*traceback.format_exception(error), repr(error.args)])
    assert SECRET not in said + caplog.text


# ---------------------------------------------------------------- commands


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def run(*command: str | Path, directory: Path | None = None, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        command,
        cwd=directory,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("module", "options"),
    cases(
        {
            "34-provider-port-in-use": ("sandbox", ("provider", "--data", "{directory}", "--port", "{port}")),
            "34-mail-port-in-use": ("sandbox", ("mail", "--data", "{directory}", "--port", "{port}")),
            "34-metrics-port-in-use": ("idempotency.cli", ("metrics", "--port", "{port}")),
        }
    ),
)
def test_a_port_in_use_is_one_line_that_names_it(
    module: str, options: tuple[str, ...], taken_port: int, tmp_path: Path
) -> None:
    given = [option.format(port=taken_port, directory=tmp_path) for option in options]
    status, said = run(sys.executable, "-m", module, *given, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert status in (1, 2)
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if str(taken_port) in line]
    assert "Address already in use" in line


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("environment", "says"),
    cases(
        {
            "34-no-python": ({"PYTHON": "/nowhere/python3"}, "set-up: no Python 3.11 or newer was found .*set PYTHON="),
            "34-no-network": (
                {"PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_RETRIES": "1", "PYTHON": sys.executable},
                "set-up: the package index cannot be reached; the first run needs a network connection",
            ),
        }
    ),
)
def test_a_set_up_that_cannot_be_is_one_line_that_says_what_to_do(
    environment: dict[str, str], says: str, tmp_path: Path
) -> None:
    root = Path(__file__).parents[3]
    pins = ("constraints.txt", "requirements/pinned.txt", "scripts/pins.py")
    for name in ("scripts/bootstrap", "services/packages.py", "pyproject.toml", "Makefile", *pins):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    # nothing but the index of the case, and no wheels from earlier runs
    clean = {"PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": "", "PIP_NO_CACHE_DIR": "1", "PIP_FIND_LINKS": ""}
    status, said = run("make", "venv", directory=tmp_path, **clean, **environment)
    assert status != 0
    lines = [line for line in said.splitlines() if line.startswith("set-up: ")]
    assert len(lines) == 1
    assert re.search(says, lines[0])
    assert not (tmp_path / ".venv/ready").exists()


@pytest.mark.parametrize(("members", "loses"), [(1, "the loss of its only node"), (2, "the loss of one of its nodes")])
def test_a_queue_on_fewer_nodes_than_three_is_named_with_what_it_may_lose(
    configured: Celery, servers: services.Services, members: int, loses: str
) -> None:
    if servers.broker == "redis":
        pytest.skip("needs RabbitMQ")
    configured.conf.task_queues[0].queue_arguments["x-quorum-initial-group-size"] = members
    found = [each for each in check_configuration(configured, settings_of(configured)) if "group-size" in each.found]
    assert [each.found for each in found] == [f"x-quorum-initial-group-size is {members}, need 3 or none"]
    assert [each.level for each in found] == [Level.WARNING]
    assert loses in str(found[0])


def test_what_a_crash_would_empty_is_refused(configured: Celery, connection: Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE idempotency.outbox SET UNLOGGED")
    found = [f"{each.subject}: {each.found}" for each in doctor(configured) if each.level is Level.REFUSAL]
    assert "database table outbox: UNLOGGED" in found  # and from Postgres 15 on, the sequence of its ids
