"""What the broker has lost is sent again, and nothing else is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Exchange, Queue
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from idempotency.application import close_runtime
from idempotency.attempt.runtime import Runtime
from idempotency.letters.examine import examine
from idempotency.queues import quorum_queue
from idempotency.relay import resend as resending
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.store import lost
from idempotency.store import markers as marking
from idempotency.wire.headers import KEY_HEADER
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from tests.support import bank as app_module
from tests.support import operations as op
from tests.support.bank import fingerprint_of, forget_queues
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries
from tests.support.plans import rows_read
from tests.support.processes import Processes, eventually
from tests.support.queues import depth


class Sent:
    """Accepts deposits and publishes them; then they are as old as the test says."""

    def __init__(self, app: Celery, engine: Engine) -> None:
        self.relay = Relay(app)
        self._engine = engine

    def __call__(self, *accounts: str, seconds: float = 3600) -> None:
        with Session(self._engine.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
            for account in accounts:
                app_module.deposit.enqueue(session, account)
        while self.relay.run_once().published:
            pass
        with self._engine.connect() as connection:
            connection.execute(
                text("UPDATE idempotency.outbox SET published_at = published_at - make_interval(secs => :s)"),
                {"s": seconds},
            )


@pytest.fixture
def sent(bank: Celery, engine: Engine) -> Iterator[Sent]:
    sent = Sent(bank, engine)
    yield sent
    sent.relay.close()


def purge_queue(bank: Celery) -> None:
    with bank.connection_for_write() as connection:
        connection.default_channel.queue_purge(bank.conf.task_default_queue)


def test_a_long_backlog_is_not_a_lost_one(bank: Celery, sent: Sent) -> None:
    sent("a", "b", "c")
    assert resend_lost(bank).resent == 0
    assert sent.relay.run_once().published == 0


def test_a_backlog_behind_a_fanout_exchange_is_not_a_lost_one(
    configured: Celery, connection: Connection, engine: Engine, environment: dict[str, str]
) -> None:
    """Whatever its routing key, a message for it goes to each of its queues."""
    name = f"fan-{environment['BANK_QUEUE']}"
    fan = quorum_queue(name, exchange=name, dead_letter_queue=f"{name}-dead")
    fan = Queue(name, Exchange(name, type="fanout"), routing_key="", queue_arguments=fan.queue_arguments)
    configured.conf.task_queues = [*configured.conf.task_queues, fan]
    configured.conf.task_routes = {app_module.deposit.name: {"exchange": name, "routing_key": "deposits"}}
    forget_queues(configured)
    sent = Sent(configured, engine)
    try:
        sent("a")
        assert [row.queue for row in op.outbox(connection)] == [name]
        assert resend_lost(configured).resent == 0
        with configured.connection_for_write() as broker:
            broker.default_channel.queue_purge(name)
        assert resend_lost(configured).resent == 1
    finally:
        sent.relay.close()
        with configured.connection_for_write() as broker:
            for each in (name, f"{name}-dead"):
                broker.default_channel.queue_delete(each)


def test_what_a_wiped_queue_has_lost_is_sent_again_once(
    bank: Celery, sent: Sent, deliveries: Deliveries, entries: Entries
) -> None:
    sent("a", "b", "c")
    purge_queue(bank)
    assert resend_lost(bank).resent == 3
    assert sent.relay.run_once().published == 3
    assert depth(bank) == 3
    assert resend_lost(bank).resent == 0


def test_a_queue_is_sent_no_more_than_it_lacks_oldest_first(bank: Celery, sent: Sent, engine: Engine) -> None:
    sent("a", "b", seconds=7200)
    sent("c", "d", seconds=0)
    with engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 hour'"))
    assert resend_lost(bank, lambda queue: 3).resent == 1
    with engine.connect() as connection:
        resent = connection.execute(text("SELECT key FROM idempotency.outbox WHERE resends = 1")).scalars().all()
    assert resent in (["a"], ["b"])


def test_what_was_published_lately_is_left_alone_and_the_pause_doubles(
    bank: Celery, sent: Sent, engine: Engine
) -> None:
    sent("a", seconds=30)
    purge_queue(bank)
    assert resend_lost(bank).resent == 0
    age(engine, 61)
    assert resend_lost(bank).resent == 1
    sent.relay.run_once()
    purge_queue(bank)
    age(engine, 61)
    assert resend_lost(bank).resent == 0
    age(engine, 121)
    assert resend_lost(bank).resent == 1


def test_however_many_wait_for_their_next_resend_what_is_lost_behind_them_is_sent_again(
    bank: Celery, sent: Sent, engine: Engine
) -> None:
    sent("lost", seconds=120)
    purge_queue(bank)
    with engine.connect() as connection:
        copy_rows(connection, lost.BATCHES * lost.BATCH)
        early = "resends = 6, published_at = published_at - interval '30 minutes'"  # the next one after an hour
        connection.execute(text(f"UPDATE idempotency.outbox SET {early} WHERE key <> 'lost'"))
    assert resend_lost(bank).resent == 1


def test_what_another_pass_has_sent_again_meanwhile_is_not_sent_again(
    bank: Celery, sent: Sent, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two relays look at the same moment; while one of them asks the consumers, the other has done it all."""
    sent("a")
    purge_queue(bank)
    resend = resending._resend

    def after_another_pass(runtime: Runtime, lost: Any) -> Any:
        monkeypatch.setattr(resending, "_resend", resend)
        assert resend_lost(bank).resent == 1
        assert sent.relay.run_once().published == 1
        return resend(runtime, lost)

    monkeypatch.setattr(resending, "_resend", after_another_pass)
    assert resend_lost(bank).resent == 0
    with engine.connect() as connection:
        assert [(row.status, row.resends) for row in op.outbox(connection)] == [("published", 1)]


def test_an_ended_operation_settles_its_rows_and_is_not_sent_again(
    bank: Celery, sent: Sent, deliveries: Deliveries, engine: Engine
) -> None:
    sent("a")
    deliveries.deliver(app_module.deposit, "a")
    purge_queue(bank)
    done = resend_lost(bank)
    assert (done.settled, done.resent) == (1, 0)
    assert resend_lost(bank).settled == 0


def test_a_running_operation_is_recovers_business(
    bank: Celery, sent: Sent, deliveries: Deliveries, engine: Engine
) -> None:
    sent("a")
    deliveries.deliver(app_module.deposit, "a")
    with engine.connect() as connection:
        connection.execute(
            text(
                "UPDATE idempotency.records SET status = 'started', result = NULL, completed_at = NULL, "
                "expires_at = NULL, locked_until = clock_timestamp() + interval '1 min'"
            )
        )
    purge_queue(bank)
    assert resend_lost(bank).resent == 0


def test_a_released_operation_is_left_alone_until_its_back_off_is_over(
    bank: Celery, sent: Sent, deliveries: Deliveries, engine: Engine
) -> None:
    deliveries.deliver(app_module.failing, "f", "defer long")
    with engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.outbox SET available_at = clock_timestamp()"))
    sent()
    purge_queue(bank)
    assert resend_lost(bank).resent == 0
    with engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.records SET available_at = clock_timestamp()"))
    assert resend_lost(bank).resent == 1


def test_a_row_whose_key_belongs_to_another_request_becomes_a_dead_letter(
    bank: Celery, sent: Sent, deliveries: Deliveries, engine: Engine
) -> None:
    deliveries.deliver(app_module.deposit, "a", 5)
    sent("a")  # amount 1, by default
    resend_lost(bank)
    with engine.connect() as connection:  # it waits in its queue
        assert connection.execute(text("SELECT count(*) FROM idempotency.dead_letters")).scalar_one() == 0
    purge_queue(bank)
    resend_lost(bank)
    with engine.connect() as connection:
        letters = connection.execute(text("SELECT source, reason FROM idempotency.dead_letters")).all()
        settled = connection.execute(text("SELECT count(settled_at) FROM idempotency.outbox")).scalar_one()
    assert [tuple(letter) for letter in letters] == [("relay", "fingerprint_mismatch")]
    assert settled == 1
    resend_lost(bank)


def test_nothing_is_sent_again_while_the_broker_is_away(bank: Celery, sent: Sent, environment: dict[str, str]) -> None:
    sent("a")
    address = bank.conf.broker_url
    bank.conf.broker_url = "amqp://127.0.0.1:1//"
    try:
        assert resend_lost(bank).resent == 0
    finally:
        bank.conf.broker_url = address


def age(engine: Engine, seconds: Any) -> None:
    with engine.connect() as connection:
        connection.execute(
            text("UPDATE idempotency.outbox SET published_at = published_at - make_interval(secs => :s)"),
            {"s": seconds},
        )


def copy_rows(connection: Connection, number: int) -> None:
    """Add so many rows like the one that is there, each of another operation."""
    connection.execute(
        text(
            "INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, origin, "
            "status, published_at, service) SELECT 'e' || n, tenant, task, 'k' || n, fingerprint, message, queue, "
            "origin, status, published_at, service FROM idempotency.outbox, generate_series(1, :number) n"
        ),
        {"number": number},
    )


@pytest.mark.long
def test_a_backlog_of_sixty_thousand_is_not_sent_again_and_is_after_a_wipe(
    bank: Celery, sent: Sent, engine: Engine
) -> None:
    """The rows are made by SQL: what is shown is how many are sent, not how fast."""
    sent("model")
    with engine.connect() as connection:
        copy_rows(connection, 60000)
    # slow workers: 45,000 wait in the queue, 15,001 more are prefetched or were answered and not yet settled
    assert resend_lost(bank, lambda queue: 60_001).resent == 0
    assert resend_lost(bank, lambda queue: 45_000).resent == 15_001
    assert resend_lost(bank, lambda queue: 45_000).resent == 0
    with engine.connect() as connection:
        connection.execute(
            text("UPDATE idempotency.outbox SET status = 'published', resends = 0 WHERE status = 'pending'")
        )
    assert resend_lost(bank, lambda queue: 0).resent == 60_001
    close_runtime(bank)


# ---------------------------------------------------------------- markers, and what consumers hold


def foreign(bank: Celery, number: Any, seconds: float = 0.0) -> None:
    """Messages of no outbox row."""
    for _ in range(number):
        app_module.slow_deposit.apply_async((f"foreign {uuid4()}", seconds))


def markers(engine: Engine) -> Any:
    with engine.connect() as connection:
        return connection.execute(text("SELECT queue, priority, taken_at FROM idempotency.markers")).all()


def let_grace_pass(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.markers SET taken_at = taken_at - interval '10 s'"))


def all_taken(engine: Engine) -> Any:
    return lambda: all(marker.taken_at is not None for marker in markers(engine))


@pytest.mark.long
def test_operations_wiped_under_foreign_traffic_are_back_within_two_sweeps(
    bank: Celery, sent: Sent, processes: Processes, engine: Engine, entries: Entries
) -> None:
    accounts = [f"lost {number}" for number in range(5)]
    sent(*accounts)
    purge_queue(bank)
    foreign(bank, 20, 0.2)
    stop = threading.Event()

    def traffic() -> None:
        while not stop.wait(0.1):
            foreign(bank, 1, 0.2)

    processes.worker()
    others = threading.Thread(target=traffic)
    others.start()
    try:
        assert depth(bank) > 0
        assert resend_lost(bank).resent == 0
        assert {marker.priority for marker in markers(engine)} == {0, 9}
        eventually(all_taken(engine))
        let_grace_pass(engine)
        foreign(bank, 20, 0.2)
        assert depth(bank) > 0
        assert resend_lost(bank).resent == 5
        assert sent.relay.run_once().published == 5
        eventually(lambda: all(entries(account) == 1 for account in accounts))
    finally:
        stop.set()
        others.join(10)


def test_a_marker_waits_behind_the_backlog_it_was_sent_behind(
    bank: Celery, sent: Sent, processes: Processes, engine: Engine
) -> None:
    foreign(bank, 2, 60.0)  # both slots of the worker
    processes.worker()
    eventually(lambda: depth(bank) == 0)
    sent("a", "b", "c")
    for _ in range(3):
        assert resend_lost(bank).resent == 0
    # one of each class, however often it is looked; none has passed what waits
    assert [marker.taken_at for marker in markers(engine)] == [None, None]
    assert depth(bank) == 5


@pytest.mark.long
def test_what_a_worker_holds_unacknowledged_is_not_lost(
    bank: Celery, sent: Sent, processes: Processes, engine: Engine
) -> None:
    foreign(bank, 2, 60.0)
    processes.worker("--concurrency", "2", "--prefetch-multiplier", "4")
    eventually(lambda: depth(bank) == 0)
    sent("held", "lost")
    eventually(lambda: depth(bank) == 0)  # both prefetched, neither begun
    with engine.connect() as connection:  # and one of them never reached the queue
        message = connection.execute(text("SELECT message FROM idempotency.outbox WHERE key = 'lost'")).scalar_one()
        changed = Message.from_text(message)
        changed.headers["id"] = "another task"
        connection.execute(
            text("UPDATE idempotency.outbox SET message = :message WHERE key = 'lost'"), {"message": changed.to_text()}
        )
    assert resend_lost(bank).resent == 1
    with engine.connect() as connection:
        resent = connection.execute(text("SELECT key FROM idempotency.outbox WHERE resends = 1")).scalars().all()
    assert resent == ["lost"]


@pytest.mark.long
def test_a_consumer_that_does_not_say_what_it_holds_is_waited_for(bank: Celery, sent: Sent, engine: Engine) -> None:
    sent("a", seconds=1800)
    with bank.connection_for_read() as connection:
        channel = connection.default_channel
        channel.basic_consume(bank.conf.task_default_queue, callback=lambda message: None)
        eventually(lambda: depth(bank) == 0)
        assert resend_lost(bank).resent == 0
        age(engine, 1801)  # longer than RabbitMQ leaves a delivery unacknowledged
        assert resend_lost(bank).resent == 1


def test_without_remote_control_no_consumer_is_asked(configured: Celery, sent: Sent) -> None:
    configured.conf.worker_enable_remote_control = False
    sent("a", seconds=61)
    with configured.connection_for_read() as connection:
        connection.default_channel.basic_consume(configured.conf.task_default_queue, callback=lambda message: None)
        eventually(lambda: depth(configured) == 0)
        assert resend_lost(configured).resent == 1
        # what it holds is sent once more after a while that doubles, not with every pass
        assert resend_lost(configured).resent == 0


def test_without_a_guard_a_marker_is_a_task_that_does_nothing(bank: Celery, sent: Sent, engine: Engine) -> None:
    sent("a")
    sent.relay.publisher.mark(bank.conf.task_default_queue, "m1", priority=0)
    with bank.connection_for_read() as connection:
        queue = bank.amqp.queues[bank.conf.task_default_queue](connection.default_channel)
        queue.get(no_ack=True)
        marker = queue.get(no_ack=True, accept=["json"])
    assert examine(bank, marker).reason is None
    args, kwargs, _ = marker.payload
    assert bank.tasks[marker.headers["task"]](*args, **kwargs) == ()
    assert marker.headers["ignore_result"] is True


def test_a_lost_row_keeps_its_order_when_it_is_sent_again(bank: Celery, sent: Sent, engine: Engine) -> None:
    with Session(engine.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
        for account in "abc":
            app_module.deposit.enqueue(session, account, ordering_key="k")
    sent()
    purge_queue(bank)
    with Session(engine.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
        app_module.deposit.enqueue(session, "d", ordering_key="k")
    assert resend_lost(bank).resent == 3
    assert sent.relay.run_once().published == 4
    with bank.connection_for_read() as connection:
        queue = bank.amqp.queues[bank.conf.task_default_queue](connection.default_channel)
        assert [queue.get(no_ack=True).headers[KEY_HEADER] for _ in range(4)] == ["a", "b", "c", "d"]


def test_a_row_that_has_begun_is_looked_at_once(bank: Celery, sent: Sent, engine: Engine) -> None:
    sent("a")
    purge_queue(bank)
    with engine.connect() as connection:
        op.started(connection, OperationId("default", app_module.deposit.name, "a"), fingerprint=fingerprint_of("a"))
        resend_lost(bank)
        assert connection.execute(text("SELECT taken FROM idempotency.outbox")).scalar_one()
    assert resend_lost(bank).resent == 0


def test_no_statement_of_a_pass_reads_what_waits(bank: Celery, sent: Sent, engine: Engine) -> None:
    sent("model")
    with engine.connect() as connection:
        copy_rows(connection, 5000)
        connection.execute(text("VACUUM ANALYZE idempotency.outbox"))
        published = connection.execute(text("SELECT min(published_at) FROM idempotency.outbox")).scalar_one()
    name = bank.conf.task_default_queue
    queue = {"queue": name, "queues": [name], "service": op.SERVICE}
    times = {"after": 60.0, "cap": 3600.0, "batch": 1000, "overdue": published + timedelta(seconds=60)}
    epoch = {"past": marking.EPOCH, "past_id": 0, "marked": marking.EPOCH, "since": marking.EPOCH}
    marker = {"id": "m", "priority": 0, "pause": 7.5, "grace": 5.0, "classes": 2, "until": published}
    for statement in ("_SETTLE", "_QUEUES", "_TIMES", "_JUDGE", "_MARK"):
        parameters = times | epoch | marker | queue
        assert rows_read(bank, (vars(lost) | vars(marking))[statement], **parameters) < 20, statement


# ---------------------------------------------------------------- fingerprints of other rules, and rows that raise


@pytest.mark.parametrize("empty", [None, lambda _: 0], ids=["first in, first out", "counted"])
@pytest.mark.parametrize(("release", "settled"), [(op.completed, 1), (op.due, 0)])
def test_a_record_by_another_rule_makes_no_row_another_request(
    bank: Celery, sent: Sent, engine: Engine, release: Any, settled: int, empty: Any
) -> None:
    sent("a")
    purge_queue(bank)
    with engine.connect() as connection:
        release(connection, OperationId("default", app_module.deposit.name, "a"), fingerprint="v9:newer")
        connection.execute(text("DELETE FROM idempotency.outbox WHERE fingerprint = 'v9:newer'"))
        assert resend_lost(bank, empty).settled == settled
        assert op.dead_letters(connection) == []


def ends(connection: Connection, account: str) -> None:
    op.completed(
        connection, OperationId("default", app_module.deposit.name, account), fingerprint=fingerprint_of(account)
    )


def starts(connection: Connection, account: str) -> None:
    op.started(
        connection, OperationId("default", app_module.deposit.name, account), fingerprint=fingerprint_of(account)
    )


def is_anothers(connection: Connection, account: str) -> None:
    op.completed(connection, OperationId("default", app_module.deposit.name, account), fingerprint="v1:another")


def is_lost(connection: Connection, account: str) -> None:
    """No trace of it."""


DONE = {
    ends: "settled_at IS NOT NULL",
    starts: "taken",
    is_anothers: "settled_at IS NOT NULL",
    is_lost: "status = 'pending'",
}


@pytest.mark.few(3)
@pytest.mark.parametrize("empty", [None, lambda _: 0], ids=["first in, first out", "counted"])
@pytest.mark.parametrize("becomes", DONE, ids=lambda becomes: becomes.__name__)
def test_a_row_that_raises_keeps_no_other_from_its_judgement(
    bank: Celery, sent: Sent, engine: Engine, becomes: Any, empty: Any
) -> None:
    accounts = ["good", "bad", "well"]
    sent(*accounts)
    purge_queue(bank)
    with engine.connect() as connection:
        for account in accounts:
            becomes(connection, account)
        connection.execute(text("ALTER TABLE idempotency.outbox ADD CONSTRAINT bad CHECK (key <> 'bad') NOT VALID"))
        for _ in range(2):  # the second pass does not trip over it again
            resend_lost(bank, empty)
        done = connection.execute(text(f"SELECT key FROM idempotency.outbox WHERE {DONE[becomes]} ORDER BY key"))
        counted_and_started = empty is not None and becomes is starts  # is not judged there
        assert done.scalars().all() == ([] if counted_and_started else ["good", "well"])
        aside = connection.execute(text("SELECT DISTINCT key FROM idempotency.set_aside")).scalars().all()
        assert aside == ([] if counted_and_started else ["bad"])
