"""What the broker has lost is sent again, and nothing else is."""

from __future__ import annotations

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from idempotency.reconcile import reconcile
from idempotency.relay import Relay
from idempotency.runtime import Runtime
from tests import bank as app_module


@pytest.fixture
def sent(bank, engine):
    """Enqueue deposits, publish them, and let their age be `seconds`; returns the relay."""
    relay = Relay(bank)

    def send(*accounts, seconds=3600):
        with Session(engine.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
            for account in accounts:
                app_module.deposit.enqueue(session, account)
        while relay.run_once().published:
            pass
        with engine.connect() as connection:
            connection.execute(
                text("UPDATE idempotency.outbox SET published_at = published_at - make_interval(secs => :s)"),
                {"s": seconds},
            )

    send.relay = relay
    yield send
    relay.close()


def depth(bank):
    with bank.connection_for_write() as connection:
        return connection.default_channel.queue_declare(bank.conf.task_default_queue, passive=True).message_count


def purge_queue(bank):
    with bank.connection_for_write() as connection:
        connection.default_channel.queue_purge(bank.conf.task_default_queue)


def test_a_long_backlog_is_not_a_lost_one(bank, sent):
    sent("a", "b", "c")
    assert reconcile(bank).resent == 0
    assert sent.relay.run_once().published == 0


def test_what_a_wiped_queue_has_lost_is_sent_again_once(bank, sent, deliveries, entries):
    sent("a", "b", "c")
    purge_queue(bank)
    assert reconcile(bank).resent == 3
    assert sent.relay.run_once().published == 3
    assert depth(bank) == 3
    assert reconcile(bank).resent == 0


def test_a_queue_is_sent_no_more_than_it_lacks_oldest_first(bank, sent, engine):
    sent("a", "b", seconds=7200)
    sent("c", "d", seconds=0)
    with engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 hour'"))
    assert reconcile(bank, lambda queue: 3).resent == 1
    with engine.connect() as connection:
        resent = connection.execute(text("SELECT key FROM idempotency.outbox WHERE resends = 1")).scalars().all()
    assert resent in (["a"], ["b"])


def test_what_was_published_lately_is_left_alone_and_the_pause_doubles(bank, sent, engine):
    sent("a", seconds=30)
    purge_queue(bank)
    assert reconcile(bank).resent == 0
    age(engine, 61)
    assert reconcile(bank).resent == 1
    sent.relay.run_once()
    purge_queue(bank)
    age(engine, 61)
    assert reconcile(bank).resent == 0
    age(engine, 121)
    assert reconcile(bank).resent == 1


def test_an_ended_operation_settles_its_rows_and_is_not_sent_again(bank, sent, deliveries, engine):
    sent("a")
    deliveries.deliver(app_module.deposit, "a")
    purge_queue(bank)
    done = reconcile(bank)
    assert (done.settled, done.resent) == (1, 0)
    assert reconcile(bank).settled == 0


def test_a_running_operation_is_recovers_business(bank, sent, deliveries, engine):
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
    assert reconcile(bank).resent == 0


def test_a_released_operation_in_its_back_off_is_left_alone_until_it_is_due(bank, sent, deliveries, engine):
    deliveries.deliver(app_module.failing, "f", "defer long")
    with engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.outbox SET available_at = clock_timestamp()"))
    sent()
    purge_queue(bank)
    assert reconcile(bank).resent == 0
    with engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.records SET available_at = clock_timestamp()"))
    assert reconcile(bank).resent == 1


def test_a_row_whose_key_belongs_to_another_request_becomes_a_dead_letter(bank, sent, deliveries, engine):
    deliveries.deliver(app_module.deposit, "a", 5)
    sent("a")  # amount 1, by default
    reconcile(bank)
    with engine.connect() as connection:
        letters = connection.execute(text("SELECT source, reason FROM idempotency.dead_letters")).all()
        settled = connection.execute(text("SELECT count(settled_at) FROM idempotency.outbox")).scalar_one()
    assert [tuple(letter) for letter in letters] == [("relay", "fingerprint_mismatch")]
    assert settled == 1
    reconcile(bank)


def test_nothing_is_sent_again_while_the_broker_is_away(bank, sent, environment):
    sent("a")
    address = bank.conf.broker_url
    bank.conf.broker_url = "amqp://127.0.0.1:1//"
    try:
        assert reconcile(bank).resent == 0
    finally:
        bank.conf.broker_url = address


def age(engine, seconds):
    with engine.connect() as connection:
        connection.execute(
            text("UPDATE idempotency.outbox SET published_at = published_at - make_interval(secs => :s)"),
            {"s": seconds},
        )


def test_a_backlog_of_sixty_thousand_is_not_sent_again_and_is_after_a_wipe(bank, sent, engine):
    """The rows are made by SQL: what is shown is how many are sent, not how fast."""
    sent("model")
    with engine.connect() as connection:
        connection.execute(
            text(
                "INSERT INTO idempotency.outbox (event_id, tenant, operation, key, fingerprint, message, queue, origin, "
                "status, published_at) SELECT 'e' || n, tenant, operation, 'k' || n, fingerprint, message, queue, "
                "origin, status, published_at FROM idempotency.outbox, generate_series(1, 60000) n"
            )
        )
    # slow workers: 45,000 wait in the queue, 15,001 more are prefetched or were answered and not yet settled
    assert reconcile(bank, lambda queue: 60_001).resent == 0
    assert reconcile(bank, lambda queue: 45_000).resent == 15_001
    assert reconcile(bank, lambda queue: 45_000).resent == 0
    with engine.connect() as connection:
        connection.execute(
            text("UPDATE idempotency.outbox SET status = 'published', resends = 0 WHERE status = 'pending'")
        )
    assert reconcile(bank, lambda queue: 0).resent == 60_001
    Runtime.discard(bank)
