"""Real servers for the whole run, and a fresh database, queue and Redis for each test."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import kombu.pools
import pytest
import redis
from celery import Celery, _state
from sqlalchemy import Engine, Row, create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ProgrammingError

import services
from idempotency import events
from idempotency.application import close_runtime
from idempotency.relay.relay import Relay
from idempotency.streams import declaring
from idempotency.upkeep.maintenance import recover
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries, Record
from tests.support.outside import OutsideWorld
from tests.support.partitions import purging_drops, put_into_partitions
from tests.support.pooler import Pooler
from tests.support.processes import PYTHONPATH, START, Processes, Worker, eventually

# What takes long begins first (with `--no-loadscope-reorder`): begun last, it would be all that runs at the end. Each of
# the four processes is given two files to begin with, the first four and then the next four, so the longest is together
# with the shortest of these.
FIRST = (
    "tests/model/",
    "tests/pipeline/test_demo.py",
    "tests/pipeline/test_chaos.py",
    "tests/controls/",
    "tests/sagas/programs/",
    "tests/pipeline/test_relay_faults.py",
    "tests/integration/test_assert_idempotent.py",
    "tests/integration/test_service_servers.py",
    "tests/saga_crashes/",
    "tests/saga_deploy/",
    "tests/pipeline/test_crashes.py",
    "tests/integration/test_presence.py",
    "tests/integration/test_metrics.py",
    "tests/orders/test_any_order.py",
    "tests/search/",
)


# Room that the files of all servers need, those of the demo and of the chaos included.
ROOM = 8 << 30


def pytest_configure() -> None:
    """Keep the servers' files in memory where there is room: what a test kills is a process, never the machine.

    They write and sync as everywhere else; a sync costs nothing there. With 4 processes on 2 cores, that is most of the wait.
    """
    # of all processes, those with an environment of their own add it to that
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (START, os.environ.get("PYTHONPATH"))))
    memory = Path("/dev/shm")
    if "TMPDIR" not in os.environ and memory.is_dir() and shutil.disk_usage(memory).free >= ROOM:
        os.environ["TMPDIR"] = str(memory)
        tempfile.tempdir = None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failure when it happens: a run that is cut short has no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        where = getattr(report.longrepr, "reprcrash", None)  # at once: whoever ends the run sees no summary
        why = where.message.partition("\n")[0] if where else ""
        print(f"\nfailed: {report.nodeid} ({report.when}) {why}"[:400], flush=True)  # noqa: T201


@pytest.hookimpl(tryfirst=True)  # before those that are long are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        if (few := item.get_closest_marker("few")) is not None:
            seen[test := item.nodeid.partition("[")[0]] += 1
            if seen[test] > few.args[0]:
                item.add_marker("long")
    items.sort(key=lambda item: [not item.nodeid.startswith(file) for file in FIRST])  # stable
    if "PARTITIONED" in os.environ:
        for item in items:
            if item.get_closest_marker("plain"):
                item.add_marker(pytest.mark.skip(reason="about a plain table of records"))
    if "POOLER" in os.environ:
        for item in items:
            if item.get_closest_marker("direct"):
                item.add_marker(pytest.mark.skip(reason="about a connection without a pooler"))


@pytest.fixture(scope="session")
def servers() -> Iterator[services.Services]:
    with services.running() as running:
        yield running


@pytest.fixture(scope="session")
def template(servers: services.Services) -> Iterator[str]:
    """A migrated database; each test gets a copy of it. With PARTITIONED=day, its records are in partitions that a purge drops."""
    from tests.support import bank

    name = f"template_{uuid4().hex[:8]}"
    url = servers.create_database(name)
    bank.prepare(url)
    if width := os.environ.get("PARTITIONED"):
        put_into_partitions(url, width)
        with purging_drops():
            yield name
    else:
        yield name
    servers.drop_database(name)


@pytest.fixture(scope="session")
def maintenance_database(servers: services.Services) -> Iterator[Engine]:
    """Where databases are made and dropped: one connection for all tests, and another after a test that has restarted the server."""
    engine = create_engine(servers.database_url, isolation_level="AUTOCOMMIT", pool_size=1, pool_pre_ping=True)
    yield engine
    engine.dispose()


@pytest.fixture
def database(servers: services.Services, maintenance_database: Engine, template: str) -> Iterator[str]:
    """The address of a fresh database with the library's tables and two of the test's own."""
    name = f"test_{uuid4().hex[:12]}"
    with maintenance_database.connect() as connection:
        # the default writes all of the template to the WAL
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY"))
    yield make_url(servers.database_url).set(database=name).render_as_string(hide_password=False)

    def drop() -> bool:
        try:
            with maintenance_database.connect() as connection:
                connection.execute(text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
        except ProgrammingError:  # a superuser's connection of the test has not ended yet
            return False
        return True

    eventually(drop, timeout=20, what="no superuser is connected")


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    engine = create_engine(database, isolation_level="AUTOCOMMIT")
    yield engine
    engine.dispose()


@pytest.fixture
def superuser(servers: services.Services, database: str) -> Iterator[Engine]:
    """The test's database for what only a superuser may do; the login of all other tests is none."""
    url = make_url(database)
    if "postgres" in servers.servers:
        url = make_url(servers.postgres.superuser_url(url.database or ""))
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    yield engine
    engine.dispose()


@pytest.fixture
def entries(engine: Engine) -> Entries:
    """How many rows of an account are visible: the oracle of every test that counts effects."""

    def count(account: str) -> int:
        with engine.connect() as connection:
            query = text("SELECT count(*) FROM entries WHERE account = :account")
            return int(connection.execute(query, {"account": account}).scalar_one())

    return count


@pytest.fixture
def record(engine: Engine) -> Record:
    """The record of a key, whatever its task."""

    def read(key: str) -> Row[Any] | None:
        with engine.connect() as connection:
            return connection.execute(
                text("SELECT * FROM idempotency.records WHERE key = :key"), {"key": key}
            ).one_or_none()

    return read


@pytest.fixture
def redis_url(servers: services.Services) -> str:
    client = redis.Redis.from_url(servers.redis_url)
    client.flushdb()
    client.close()
    return servers.redis_url


@pytest.fixture(scope="session")
def poolers() -> Iterator[Callable[[URL], URL]]:
    """With `make test POOLER=1`, what stands before a server is found here; each server of a test has its own."""
    running: dict[URL, Pooler] = {}

    def before(database: URL) -> URL:
        server = database.set(database="")
        if server not in running:
            pooler = Pooler(database.render_as_string(hide_password=False), backends=20, ignores_options=False)
            running[server] = stack.enter_context(pooler)
        return make_url(running[server].url).set(database=database.database)

    with ExitStack() as stack:
        yield before


@pytest.fixture
def application_database(database: str, poolers: Callable[[URL], URL]) -> str:
    """The address of the test's database that the application is given; the tests themselves go past the pooler."""
    if "POOLER" not in os.environ:
        return database
    return poolers(make_url(database)).render_as_string(hide_password=False)


@pytest.fixture
def environment(servers: services.Services, application_database: str, redis_url: str) -> Iterator[dict[str, str]]:
    """What a worker process of this test is started with."""
    crash_directory = Path(tempfile.mkdtemp(prefix="crash-"))
    yield {
        **os.environ,
        "DATABASE_URL": application_database,
        "REDIS_URL": redis_url,
        "BROKER_URL": servers.broker_url,
        "BANK_QUEUE": f"bank-{uuid4().hex[:8]}",
        "CRASH_DIRECTORY": str(crash_directory),
        "PYTHONPATH": PYTHONPATH,
    }
    shutil.rmtree(crash_directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_shared() -> Iterator[None]:
    """What a test declares is not given to applications that other tests make later, as Celery would; nor are its streams."""
    shared, streams = set(_state._on_app_finalizers), dict(declaring._declared)
    yield
    declaring._declared.clear()
    declaring._declared.update(streams)
    _state._on_app_finalizers.intersection_update(shared)


@pytest.fixture
def bank(environment: dict[str, str]) -> Iterator[Celery]:
    """The application of tests/support/bank.py, configured for this test, in this process.

    What the test adds to it is taken out again: a task that moves money, or a saga's event, would be met by other tests.
    """
    from tests.support import bank

    settings = dict(bank.app.conf.changes)
    bank.configure(environment)
    # Celery shares the tasks of all applications of a process; whether those of the example are here depends on the order.
    for name in [name for name, task in bank.app.tasks.items() if task.__module__.partition(".")[0] == "tasks"]:
        bank.app.tasks.pop(name)
    tasks, expected = dict(bank.app.tasks), copy.deepcopy(events._expected.get(bank.app, {}))
    yield bank.app
    for name in set(bank.app.tasks) - set(tasks):
        bank.app.tasks.pop(name)
    events._expected[bank.app] = expected
    delete_queue(environment)
    close_runtime(bank.app)
    kombu.pools.reset()
    bank.app.conf.changes.clear()
    bank.app.conf.changes.update(settings)


@pytest.fixture
def configure(bank: Celery) -> Iterator[Callable[..., None]]:
    """Sets the application's settings until the end of the test."""
    changed: set[str] = set()

    def change(**settings: object) -> None:
        for name, value in settings.items():
            bank.conf[f"idempotency_{name}"] = value
            changed.add(f"idempotency_{name}")
        close_runtime(bank)

    yield change
    for name in changed:
        bank.conf.pop(name, None)
        bank.conf.changes.pop(name, None)
    close_runtime(bank)


def delete_queue(environment: dict[str, str]) -> None:
    from tests.support import bank

    # beside other work, RabbitMQ may take longer to answer than Celery's default of 4 s
    with bank.app.connection_for_write(connect_timeout=60) as connection:
        for name in (environment["BANK_QUEUE"], f"{environment['BANK_QUEUE']}-dead"):
            channel = connection.default_channel
            channel.queue_delete(name)


@pytest.fixture
def deliveries(bank: Celery) -> Deliveries:
    """Hands messages to tasks as a worker does, in this process and in the order the test says."""
    return Deliveries(bank)


@pytest.fixture
def outside() -> Iterator[OutsideWorld]:
    """A provider that acts once per key and records every call."""
    world = OutsideWorld()
    yield world
    world.close()


@pytest.fixture
def processes(environment: dict[str, str]) -> Iterator[Processes]:
    running = Processes(environment)
    yield running
    running.kill_all()


@pytest.fixture
def worker(bank: Celery, processes: Processes) -> Worker:
    """A real prefork worker with two pool children."""
    return processes.worker()


@pytest.fixture
def relay(bank: Celery) -> Iterator[Relay]:
    """A relay that also recovers, in a thread of this process."""
    relay = Relay(bank)
    stop = threading.Event()
    thread = threading.Thread(target=relay.run, args=(stop, lambda: (recover(bank), None)[1]), daemon=True)
    thread.start()
    yield relay
    stop.set()
    thread.join(10)
