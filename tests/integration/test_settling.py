"""Rows of operations that have ended are settled, however many end at once."""

from __future__ import annotations

from celery import Celery
from sqlalchemy import Connection, text

from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.store import ends, lost
from idempotency.wire.keys import OperationId
from tests.support import bank as b
from tests.support import operations as op
from tests.support.bank import fingerprint_of
from tests.support.tasks import enqueued


def ended_lately(connection: Connection, many: int, *, seconds: float = 9.0) -> None:
    """So many operations have ended within so many seconds."""
    connection.execute(
        text("""
            INSERT INTO idempotency.records (tenant, task, key, status, fence, fingerprint, message, queue, result,
                response_code, completed_at, expires_at, service)
            SELECT 'default', 'bulk', 'b' || n, 'completed', nextval('idempotency.fence'), 'v1:x', '', 'q', 'null', 200,
                   now() - make_interval(secs => :seconds * (:many - n) / :many), now() + interval '1 day', 'bank'
            FROM generate_series(1, :many) n
        """),
        {"many": many, "seconds": seconds},
    )


def behind(connection: Connection) -> float:
    """Seconds."""
    return float(
        connection.execute(
            text("SELECT extract(epoch FROM clock_timestamp() - until) FROM idempotency.settled")
        ).scalar_one()
    )


def test_a_pass_gets_beyond_all_that_has_ended_within_its_overlap(bank: Celery, connection: Connection) -> None:
    enqueued(connection, b.deposit, "a")
    relay = Relay(bank)
    assert relay.run_once().published == 1
    relay.close()
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 hour'"))
    id = OperationId("default", b.deposit.name, "a")
    held = op.started(connection, id, fingerprint=fingerprint_of("a"))
    with bank.connection_for_write() as broker:
        broker.default_channel.queue_purge(bank.conf.task_default_queue)
    resend_lost(bank)
    (row,) = op.outbox(connection)
    assert row.taken  # the started record covers it, so that it is not judged again
    ended_lately(connection, 12_000)
    ends.complete(connection, held, "1", retention=3600, lease=60)
    lost.settle(connection)
    (row,) = op.outbox(connection)
    assert row.settled_at is not None


def test_a_burst_of_ends_holds_up_none_that_follows(bank: Celery, connection: Connection) -> None:
    ended_lately(connection, 12_000)
    connection.execute(text("UPDATE idempotency.records SET completed_at = completed_at - interval '1 hour'"))
    connection.execute(text("UPDATE idempotency.records SET key = 'last', completed_at = now() WHERE key = 'b1'"))
    lost.settle(connection)
    assert behind(connection) < 60


def test_a_pass_settles_more_than_a_batch(bank: Celery, connection: Connection) -> None:
    """A pass that stopped after some batches would keep up with so many ends a second, and with no more."""
    many = lost.BATCH * 12
    ended_lately(connection, many)
    connection.execute(
        text("""
            INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, origin, available_at,
                                            status, published_at, service)
            SELECT 'm' || n, 'default', 'bulk', 'b' || n, 'v1:x', '', 'q', 'enqueue', now(), 'published', now(), 'bank'
            FROM generate_series(1, :many) n
        """),
        {"many": many},
    )
    settled = 0
    for _ in range(12):  # in less than that on a busy machine
        settled += lost.settle(connection)
    assert settled == many
    assert lost.settle(connection) == 0
