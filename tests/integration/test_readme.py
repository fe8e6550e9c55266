"""The Python examples of the README and of the pages that go on with its application, run against real servers.

What an example takes for granted (models, a gateway) is written here; of the examples, only the addresses are replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import date, timedelta
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from celery import Celery
from celery.schedules import crontab
from sqlalchemy import create_engine, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import services
from idempotency import (
    DidNotHappen,
    EffectInDoubt,
    EffectUnknown,
    Happened,
    IdempotentTask,
    PermanentError,
    StillUnknown,
    Undecided,
    Unfinished,
    events,
    lookup,
)
from idempotency.application import close_runtime, runtime_of
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Level
from idempotency.relay.relay import Relay
from idempotency.store import people
from idempotency.testing import AssertIdempotent, Outbox, RecordingServer
from tests.support.documents import python_blocks
from tests.support.processes import eventually

BEFORE, AFTER, CALL, TEST = python_blocks("README.md")
ON_FAILED, RECONCILE, DECIDED, BEAT = python_blocks("docs/tasks.md")
(EVENTS,) = python_blocks("docs/events.md")
(ALERT,) = python_blocks("docs/operating.md")
(TYPES,) = python_blocks("docs/types.md")
SEARCH_LAG = 30.0


class Base(DeclarativeBase):
    pass


class Payment(Base):
    __tablename__ = "payments"
    id: Mapped[str] = mapped_column(primary_key=True)
    status: Mapped[str]
    amount: Mapped[int] = mapped_column(default=990)
    charge: Mapped[str | None]

    def as_request(self) -> dict[str, Any]:
        return {"payment_id": self.id, "amount": self.amount}

    def mark_captured(self, charge: dict[str, Any]) -> None:
        self.status, self.charge = "captured", charge["id"]


class Posting(Base):
    __tablename__ = "postings"
    id: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[int]


class Gateway:
    """The provider's client, as an application has one."""

    url = ""

    def capture(self, request: dict[str, Any], *, idempotency_key: str) -> Any:
        headers = {"Idempotency-Key": idempotency_key}
        return httpx.post(f"{self.url}/charges", json=request, headers=headers, timeout=10).json()

    def find_capture(self, request: dict[str, Any], *, doubt: EffectInDoubt) -> StillUnknown:
        return StillUnknown()


class OwnTasks(Celery):
    """An application whose tasks do not become tasks of the other applications in this process."""

    def task(self, *args: Any, **options: Any) -> Any:
        return super().task(*args, **{"shared": False, **options})


class Application(dict[str, Any]):
    """The module `yourapp` of the README, grown example by example."""

    @property
    def app(self) -> Celery:
        app: Celery = self["app"]
        return app

    def run(self, example: str) -> None:
        exec(compile(example, "README.md", "exec"), self)


@pytest.fixture
def yourapp(servers: services.Services, database: str, redis_url: str) -> Iterator[Application]:
    """What the examples take for granted."""
    engine = create_engine(database)
    Base.metadata.create_all(engine)
    app = OwnTasks("yourapp", broker=servers.broker_url, set_as_current=False)
    known = Application(
        __name__="yourapp",
        app=app,
        Session=sessionmaker(engine),
        Payment=Payment,
        Posting=Posting,
        gateway=Gateway(),
        SEARCH_LAG=SEARCH_LAG,
        IdempotentTask=IdempotentTask,
        crontab=crontab,
        date=date,
        timedelta=timedelta,
    )

    @app.task(name="receipt", base=IdempotentTask, bind=True, key="{payment_id}")
    def send_receipt(self: IdempotentTask, payment_id: str) -> None: ...

    known["send_receipt"] = send_receipt
    known["database"], known["redis"] = database, redis_url
    yield known
    events._subscriptions.pop(app, None)
    close_runtime(app)
    with app.connection_for_write() as connection:
        for queue in ("payments", "dead_letters"):
            connection.default_channel.queue_delete(queue)
    app.close()
    engine.dispose()


@pytest.fixture
def adopted(yourapp: Application) -> Application:
    """The application after the README's change."""
    addresses = {"postgresql+psycopg://…": yourapp["database"], "redis://…": yourapp["redis"]}
    example = AFTER
    for placeholder, address in addresses.items():
        assert placeholder in example
        example = example.replace(placeholder, address)
    yourapp.run(example)
    return yourapp


def insert_payment(session: sessionmaker[Session]) -> None:
    with session.begin() as opened:
        opened.add(Payment(id="p1", status="pending"))


def test_before_it_is_a_task_of_celery(yourapp: Application) -> None:
    yourapp.run(BEFORE)
    yourapp["capture_payment"]("p1")
    assert not isinstance(yourapp.app.tasks["yourapp.capture_payment"], IdempotentTask)


def test_after_it_passes_doctor_without_a_warning(adopted: Application) -> None:
    adopted["payment_id"] = "p1"
    adopted.run(CALL)
    relay = Relay(adopted.app)
    assert relay.run_once().published == 1  # which declares the queues
    relay.close()
    Outbox(adopted.app).reset()  # nothing waits for a worker, which this test does without
    with adopted.app.connection_for_write() as connection:
        connection.default_channel.queue_purge("payments")
    with runtime_of(adopted.app).autocommit() as connection:  # the example's tasks, which Celery shares, move money
        people.add(connection, "ann", "admin", token_hash="a" * 64, days=1)
    assert [str(finding) for finding in doctor(adopted.app) if finding.level is not Level.OK] == []


def test_the_call_captures_the_payment_once(adopted: Application, recording_server: RecordingServer) -> None:
    adopted["gateway"].url, adopted["payment_id"] = recording_server.url, "p1"
    outbox = Outbox(adopted.app)
    adopted.run(CALL)

    assert [(one.task, one.key, one.status) for one in outbox.run()] == [
        ("payments.capture", "p1", "completed"),
        ("receipt", "p1", "completed"),
    ]
    assert adopted["capture_payment"]("p1") == {"charge": "act-1"}
    assert lookup(adopted.app, "payments.capture", "p1").result == {"charge": "act-1"}
    with adopted["Session"]() as session:
        assert session.execute(select(Payment.status, Payment.charge)).one() == ("captured", "act-1")
    assert len(recording_server.calls) == 1


def test_reconcile_answers_what_the_provider_knows(yourapp: Application) -> None:
    charges: list[Any] = [{"id": "ch_1", "status": "succeeded"}, None, {"id": "ch_1", "status": "processing"}]
    yourapp["provider"] = SimpleNamespace(search_charge=lambda metadata: charges.pop(0))
    yourapp.run(RECONCILE)

    ended = [None, 2 * SEARCH_LAG, SEARCH_LAG / 2]
    assert [
        yourapp["find_capture"]({"payment_id": "p1"}, doubt=EffectInDoubt("key", 60.0, seconds)) for seconds in ended
    ] == [Happened({"id": "ch_1", "status": "succeeded"}), DidNotHappen(), StillUnknown(ask_again=SEARCH_LAG)]


@pytest.mark.parametrize("error", [PermanentError("declined", "declined"), EffectUnknown("silent"), Unfinished("half")])
def test_the_rows_of_a_failure_say_failed_only_if_nothing_was_charged(
    yourapp: Application, error: PermanentError
) -> None:
    order = SimpleNamespace(status="open")
    yourapp["Order"] = object
    yourapp.run(ON_FAILED)
    session = SimpleNamespace(get=lambda *_, **__: order)
    yourapp["charge_failed"](session, SimpleNamespace(arguments={"order_id": "o1"}), error)
    assert order.status == ("failed" if type(error) is PermanentError else "unclear")


def test_a_decision_is_noted_and_wakes_the_operation(adopted: Application) -> None:
    adopted["payment_id"] = "p1"
    decided: list[str] = []

    def find(request: dict[str, Any], *, doubt: EffectInDoubt) -> Happened:
        return Happened({"id": decided[0]})

    def capture(request: dict[str, Any], *, idempotency_key: str) -> None:
        raise Undecided(3600, "the bank decides")

    adopted["gateway"] = SimpleNamespace(capture=capture, find_capture=find)
    outbox = Outbox(adopted.app)
    adopted.run(CALL)
    assert [type(one.error) for one in outbox.run()] == [Undecided]
    adopted |= {"update": update, "Payment": Payment, "capture": adopted["capture_payment"]}
    adopted.run(DECIDED)
    decided.append("ch_1")
    with adopted["Session"].begin() as session:
        adopted["decided"](session, "p1")
    assert outbox.run()[0].result == {"charge": "ch_1"}


def test_an_event_reaches_the_ledger(adopted: Application) -> None:
    with adopted["Session"].begin() as session:
        adopted["session"] = session
        adopted.run(EVENTS)
    assert [one.task for one in Outbox(adopted.app).run()] == ["ledger.post_order"]
    with adopted["Session"]() as session:
        assert session.scalars(select(Posting.order)).all() == [17]


def test_a_night_closes_its_day_once_however_often_beat_ticks(adopted: Application) -> None:
    adopted.run(BEAT)
    for _ in range(2):
        adopted["every_night"]()
    yesterday = str(date.today() - timedelta(days=1))  # noqa: DTZ011  as in the example
    assert {(one.task, one.key) for one in Outbox(adopted.app).run()} == {("yourapp.close_day", yesterday)}
    (entry,) = adopted.app.conf.beat_schedule.values()
    assert entry["task"] in adopted.app.tasks


def test_the_alert_task_finds_nothing_to_tell(adopted: Application) -> None:
    adopted.run(ALERT)
    assert adopted["alert"]() == 0
    assert adopted.app.conf.beat_schedule["alert"]["task"] in adopted.app.tasks


@pytest.mark.long
def test_the_example_of_a_test_passes(
    adopted: Application,
    assert_idempotent: AssertIdempotent,
    recording_server: RecordingServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adopted["insert_payment"] = lambda: insert_payment(adopted["Session"])
    adopted.run(TEST)
    adopted["test_capture_is_idempotent"](assert_idempotent, recording_server, monkeypatch)


def test_the_example_of_a_typed_task_returns_its_result(adopted: Application) -> None:
    adopted.run(TYPES)
    outbox = Outbox(adopted.app)
    worker = threading.Thread(target=lambda: (eventually(lambda: outbox.waiting), outbox.run()), daemon=True)
    worker.start()
    assert adopted["charge"]("p1") == "p1"
    worker.join(30)
