"""Two cells: two databases, two virtual hosts of one RabbitMQ, and tenants by the first letters of their names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from uuid import uuid4

import kombu.pools
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import make_url

import services
from idempotency.application import close_runtime
from idempotency.worker.store_runtimes import close_store_runtimes
from tests.support import celled
from tests.support.processes import PYTHONPATH, Processes

Cells = dict[str, dict[str, str]]
Count = Callable[[str, str], int]


@pytest.fixture
def cells(servers: services.Services, template: str, request: pytest.FixtureRequest) -> Iterator[Cells]:
    """The cells' servers: `eu` has a Postgres of the test's own, if there is a fixture `postgres`."""
    if servers.broker != "rabbitmq":
        pytest.skip("needs a RabbitMQ that this run has started")
    with ExitStack() as stack:
        made: Cells = {}
        for name in ("eu", "us"):
            database = f"cell_{name}_{uuid4().hex[:8]}"
            admin = create_engine(servers.database_url, isolation_level="AUTOCOMMIT")
            with admin.connect() as connection:
                connection.execute(text(f"CREATE DATABASE {database} TEMPLATE {template} STRATEGY FILE_COPY"))
            admin.dispose()
            stack.callback(servers.drop_database, database)
            vhost = f"cell-{name}-{uuid4().hex[:8]}"
            made[name] = {
                "database_url": make_url(servers.database_url)
                .set(database=database)
                .render_as_string(hide_password=False),
                "broker_url": servers.create_vhost(vhost),
                "redis_url": servers.redis_url,
                "tenant": f"{name}-house",
            }
            stack.callback(servers.delete_vhost, vhost)
        yield made


@pytest.fixture
def engines(cells: Cells) -> Iterator[dict[str, Engine]]:
    made = {name: create_engine(cell["database_url"], isolation_level="AUTOCOMMIT") for name, cell in cells.items()}
    yield made
    for engine in made.values():
        engine.dispose()


@pytest.fixture
def count(engines: dict[str, Engine]) -> Count:
    """How many rows of an account a cell's database has."""

    def count(cell: str, account: str) -> int:
        with engines[cell].connect() as connection:
            query = text("SELECT count(*) FROM entries WHERE account = :account")
            return int(connection.execute(query, {"account": account}).scalar_one())

    return count


Serve = Callable[[str | None], None]


@pytest.fixture
def serve(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Has this process serve a cell, or none."""

    def serve(cell: str | None) -> None:
        monkeypatch.delenv("IDEMPOTENCY_CELL", raising=False)
        if cell is not None:
            monkeypatch.setenv("IDEMPOTENCY_CELL", cell)
        celled.configure(cells)
        celled.app.amqp._producer_pool = celled.app._pool = None

    before = dict(celled.app.conf.changes)
    celled.app.finalize()
    yield serve
    close_runtime(celled.app)
    close_store_runtimes(celled.app)
    celled.app.conf.changes.clear()
    celled.app.conf.changes.update(before)
    kombu.pools.reset()


@pytest.fixture
def cell_processes(cells: Cells) -> Iterator[Processes]:
    """Workers and relays of the cells, which are told theirs by IDEMPOTENCY_CELL."""
    running = Processes({**os.environ, "CELLS": json.dumps(cells), "PYTHONPATH": PYTHONPATH})
    yield running
    running.kill_all()
