"""Flower beside a real worker: what it shows, to whom, and what it must not show."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from celery import Celery
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import services
from idempotency.application import close_runtime
from idempotency.relay.relay import Relay
from tests.support import bank as bank_module
from tests.support.broker_users import make_users, virtual_host
from tests.support.commands import runner
from tests.support.processes import Processes, eventually
from tests.support.tasks import transactional

pytest.importorskip("flower")

CREDENTIALS = ("operator", uuid4().hex)


@contextmanager
def flower(environment: dict[str, str]) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "tests.support.bank",
        "flower",
        "--address=127.0.0.1",
        f"--port={port}",
    ]
    process = subprocess.Popen(
        command,
        # in the environment, because all users of the machine can read a command line
        env=environment | {"FLOWER_BASIC_AUTH": ":".join(CREDENTIALS)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: answers(f"{url}/healthcheck"), what="flower")
        yield url
    finally:
        process.kill()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def test_flower_shows_workers_tasks_and_keys_but_no_arguments_or_results(
    bank: Celery, processes: Processes, relay: Relay, engine: Engine
) -> None:
    processes.worker("--concurrency", "1")
    with flower(processes.environment) as url, httpx.Client(base_url=url, auth=CREDENTIALS, timeout=30) as client:
        for path in ("/api/workers", "/api/tasks", "/", "/tasks"):
            assert httpx.get(url + path).status_code == httpx.codes.UNAUTHORIZED
            assert httpx.get(url + path, auth=("operator", "guess")).status_code == httpx.codes.UNAUTHORIZED
        eventually(lambda: client.get("/api/workers").json(), what="workers")
        # the worker sends no events until Flower has asked for them
        eventually(lambda: is_watched(client), what="events")

        direct, secret = uuid4().hex, uuid4().hex
        bank_module.returning.apply_async((secret,), idempotency_key=direct)
        stored = uuid4().hex
        with Session(transactional(engine)) as session, session.begin():
            bank_module.returning.enqueue(session, secret, idempotency_key=stored)
        for key in (direct, stored):
            task = eventually(finished(client, key), what="a finished task with its key")
            assert task["name"] == bank_module.returning.name
            assert task["state"] == "SUCCESS"
            assert task["result"] == ", ..."
            assert secret not in client.get(f"/api/task/info/{task['uuid']}").text
        assert secret not in client.get("/api/tasks").text


@pytest.mark.long
def test_neither_flower_nor_remote_control_shows_arguments_of_what_runs_or_waits(
    bank: Celery, processes: Processes
) -> None:
    processes.worker("--concurrency", "1", "--prefetch-multiplier", "4")
    running, waiting = uuid4().hex, uuid4().hex
    bank_module.slow_deposit.apply_async((running, 15.0), idempotency_key="k1")
    bank_module.returning.apply_async((waiting,), idempotency_key="k2")
    inspect = bank.control.inspect(timeout=5, limit=1)
    eventually(lambda: "idempotency-key=k1" in f"{inspect.active()}", what="the running task")
    eventually(lambda: "idempotency-key=k2" in f"{inspect.reserved()}", what="the waiting task")
    shown = [f"{inspect.active()}", f"{inspect.reserved()}"]
    with flower(processes.environment) as url, httpx.Client(base_url=url, auth=CREDENTIALS, timeout=30) as client:
        (name,) = eventually(lambda: client.get("/api/workers?refresh=1").json(), what="workers")
        shown.append(client.get("/api/workers", params={"workername": name, "refresh": "1"}).text)
        assert "idempotency-key=k1" in shown[-1]
        shown.append(client.get(f"/worker/{name}").text)
    assert not any(secret in each for secret in (running, waiting) for each in shown)


@pytest.mark.long
def test_flower_follows_tasks_with_a_user_that_may_do_nothing_else(
    environment: dict[str, str],
    servers: services.Services,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ExitStack() as stack:
        environment |= {"BROKER_URL": stack.enter_context(virtual_host(servers)), "REMOTE_CONTROL": ""}
        bank_module.configure(environment)
        stack.callback(close_runtime, bank_module.app)
        users = make_users(runner(monkeypatch, capsys), servers, environment, tmp_path, monkeypatch)
        processes = Processes(environment | {"BROKER_URL": users.url("worker")})
        stack.callback(processes.kill_all)
        url = stack.enter_context(flower(environment | {"BROKER_URL": users.url("flower")}))
        client = stack.enter_context(httpx.Client(base_url=url, auth=CREDENTIALS, timeout=30))
        # without remote control, Flower cannot turn events on
        processes.worker("--concurrency", "1", "-E")
        with users.connected(bank_module.app, "application") as connection:
            bank_module.returning.apply_async((uuid4().hex,), idempotency_key="seen", connection=connection)
        assert eventually(finished(client, "seen"), what="a finished task with its key")


def is_watched(client: httpx.Client) -> bool:
    bank_module.deposit.delay(account=uuid4().hex)
    return bool(client.get("/api/tasks").json())


def finished(client: httpx.Client, key: str) -> Callable[[], dict[str, Any] | None]:
    def look() -> dict[str, Any] | None:
        tasks: dict[str, dict[str, Any]] = client.get("/api/tasks").json()
        for task in tasks.values():
            if f"idempotency-key={key}" in (task["args"] or "") and task["state"] == "SUCCESS":
                return task
        return None

    return look


def test_make_keeps_the_credentials_out_of_the_command_line() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "flower"],
        env=os.environ | {"FLOWER_BASIC_AUTH": ":".join(CREDENTIALS)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--address=127.0.0.1" in done.stdout
    assert CREDENTIALS[1] not in done.stdout
