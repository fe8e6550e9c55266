"""The fixtures for an application's own tests: the outbox run inline, the test's transaction; docs/testing.md runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from celery import Celery
from pydantic import SecretStr
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

import services
from idempotency import (
    CallRefused,
    Defer,
    Handle,
    IdempotentTask,
    OperationFailed,
    OperationId,
    PermanentError,
    Undecided,
    events,
    lookup,
    publish,
    subscribe,
)
from idempotency.application import runtime_of
from idempotency.testing import Outbox, prepare, rolled_back
from idempotency.testing.database import MARK
from tests.support.bank import INSERT, deposit
from tests.support.documents import python_blocks
from tests.support.operations import Entries, Record
from tests.support.tasks import make_task, transactional

SHOP = """
import os

from celery import Celery
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from datetime import timedelta

from idempotency import IdempotentTask, publish
from idempotency.queues import quorum_queue
from idempotency.sagas import saga

app = Celery("shop", broker="amqp://127.0.0.1:1//")  # no test needs it
app.conf.update(
    task_queues=[quorum_queue("shop")],
    task_default_queue="shop",
    idempotency_database_url=os.environ["DATABASE_URL"],
)
engine = create_engine(os.environ["DATABASE_URL"])
Session = sessionmaker(engine)


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customers"
    id: Mapped[str] = mapped_column(primary_key=True)
    points: Mapped[int] = mapped_column(default=0)


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)
    customer: Mapped[str]
    cents: Mapped[int]


class Voucher(Base):
    __tablename__ = "vouchers"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]


@app.task(name="shop.award_points", base=IdempotentTask, bind=True, key="{order}")
def award_points(self, order):
    order = self.session.get(Order, order)
    customer = self.session.get(Customer, order.customer) or Customer(id=order.customer, points=0)
    self.session.add(customer)
    customer.points += order.cents // 100
    if order.cents >= 10_000:
        issue_voucher.enqueue(self.session, order.id)
    return {"points": customer.points}


@app.task(name="shop.issue_voucher", base=IdempotentTask, bind=True, key="{order}")
def issue_voucher(self, order):
    self.session.add(Voucher(customer=self.session.get(Order, order).customer))


@saga("shop.win_back", key="{order}", events={"order.paid": "{customer}"}, app=app)
def win_back(saga, order, customer):
    if saga.wait_for("order.paid", match=customer, timeout=timedelta(days=30)) is not None:
        return "came back"
    saga.call(issue_voucher, order)
    return "voucher"


def create_tables():
    Base.metadata.create_all(engine)
    engine.dispose()
"""


@pytest.fixture
def test_database(servers: services.Services) -> Iterator[str]:
    """The address of a new database whose name says that it is for tests."""
    name = f"test_{uuid4().hex[:8]}"
    yield servers.create_database(name)
    servers.drop_database(name)


def test_the_examples_of_the_page_about_testing_run_as_they_are(test_database: str, tmp_path: Path) -> None:
    conftest, *examples = python_blocks("docs/testing.md")
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "conftest.py").write_text(conftest + "\n\nimport shop\n\nshop.create_tables()\n")
    (tmp_path / "test_shop.py").write_text("from shop import *\n\n\n" + "\n\n".join(examples))
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"DATABASE_URL": test_database},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert "3 passed" in done.stdout


DJANGO = """
import os

import django
import pytest
import pytest_django
from celery import Celery
from django.conf import settings
from sqlalchemy.engine import make_url

from idempotency.queues import quorum_queue

url = make_url(os.environ["DATABASE_URL"])
place = {"HOST": url.host, "PORT": url.port, "USER": url.username, "PASSWORD": url.password}
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "development", **place}},
    INSTALLED_APPS=["idempotency.contrib.django"],
    CELERY_TASK_QUEUES=[quorum_queue("shop")],
    CELERY_TASK_DEFAULT_QUEUE="shop",
    CELERY_BROKER_URL="amqp://127.0.0.1:1//",
)
django.setup()


def pytest_configure(config):
    config.pluginmanager.register(pytest_django, "django")


@pytest.fixture(scope="session")
def idempotency_app():
    app = Celery("shop")
    app.config_from_object("django.conf:settings", namespace="CELERY")
    return app
"""

# What it does as far as this library sees: another name in DATABASES.
PYTEST_DJANGO = """
import os

import pytest
from django.db import connections
from sqlalchemy.engine import make_url


@pytest.fixture(scope="session")
def django_db_setup():
    connections["default"].settings_dict["NAME"] = make_url(os.environ["DATABASE_URL"]).database
"""


@pytest.mark.skipif(
    find_spec("pytest_django") is not None, reason="pytest-django is installed; tests/ecosystem tries the real one"
)
@pytest.mark.long
def test_with_pytest_django_the_fixtures_use_the_test_database_that_it_makes(
    test_database: str, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(DJANGO)
    (tmp_path / "pytest_django.py").write_text(PYTEST_DJANGO)
    (tmp_path / "test_it.py").write_text("def test_it(idempotency_outbox): assert idempotency_outbox.run() == []\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=tmp_path,
        env=os.environ | {"DATABASE_URL": test_database},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]


@pytest.mark.long
def test_without_an_application_the_fixtures_say_which_one_to_define(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(idempotency_outbox): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "define a fixture idempotency_app, of scope session, that returns your Celery application" in done.stdout


# ---------------------------------------------------------------- the outbox, run inline


@pytest.fixture
def outbox(bank: Celery) -> Outbox:
    return Outbox(bank)


def enqueue(engine: Engine, task: Any, *args: Any, **kwargs: Any) -> None:
    with Session(transactional(engine)) as session, session.begin():
        task.enqueue(session, *args, **kwargs)


def body(*errors: Exception | None) -> Callable[..., str]:
    """A body that writes a row and then raises these errors, one in each attempt."""
    script = list(errors)

    def run(self: IdempotentTask, account: str) -> str:
        self.session.execute(INSERT, {"account": account, "amount": 1})
        if script and (error := script.pop(0)) is not None:
            raise error
        return account

    return run


def test_attempts_and_deferrals_follow_at_once(bank: Celery, engine: Engine, outbox: Outbox, entries: Entries) -> None:
    task = make_task(bank, body(ValueError("once"), Defer(3600, "later"), None), key="{account}")
    enqueue(engine, task, "a", countdown=3600)

    ran = outbox.run()

    assert [(one.status, type(one.error)) for one in ran] == [
        ("released", ValueError),
        ("released", Defer),
        ("completed", type(None)),
    ]
    assert (ran[-1].result, entries("a"), outbox.run()) == ("a", 1, [])


def test_the_exception_of_a_failed_operation_reaches_the_test(bank: Celery, engine: Engine, outbox: Outbox) -> None:
    task = make_task(bank, body(PermanentError("no such account", "no_account")), key="{account}")
    enqueue(engine, task, "a")
    with pytest.raises(PermanentError, match="no such account"):
        outbox.run()

    enqueue(engine, task, "a")
    (again,) = outbox.run(may_fail=True)
    assert (again.status, type(again.error)) == ("failed", OperationFailed)


def test_a_task_that_enqueues_itself_for_ever_ends_the_test(bank: Celery, engine: Engine, outbox: Outbox) -> None:
    def endless(self: IdempotentTask, number: int) -> None:
        task.enqueue(self.session, number + 1)

    task = make_task(bank, endless, key="{number}")
    enqueue(engine, task, 1)
    with pytest.raises(AssertionError, match=r"the outbox is not empty after 5 deliveries; next: .* 6"):
        outbox.run(limit=5)
    assert [one.key for one in outbox.waiting] == ["6"]


def test_what_a_provider_has_not_decided_waits_until_it_is_woken_or_time_passes(
    bank: Celery, engine: Engine, outbox: Outbox, entries: Entries
) -> None:
    task = make_task(bank, body(*[Undecided(3600, "the bank decides")] * 3, None), key="{account}")
    enqueue(engine, task, "a")
    assert [type(one.error) for one in outbox.run()] == [Undecided]
    assert (outbox.run(), outbox.waiting) == ([], [])
    with Session(transactional(engine)) as session, session.begin():
        Handle(bank, OperationId("default", task.name, "a")).wake(session)
    assert [one.key for one in outbox.waiting] == ["a"]
    assert [type(one.error) for one in outbox.run()] == [Undecided]
    outbox.pass_time(timedelta(minutes=30))
    assert outbox.run() == []
    outbox.pass_time(timedelta(minutes=31))
    assert [one.status for one in outbox.run()] == ["released"]
    outbox.pass_time(3601)
    assert [one.status for one in outbox.run()] == ["completed"]
    assert entries("a") == 1
    assert lookup(bank, task.name, "a").error is None


def test_an_open_transaction_in_the_test_is_refused_rather_than_waited_for(
    bank: Celery, database: str, outbox: Outbox
) -> None:
    with runtime_of(bank).engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        with pytest.raises(CallRefused, match="transaction open"):
            outbox.run()


def test_a_task_of_another_application_is_named(bank: Celery, engine: Engine, outbox: Outbox) -> None:
    task = make_task(bank, body(), key="{account}")
    enqueue(engine, task, "a")
    bank.tasks.pop(task.name)
    with pytest.raises(AssertionError, match=f"{task.name}: the application has no such task"):
        outbox.run()


def test_events_reach_their_consumers_and_what_leaves_the_application_is_not_sent(
    bank: Celery, engine: Engine, outbox: Outbox, entries: Entries
) -> None:
    def hear(self: IdempotentTask, event: dict[str, Any]) -> None:
        self.session.execute(INSERT, {"account": event["data"]["order"], "amount": 1})

    heard = subscribe("order.*", consumer="tests", app=bank)(hear)
    try:
        with Session(transactional(engine)) as session, session.begin():
            publish(session, "order.paid", {"order": "o1"}, exchange="orders", app=bank)
        assert [one.status for one in outbox.run()] == ["completed"]
        assert (entries("o1"), outbox.waiting) == (1, [])
    finally:
        events._subscriptions.pop(bank)
        bank.tasks.pop(heard.name)


def test_reset_makes_every_key_new(engine: Engine, outbox: Outbox, entries: Entries, record: Record) -> None:
    for _ in range(2):
        enqueue(engine, deposit, "a")
        outbox.run()
    assert entries("a") == 1

    outbox.reset()
    assert record("a") is None
    enqueue(engine, deposit, "a")
    outbox.run()
    assert entries("a") == 2


def test_reset_needs_no_redis(bank: Celery, engine: Engine, outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    enqueue(engine, deposit, account="a1")
    outbox.run()
    runtime = runtime_of(bank)
    away = runtime.settings.model_copy(update={"redis_url": SecretStr("redis://127.0.0.1:1")})
    monkeypatch.setattr(runtime, "settings", away)
    outbox.reset()
    enqueue(engine, deposit, account="a1")
    assert [ran.status for ran in outbox.run()] == ["completed"]


def test_a_database_that_is_not_for_tests_is_refused(bank: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idempotency.testing.database.MARK", re.compile("no such name"))
    for refuses in (Outbox, prepare):
        with pytest.raises(
            ValueError, match=r"'test_.*' does not say that it is one for tests: it needs the word"
        ) as error:
            refuses(bank)
        assert "allow_database" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "is_for_tests"),
    [
        *((name, True) for name in ("test", "tests", "test_shop", "shop_test", "shop_test_1", "shop-tests", "Test1")),
        *((name, False) for name in ("latest", "contest", "shop_latest_1", "testimony", "attested", "shop")),
    ],
)
def test_a_database_for_tests_has_the_word_in_its_name(name: str, is_for_tests: bool) -> None:
    assert (MARK.search(name) is not None) is is_for_tests


# ---------------------------------------------------------------- in the test's transaction


@pytest.fixture
def transaction(bank: Celery) -> Iterator[Connection]:
    with rolled_back(bank) as connection:
        yield connection


def count(connection: Connection, table: str) -> int:
    return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())


def test_a_transaction_holds_the_whole_operation_and_leaves_nothing(
    bank: Celery, engine: Engine, entries: Entries
) -> None:
    failing = make_task(bank, body(ValueError("once"), PermanentError("never")), key="{account}")
    with rolled_back(bank) as connection:
        outbox = Outbox(bank)
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            handle = deposit.enqueue(session, "a", amount=5)
            failing.enqueue(session, "b")
            session.commit()
        assert [one.status for one in outbox.run(may_fail=True)] == ["completed", "released", "failed"]
        assert (handle.status(), count(connection, "entries")) == ("completed", 1)
        assert count(connection, "idempotency.dead_letters") == 1
        assert entries("a") == 0  # to every other connection

    with engine.connect() as connection:
        for table in ("entries", "idempotency.records", "idempotency.outbox", "idempotency.dead_letters"):
            assert count(connection, table) == 0


def test_a_failed_statement_in_a_body_does_not_end_the_tests_transaction(bank: Celery, transaction: Connection) -> None:
    def stumble(self: IdempotentTask, account: str) -> None:
        self.session.execute(INSERT, {"account": account, "amount": 1})
        self.session.execute(text("SELECT 1 / 0"))

    task = make_task(bank, stumble, key="{account}", permanent_errors=(Exception,))
    transaction.execute(INSERT, {"account": "mine", "amount": 1})
    task.enqueue(transaction, "a")
    (ran,) = Outbox(bank).run(may_fail=True)
    assert (ran.status, count(transaction, "entries")) == ("failed", 1)


def test_a_direct_call_with_steps_and_effects_joins_the_transaction(
    bank: Celery, transaction: Connection, entries: Entries
) -> None:
    def write(session: Session, account: str) -> str:
        session.execute(INSERT, {"account": account, "amount": 1})
        return account

    def act(*, idempotency_key: str) -> str:
        return "acted"

    def both(self: IdempotentTask, account: str) -> list[str]:
        return [self.step("write", write, account), self.effect("act", act)]

    task = make_task(bank, both, key="{account}")
    assert task("a") == task("a") == ["a", "acted"]
    assert (count(transaction, "entries"), entries("a")) == (1, 0)


def test_after_the_transaction_the_application_commits_again(bank: Celery, entries: Entries) -> None:
    before = runtime_of(bank)
    with rolled_back(bank):
        assert runtime_of(bank) is not before
    assert runtime_of(bank) is before
    deposit("a")
    assert entries("a") == 1


def test_the_plugin_imports_nothing_until_it_is_used() -> None:
    code = "import sys, idempotency_pytest; print({'idempotency', 'celery', 'sqlalchemy'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def test_the_servers_answer_is_given_once_for_each_key(recording_server: Any) -> None:
    def post(key: str) -> Any:
        return httpx.post(recording_server.url, headers={"Idempotency-Key": key}, json={}).json()

    answers = iter([(500, {}), (200, {"n": 1}), (200, {"n": 2})])
    recording_server.answer = lambda call: next(answers)
    assert [post("a"), post("a"), post("a"), post("b")] == [{}, {"n": 1}, {"n": 1}, {"n": 2}]
    assert [call.key for call in recording_server.calls] == ["a", "a", "a", "b"]
