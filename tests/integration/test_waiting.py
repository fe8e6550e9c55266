"""Until its claim is answered, a message is rejected only for its own defects; otherwise it waits and loses nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from kombu import Exchange
from sqlalchemy import Engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from idempotency.application import close_runtime
from idempotency.errors import Unanswered
from idempotency.observe import metrics
from idempotency.store import letters, outbox, statements
from idempotency.wire.headers import ETA_HEADER, GENERATION_HEADER, ORIGIN_HEADER, REVOKED_HEADER, WAITS_HEADER
from idempotency.worker import waiting
from idempotency.worker.waiting import Waiting
from tests.faults.clocks import Clock, can_be_built
from tests.support import bank as app_module
from tests.support.deliveries import Deliveries, Outcome
from tests.support.hints import leave_hint
from tests.support.processes import Processes, eventually
from tests.support.proxy import Proxy
from tests.support.queues import depth

Records = Callable[[str], Any]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(waiting, "LONGEST_PAUSE", 0.05)


@pytest.fixture
def impatient(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 0.3)


@pytest.fixture
def proxy(database: str, environment: dict[str, str], bank: Celery) -> Iterator[Proxy]:
    url = make_url(database)
    assert url.host is not None
    assert url.port is not None
    proxy = Proxy(url.host, url.port)
    environment["DATABASE_URL"] = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
    app_module.configure(environment)
    yield proxy
    close_runtime(bank)
    proxy.close()


@pytest.fixture
def poor(engine: Engine, database: str, environment: dict[str, str], bank: Celery) -> Iterator[str]:
    """The application connects as a role that may not touch records."""
    role = f"poor_{uuid4().hex[:8]}"
    url = make_url(database).set(username=role, password="p").render_as_string(hide_password=False)
    with engine.connect() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'p'"))
        connection.execute(text(f"GRANT {role} TO CURRENT_USER"))  # to drop what it owns
        connection.execute(text(f"GRANT USAGE ON SCHEMA idempotency TO {role}"))
        connection.execute(text(f"GRANT ALL ON ALL TABLES IN SCHEMA idempotency, public TO {role}"))
        connection.execute(text(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA idempotency, public TO {role}"))
        connection.execute(text(f"REVOKE ALL ON idempotency.records FROM {role}"))
    app_module.configure(environment | {"DATABASE_URL": url})
    yield role
    close_runtime(bank)
    with engine.connect() as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))


def mended(engine: Engine, mend: str, error: str, deliver: Callable[[], Outcome]) -> Outcome:
    """What becomes of a delivery that has to wait until the database is mended."""
    waits = metrics.waiting.labels(app_module.deposit.name, error)._value
    before = waits.get()
    with ThreadPoolExecutor(1) as thread:
        delivery = thread.submit(deliver)
        eventually(lambda: delivery.done() or waits.get() > before, timeout=10)
        with engine.connect() as connection:
            connection.execute(text(mend))
        return delivery.result(20)


def test_a_grant_that_is_missing_at_the_claim_is_waited_for(
    poor: str, deliveries: Deliveries, engine: Engine, soon: None, entries: Callable[[str], int]
) -> None:
    mend = f"GRANT ALL ON idempotency.records TO {poor}"
    outcome = mended(engine, mend, "InsufficientPrivilege", lambda: deliveries.deliver(app_module.deposit, "a"))
    assert (outcome.state, entries("a")) == ("SUCCESS", 1)


def test_a_schema_that_is_missing_at_the_claim_is_waited_for(
    deliveries: Deliveries, engine: Engine, soon: None, entries: Callable[[str], int]
) -> None:
    with engine.connect() as connection:
        connection.execute(text("ALTER SCHEMA idempotency RENAME TO elsewhere"))
    mend = "ALTER SCHEMA elsewhere RENAME TO idempotency"
    outcome = mended(engine, mend, "UndefinedTable", lambda: deliveries.deliver(app_module.deposit, "a"))
    assert (outcome.state, entries("a")) == ("SUCCESS", 1)


# Held by another process, as the hint of `leave_hint` says.
HELD = f"""
UPDATE idempotency.records
SET status = 'started', token = '{"d" * 32}', result = NULL, response_code = NULL, completed_at = NULL,
    expires_at = NULL, locked_until = clock_timestamp() + interval '60 s'
"""


def broken_once(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[int]:
    """Close the connection under the first call of a function that writes."""
    broken: list[int] = []
    original = getattr(module, name)

    def write(connection: Any, *args: Any, **options: Any) -> Any:
        if not broken:
            broken.append(1)
            statements.execute(connection, "SELECT pg_terminate_backend(pg_backend_pid())")
        return original(connection, *args, **options)

    monkeypatch.setattr(module, name, write)
    return broken


def test_a_waiting_duplicate_is_parked_despite_a_closed_connection(
    deliveries: Deliveries, engine: Engine, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliveries.deliver(app_module.waited_deposit, "a")
    with engine.connect() as connection:
        connection.execute(text(HELD))
        broken = broken_once(monkeypatch, outbox, "insert")
        assert deliveries.deliver(app_module.waited_deposit, "a").state == "IGNORED"
        assert broken == [1]
        assert connection.execute(text("SELECT origin FROM idempotency.outbox")).scalars().all() == ["retry"]


def test_a_refusal_leaves_its_letter_despite_a_closed_connection(
    deliveries: Deliveries, engine: Engine, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliveries.deliver(app_module.deposit, "a", 1)
    broken = broken_once(monkeypatch, letters, "store_refusal")
    assert deliveries.deliver(app_module.deposit, "a", 2).state == "FAILURE"
    assert broken == [1]
    with engine.connect() as connection:
        reasons = connection.execute(text("SELECT reason FROM idempotency.dead_letters")).scalars().all()
    assert reasons == ["fingerprint_mismatch"]


def test_a_defect_of_the_message_itself_rejects_it_at_once(deliveries: Deliveries) -> None:
    outcome = deliveries.deliver(app_module.deposit, nothing="of the kind")
    assert (outcome.state, outcome.value.requeue) == ("REJECTED", False)


# ---------------------------------------------------------------- and when it has waited long enough


def test_what_has_waited_long_enough_is_parked_where_postgres_takes_it(
    poor: str, deliveries: Deliveries, engine: Engine, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = deliveries.deliver(app_module.deposit, "a")
    assert outcome.state == "IGNORED"
    with engine.connect() as connection:
        (row,) = connection.execute(
            text("SELECT key, origin, available_at - clock_timestamp() AS delay FROM idempotency.outbox")
        )
    assert (row.key, row.origin) == ("a", "retry")
    assert timedelta(seconds=50) < row.delay <= timedelta(seconds=60)


def test_what_has_waited_past_its_eta_is_parked_for_as_long_as_any_other(
    poor: str, deliveries: Deliveries, engine: Engine, impatient: None
) -> None:
    past = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    assert deliveries.deliver(app_module.deposit, "a", headers={ETA_HEADER: past}).state == "IGNORED"
    with engine.connect() as connection:
        delay = connection.execute(text("SELECT available_at - clock_timestamp() FROM idempotency.outbox")).scalar_one()
    assert timedelta(seconds=50) < delay <= timedelta(seconds=60)


def test_what_has_waited_long_enough_is_copied_while_postgres_is_away(
    proxy: Proxy, bank: Celery, deliveries: Deliveries, impatient: None, entries: Callable[[str], int]
) -> None:
    proxy.refuse()
    assert deliveries.deliver(app_module.deposit, "a", 5).state == "IGNORED"
    proxy.heal()
    with bank.connection_for_read() as connection:
        message = connection.SimpleQueue(bank.amqp.queues[bank.conf.task_default_queue]).get(timeout=10)
        message.ack()
    assert message.headers[ORIGIN_HEADER] == "retry"
    assert message.properties["delivery_mode"] == 2
    (args, kwargs, _), headers = message.payload, message.headers
    outcome = deliveries.deliver(app_module.deposit, *args, headers=headers, task_id=headers["id"], **kwargs)
    assert (outcome.state, entries("a")) == ("SUCCESS", 1)


def test_a_message_that_neither_server_takes_goes_back_unchanged(
    proxy: Proxy,
    bank: Celery,
    deliveries: Deliveries,
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy.refuse()
    monkeypatch.setattr(bank.conf, "broker_url", "amqp://127.0.0.1:1//")
    outcome = deliveries.deliver(app_module.deposit, "a")
    assert (outcome.state, outcome.value.requeue) == ("REJECTED", True)
    why = [
        each.partition(" error=")[2]
        for each in caplog.messages
        if each.startswith(("event=not_parked", "event=not_copied"))
    ]
    assert why == ["NotConnected", "BrokerUnavailable"]


def test_a_soft_time_limit_ends_the_wait_after_one_more_question() -> None:
    asked = []

    def ask() -> None:
        asked.append(1)
        if len(asked) == 1:
            raise SoftTimeLimitExceeded
        raise OperationalError("", None, Exception())

    with pytest.raises(Unanswered):
        Waiting("t").answer(ask)
    assert len(asked) == 2


@pytest.mark.long
def test_a_worker_waiting_for_postgres_stops_and_leaves_the_message(
    proxy: Proxy, bank: Celery, processes: Processes, entries: Callable[[str], int]
) -> None:
    worker = processes.worker("--concurrency", "1")
    proxy.refuse()
    proxy.reset()
    app_module.deposit.delay("a")
    eventually(lambda: "claim_waits" in worker.log)
    begun = time.monotonic()
    worker.terminate()
    worker.process.wait(20)
    assert time.monotonic() - begun < 15
    assert depth(bank) == 1
    proxy.heal()
    processes.worker("--concurrency", "1")
    eventually(lambda: entries("a") == 1)


# ---------------------------------------------------------------- Redis' word and the holder's own redelivery


def test_the_holders_own_redelivery_gets_the_result_whatever_the_mark_says(
    deliveries: Deliveries, record: Records, redis_url: str
) -> None:
    done = deliveries.deliver(app_module.deposit, "a", 5, task_id="one")
    leave_hint(redis_url, record("a"), counted=True)
    info = {"exchange": "", "routing_key": "q", "redelivered": True}
    again = deliveries.deliver(app_module.deposit, "a", 5, task_id="one", headers={"delivery_info": info})
    assert (again.state, again.value) == ("SUCCESS", done.value)


def test_a_storm_of_copies_of_one_message_costs_one_write(
    deliveries: Deliveries, record: Records, engine: Engine, redis_url: str
) -> None:
    deliveries.deliver(app_module.deposit, "a", task_id="one")
    with engine.connect() as connection:
        connection.execute(text(HELD))
    leave_hint(redis_url, record("a"), counted=False)
    for _ in range(20):
        assert deliveries.deliver(app_module.deposit, "a", task_id="one").state == "IGNORED"
    assert record("a").duplicates == 1


# ---------------------------------------------------------------- delays


def publish(app: Celery, account: str, eta: datetime) -> None:
    """Put a message with an eta straight into the queue: past the broker's delay queues."""
    queue = app.amqp.queues[app.conf.task_default_queue]
    id = str(uuid4())
    message = app.amqp.as_task_v2(id, app_module.deposit.name, (account,), {}, eta=eta)
    with app.producer_or_acquire() as producer:
        producer.publish(
            message.body,
            exchange=Exchange(queue.exchange.name, type="topic"),
            routing_key=queue.routing_key,
            headers=message.headers,
            serializer="json",
            declare=[queue],
            **message.properties,
        )


@pytest.mark.long
def test_a_message_with_a_far_eta_waits_in_the_outbox_and_not_in_a_worker(
    bank: Celery, processes: Processes, engine: Engine, relay: Any, entries: Callable[[str], int]
) -> None:
    worker = processes.worker("--concurrency", "1")
    eta = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    publish(bank, "a", eta)
    with engine.connect() as connection:
        row = eventually(
            lambda: connection.execute(text("SELECT id, key, available_at FROM idempotency.outbox")).one_or_none()
        )
        assert (row.key, row.available_at) == ("a", eta)
        worker.terminate()
        worker.process.wait(20)
        assert depth(bank) == 0  # what it held unacknowledged would be back
        processes.worker("--concurrency", "1")
        assert entries("a") == 0
        connection.execute(text("UPDATE idempotency.outbox SET available_at = clock_timestamp()"))
        eventually(lambda: entries("a") == 1)
        assert connection.execute(text("SELECT count(*) FROM idempotency.outbox")).scalar_one() == 1


@pytest.mark.long
@pytest.mark.skipif(not can_be_built(), reason="needs a C compiler")
@pytest.mark.parametrize("days", [-1, 1])
def test_a_worker_with_a_wrong_clock_neither_keeps_nor_hastens_a_delay(
    bank: Celery,
    processes: Processes,
    relay: Any,
    record: Records,
    entries: Callable[[str], int],
    days: int,
    tmp_path: Any,
) -> None:
    clock = Clock(tmp_path, seconds=days * 86400.0)
    processes.worker("--concurrency", "1", **clock.environment)
    sent = datetime.now(UTC)
    app_module.deposit.apply_async(("a",), countdown=2)
    publish(bank, "b", sent + timedelta(seconds=2))
    for account in ("a", "b"):
        row = eventually(lambda account=account: (row := record(account)) and row.status == "completed" and row)
        assert row.created_at - sent >= timedelta(seconds=2)
        assert entries(account) == 1


def test_what_is_revoked_ends_before_its_time(deliveries: Deliveries, engine: Engine, entries: Any) -> None:
    """No worker remembers a revoke for as long as a delay may take."""
    later = (datetime.now(UTC) + timedelta(days=30)).isoformat()
    deliveries.deliver(app_module.deposit, "a", task_id="t1", headers={REVOKED_HEADER: True, ETA_HEADER: later})
    with engine.connect() as connection:
        record = connection.execute(text("SELECT status, error_code FROM idempotency.records")).one()
        waiting = connection.execute(
            text("SELECT count(*) FROM idempotency.outbox WHERE status = 'pending'")
        ).scalar_one()
    assert (tuple(record), waiting, entries("a")) == (("failed", "revoked"), 0, 0)


@pytest.mark.parametrize("given", ["x", 2**70, -1, None])
def test_a_generation_that_is_no_number_neither_keeps_a_slot_nor_rejects_its_message(
    deliveries: Deliveries, engine: Engine, given: object
) -> None:
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    began = time.monotonic()
    outcome = deliveries.deliver(app_module.deposit, "a", headers={GENERATION_HEADER: given, ETA_HEADER: later})
    assert outcome.state == "IGNORED"
    assert time.monotonic() - began < waiting.PATIENCE / 10
    with engine.connect() as connection:
        assert connection.execute(text("SELECT generation FROM idempotency.outbox")).scalars().all() == [1]


@pytest.mark.parametrize(("given", "parked"), [("x", 1), (2**70, 1), (-1, 1), (None, 1), (2**31 - 1, 0)])
def test_a_number_of_waits_that_none_can_have_neither_keeps_a_slot_nor_rejects_its_message(
    deliveries: Deliveries, engine: Engine, given: object, parked: int
) -> None:
    deliveries.deliver(app_module.waited_deposit, "a")
    with engine.connect() as connection:
        connection.execute(text(HELD))
        assert deliveries.deliver(app_module.waited_deposit, "a", headers={WAITS_HEADER: given}).state == "IGNORED"
        assert connection.execute(text("SELECT count(*) FROM idempotency.outbox")).scalar_one() == parked
