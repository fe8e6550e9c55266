"""Each test here shows one cell of the fault matrix (cells.py), in its own virtual host and database.

    @pytest.mark.cell("F1", "P2")
    def test_…(cell, …):
        …
        cell.saw("R,S")     # what was observed, derived from what is left behind

At the end of each the accounts are checked: at most one committed effect per key, rows exactly when completed, and
accepted = completed + failed + dead letters + still queued.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import celery as celery_package
import pytest
import redis
from celery import Celery
from kombu import Connection as BrokerConnection
from sqlalchemy import create_engine, text

import services
from idempotency.wire.headers import KEY_HEADER
from tests.faults import accounts, cells
from tests.faults.scene import scene as scene
from tests.support.processes import Processes

FOLDER = Path(__file__).parent
# What the reporting plug-in reads: the cell and what was seen in it.
SAW = "cell"
VERSIONS = pytest.StashKey[dict[str, str]]()
# The longest that a broker takes to put back what a killed worker had not acknowledged.
REQUEUED = 5.0
_PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker("faults")
            # `-k F1-` finds the tests of a fault, `-k F1-P2` those of a cell
            for mark in item.iter_markers("cell"):
                item.extra_keyword_matches.add("-".join(mark.args))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed
    return report


class SeenCell:
    """The cell that a test shows. `saw` takes the observed letter and refuses one that the matrix does not expect."""

    def __init__(self, cell: cells.Cell, note: Callable[[str], None]) -> None:
        self.expected = cell
        self.seen: list[str] = []
        self.accepted: set[str] = set()
        self._note = note

    def saw(self, outcome: str) -> None:
        """Say what was observed, as the evidence has it."""
        self._note(outcome)
        self.seen.append(outcome)
        assert outcome in self.expected.outcomes, (
            f"{self.expected.name}: seen {outcome!r}, the matrix expects {self.expected.expected!r} "
            f"({', '.join(sorted(self.expected.outcomes))})"
        )

    def accepts(self, key: str) -> None:
        """Expect a key that is sent past the outbox: without this its loss would leave no trace."""
        self.accepted.add(key)

    def not_run(self, reason: str) -> NoReturn:
        """This machine cannot show the cell; printed as "not run", never as passed."""
        pytest.skip(reason)


@pytest.fixture
def cell(request: pytest.FixtureRequest, marked_cell: SeenCell) -> Iterator[SeenCell]:
    """The cell of the test's mark; its accounts are checked at the end."""
    yield marked_cell
    if not request.node.stash.get(_PASSED, False):
        return
    assert marked_cell.seen, f"{marked_cell.expected.name}: the test passed without saying what it saw"


@pytest.fixture
def marked_cell(request: pytest.FixtureRequest) -> SeenCell:
    mark = request.node.get_closest_marker("cell")
    if mark is None:
        pytest.fail("a test of the fault matrix needs @pytest.mark.cell(fault, phase)")
    found = cells.find(*mark.args)
    return SeenCell(found, lambda seen: request.node.user_properties.append((SAW, (*mark.args, seen))))


@pytest.fixture(autouse=True)
def checked_accounts(
    request: pytest.FixtureRequest, marked_cell: SeenCell, bank: Celery, processes: Processes, database: str
) -> Iterator[None]:
    """When the test has passed and its workers are gone: what the ledgers say together."""
    broker_url = bank.conf.broker_url
    outside = request.getfixturevalue("outside") if "outside" in request.fixturenames else None
    yield
    processes.kill_all()
    if not request.node.stash.get(_PASSED, False):
        return
    acts = {} if outside is None else dict(outside.acts)
    engine = create_engine(database, isolation_level="AUTOCOMMIT")
    deadline = time.monotonic() + REQUEUED
    try:
        while True:
            books = accounts.read(engine, marked_cell.accepted, queued_keys(bank, broker_url), acts)
            if not books.violations() or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    finally:
        engine.dispose()
    assert books.keys, "the test accepted no operation"
    assert books.violations() == []


def queued_keys(app: Celery, broker_url: str) -> list[str]:
    """The idempotency keys of the messages that are still in the queues; they have no consumer any more."""
    keys = []
    queue = app.conf.task_default_queue
    with BrokerConnection(broker_url) as broker:
        for name in (queue, f"{queue}-dead"):
            channel = broker.channel()
            try:
                while (message := channel.basic_get(name, no_ack=False)) is not None:
                    keys.append(str(message.headers.get(KEY_HEADER)))
            except broker.channel_errors:
                continue  # the queue is gone
    return keys


@pytest.fixture
def environment(environment: dict[str, str], servers: services.Services) -> Iterator[dict[str, str]]:
    """As for every worker, with its own virtual host in the run's RabbitMQ."""
    if servers.broker != "rabbitmq":
        pytest.skip(f"needs a RabbitMQ of our own, and the broker is {servers.broker}")
    vhost = f"cell-{uuid4().hex[:8]}"
    yield environment | {"BROKER_URL": servers.create_vhost(vhost)}
    servers.delete_vhost(vhost)


@pytest.fixture(scope="session", autouse=True)
def versions(request: pytest.FixtureRequest, servers: services.Services) -> None:
    """What the matrix was seen with."""
    found = {"Python": platform.python_version(), "Celery": celery_package.__version__}
    engine = create_engine(servers.database_url)
    with engine.connect() as connection:
        found["Postgres"] = str(connection.execute(text("SHOW server_version")).scalar_one()).split()[0]
    engine.dispose()
    with redis.Redis.from_url(servers.redis_url) as client:
        found["Redis"] = client.info()["redis_version"]
    if servers.broker == "rabbitmq":
        with BrokerConnection(servers.broker_url) as broker:
            broker.connect()
            found["RabbitMQ"] = broker.connection.server_properties["version"]
    request.config.stash[VERSIONS] = found
