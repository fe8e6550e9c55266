"""Workers and relays of two cells, on two Postgres servers and one RabbitMQ: each operation once, where its tenant is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from idempotency import runtime_for
from services.postgres import Postgres, create_database
from tests.cells.conftest import Cells, Count, Serve
from tests.faults.own_postgres import fixture_postgres  # noqa: F401
from tests.support import bank
from tests.support.celled import app, deposit
from tests.support.processes import PYTHONPATH, Processes, eventually


@pytest.fixture
def cells(cells: Cells, postgres: Postgres) -> Cells:
    """The first cell has a server of its own, which a test stops."""
    cells["eu"]["database_url"] = create_database(postgres.url, f"cell_eu_{uuid4().hex[:8]}")
    bank.prepare(cells["eu"]["database_url"])
    return cells


@contextmanager
def relay(processes: Processes, cell: str) -> Iterator[None]:
    command = [sys.executable, "-m", "idempotency.cli", "relay", "-A", "tests.support.celled"]
    process = subprocess.Popen(
        command, env=processes.environment | {"IDEMPOTENCY_CELL": cell}, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def call(tenant: str, account: str) -> None:
    with Session(runtime_for(app, tenant).engine) as session, session.begin():
        deposit.using(tenant=tenant).enqueue(session, account)


@pytest.mark.long  # half a minute, most of it starts of processes
def test_each_operation_once_in_its_own_database_and_one_cells_end_is_not_the_others(
    cells: Cells, cell_processes: Processes, serve: Serve, count: Count, engines: dict[str, Engine], postgres: Postgres
) -> None:
    serve(None)
    with ExitStack() as stack:
        for cell in cells:
            stack.enter_context(relay(cell_processes, cell))
            cell_processes.start("--concurrency", "1", app="tests.support.celled", IDEMPOTENCY_CELL=cell)
        for number in range(6):
            cell = ("eu", "us")[number % 2]
            for _ in range(2):  # the same call twice
                call(f"{cell}-{number}", f"a{number}")
        for number in range(6):
            here, there = ("eu", "us") if number % 2 == 0 else ("us", "eu")
            for account in (f"a{number}", f"receipt of a{number}"):
                eventually(lambda a=account, c=here: count(c, a) == 1, timeout=90, what=f"{account} in {here}")
                assert count(there, account) == 0

        postgres.kill()
        with pytest.raises(OperationalError):
            call("eu-1", "while it is away")
        call("us-1", "beside it")
        eventually(lambda: count("us", "receipt of beside it") == 1, what="the other cell goes on")
        postgres.start()
        engines["eu"].dispose()
        call("eu-1", "after it")
        eventually(lambda: count("eu", "receipt of after it") == 1, timeout=90, what="the cell goes on")
    assert [count(cell, f"a{number}") for number in range(6) for cell in cells] == [1, 0, 0, 1] * 3
    with runtime_for(app, "us-1").autocommit() as connection:
        assert connection.execute(text("SELECT count(*) FROM idempotency.dead_letters")).scalar_one() == 0


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("command", [["idempotency.cli", "relay"], ["celery", "worker"], ["celery", "beat"]])
def test_a_process_that_serves_no_cell_does_not_start(cells: Cells, command: list[str]) -> None:
    module, name = command
    arguments = ["relay", "-A", "tests.support.celled"] if name == "relay" else ["-A", "tests.support.celled", name]
    environment = {**os.environ, "CELLS": json.dumps(cells), "PYTHONPATH": PYTHONPATH}
    environment.pop("IDEMPOTENCY_CELL", None)
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 1
    assert "this process serves none of eu, us; set IDEMPOTENCY_CELL" in done.stderr
