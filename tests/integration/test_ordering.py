"""Ordering keys: rows of one key leave in the order of their commits, and no key waits for another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from idempotency.application import runtime_of, settings_of
from idempotency.observe import crash_points
from idempotency.operate import discard
from idempotency.operate.people import Person
from idempotency.relay import relay as relay_module
from idempotency.relay.relay import Relay, Relayed
from idempotency.store import dead_letters, outbox, overview
from idempotency.upkeep import maintenance
from idempotency.wire.headers import GENERATION_HEADER, KEY_HEADER
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from tests.support import bank as b
from tests.support import operations as op
from tests.support.operations import at_once
from tests.support.plans import explain, rows_read
from tests.support.queues import drained, keys
from tests.support.relaying import cut, make_due, states

ASTRAY = {"exchange": "nowhere", "routing_key": "nowhere"}
TOO_LONG = {"exchange": "x" * 300, "routing_key": "y"}


def write(connection: Connection | Session, key: str, lane: str | None, **options: Any) -> str:
    """An ordered row, perhaps with its own route or countdown."""
    composed = Message.composed(b.app, b.deposit.name, (key,), {}, task_id=f"t-{key}", headers={KEY_HEADER: key})
    message = Message(composed.headers, composed.body, options.pop("route", composed.route), composed.properties)
    id = OperationId(options.pop("tenant", "default"), b.deposit.name, key)
    executes = connection.connection() if isinstance(connection, Session) else connection
    return outbox.insert(executes, id, "v1:f", message, service=op.SERVICE, ordering_key=lane, **options)


def lanes(connection: Connection) -> dict[str, bool]:
    """Which lanes there are, and whether each is blocked."""
    rows = connection.execute(text("SELECT ordering_key, blocked FROM idempotency.lanes"))
    return {row.ordering_key: row.blocked for row in rows}


def let_pass(connection: Connection) -> None:
    """Let back-offs and reservations be over, of rows and of lanes."""
    make_due(connection)
    past = "clock_timestamp() - interval '1 s'"
    connection.execute(text(f"UPDATE idempotency.lanes SET available_at = {past}, relayed_until = NULL"))


def fail(connection: Connection, relay: Relay, message_id: str) -> int:
    """Let a row fail by its own fault; returns its dead letter."""
    for _ in range(relay_module.OWN_ERRORS):
        let_pass(connection)
        relay.run_once()
    return int(
        connection.execute(
            text("SELECT id FROM idempotency.dead_letters WHERE message_id = :id"), {"id": message_id}
        ).scalar_one()
    )


# ---------------------------------------------------------------- the order


def test_one_pass_publishes_many_rows_of_one_key_in_commit_order(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    for number in range(25):
        write(connection, f"a{number}", "a")
    relay = relays(batch=20)
    assert [relay.run_once().published for _ in range(3)] == [20, 5, 0]
    assert keys(drained(bank)) == [f"a{number}" for number in range(25)]
    assert lanes(connection) == {}


def test_a_batch_is_shared_by_the_keys_that_have_rows(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    for lane in "abc":
        for number in range(10):
            write(connection, f"{lane}{number}", lane)
    assert relays(batch=12).run_once() == Relayed(12, 0)
    sent = keys(drained(bank))
    assert {lane: [key for key in sent if key[0] == lane] for lane in "abc"} == {
        lane: [f"{lane}{number}" for number in range(4)] for lane in "abc"
    }


def test_transactions_that_take_two_keys_in_two_orders_do_not_deadlock(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    both_have_the_first = threading.Barrier(2, timeout=20)
    orders = (("a", "b"), ("b", "a"))

    def run(index: int) -> None:
        with Session(runtime_of(bank).engine) as session, session.begin():
            first, second = orders[index]
            write(session, f"{first}{index}", first)
            session.flush()
            both_have_the_first.wait()
            write(session, f"{second}{index}", second)

    at_once(2, run)
    assert relays().run_once().published == 4
    sent = [key[1] for key in keys(drained(bank)) if key[0] == "a"], [key[1] for key in states_of(connection, "b")]
    assert sent[0] == sent[1]  # both keys saw the transactions in one order: that of their commits


def states_of(connection: Connection, lane: str) -> list[str]:
    return list(
        connection.execute(
            text("SELECT key FROM idempotency.outbox WHERE ordering_key = :lane ORDER BY place, id"), {"lane": lane}
        ).scalars()
    )


def test_rows_of_a_savepoint_that_was_rolled_back_take_no_place(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    with Session(runtime_of(bank).engine) as session, session.begin():
        with session.begin_nested() as savepoint:
            write(session, "never", "a")
            savepoint.rollback()
        with session.begin_nested():
            write(session, "first", "a")
        write(session, "second", "a")
    assert relays().run_once() == Relayed(2, 0)
    assert keys(drained(bank)) == ["first", "second"]


def test_a_commit_that_fails_leaves_no_lane(bank: Celery, connection: Connection) -> None:
    connection.execute(text("CREATE TABLE strict (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    with runtime_of(bank).engine.connect() as transaction:
        transaction.execute(text("INSERT INTO strict VALUES (1), (1)"))
        write(transaction, "a1", "a")
        with pytest.raises(IntegrityError):
            transaction.commit()
    assert lanes(connection) == {}
    write(connection, "a2", "a")
    assert lanes(connection) == {"a": False}


def test_a_row_that_is_not_due_holds_back_its_key_until_it_is(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    relay = relays()
    write(connection, "a1", "a", countdown=600)
    write(connection, "a2", "a")
    write(connection, "b1", "b")
    assert relay.run_once() == Relayed(1, 0)
    let_pass(connection)
    assert relay.run_once() == Relayed(2, 0)
    assert keys(drained(bank)) == ["b1", "a1", "a2"]


def test_relays_and_writers_at_once_keep_the_order_of_every_key(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    racing = [relays(batch=4) for _ in range(2)]
    written = threading.Event()

    def run(index: int) -> None:
        if index < 2:
            while not written.is_set() or racing[index].run_once().published:
                racing[index].run_once()
            return
        with runtime_of(bank).engine.connect() as own:
            for number in range(30):
                write(own, f"{index} {number}", "abc"[number % 3])
                own.commit()
        if index == 3:
            written.set()

    at_once(4, run)
    last = relays()
    while last.run_once().published:
        pass
    assert set(states(connection)) == {"published"}
    assert lanes(connection) == {}
    placed = connection.execute(
        text("SELECT ordering_key, key FROM idempotency.outbox ORDER BY ordering_key, published_at, place, id")
    ).all()
    committed = connection.execute(
        text("SELECT ordering_key, key FROM idempotency.outbox ORDER BY ordering_key, place, id")
    ).all()
    assert placed == committed
    sent = list(dict.fromkeys(keys(drained(bank))))  # the first copy of each
    for lane in "abc":
        assert [key for key in sent if "abc"[int(key.split()[1]) % 3] == lane] == states_of(connection, lane)


# ---------------------------------------------------------------- what the broker does not take


def test_what_is_behind_a_refused_row_waits_for_it_and_other_keys_do_not(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    relay = relays()
    write(connection, "a1", "a")
    write(connection, "a2", "a", route=TOO_LONG)
    write(connection, "a3", "a")
    write(connection, "b1", "b")
    assert relay.run_once() == Relayed(2, 1)
    assert keys(drained(bank)) == ["a1", "b1"]
    assert relay.run_once() == Relayed(0, 0)  # a2 backs off
    assert [row.attempts for row in op.outbox(connection)] == [0, 1, 0, 0]


@pytest.mark.parametrize("held_back", ["a failed row", "a row that is not due"])
def test_no_tenant_waits_for_the_ordering_key_of_another(
    relays: Callable[..., Relay], connection: Connection, held_back: str
) -> None:
    relay = relays()
    if held_back == "a failed row":
        fail(connection, relay, write(connection, "x", "order-17", tenant="acme", route=TOO_LONG))
    else:
        write(connection, "x", "order-17", tenant="acme", countdown=3600.0)
    for tenant in ("globex", "default", "acme"):
        write(connection, f"of-{tenant}", "order-17", tenant=tenant)
    for _ in range(3):
        relay.run_once()
    query = "SELECT tenant FROM idempotency.outbox WHERE status = 'published' ORDER BY id"
    assert list(connection.execute(text(query)).scalars()) == ["globex", "default"]
    assert len(lanes(connection)) == 1


def test_a_row_that_broke_the_channel_is_not_overtaken_by_those_behind_it(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    relay = relays()
    write(connection, "a1", "a", route=ASTRAY)
    write(connection, "a2", "a")
    write(connection, "b1", "b")
    assert relay.run_once() == Relayed(1, 1)
    assert keys(drained(bank)) == ["b1"]
    with bank.connection_for_write() as broker:
        broker.default_channel.exchange_declare("nowhere", "topic", durable=True, auto_delete=False)
        broker.default_channel.queue_bind(bank.conf.task_default_queue, "nowhere", "nowhere")
        let_pass(connection)
        assert relay.run_once() == Relayed(1, 0)  # alone: it was refused before
        assert relay.run_once() == Relayed(1, 0)
        broker.default_channel.exchange_delete("nowhere")
    assert keys(drained(bank)) == ["a1", "a2"]


def test_a_connection_that_breaks_in_a_run_leaves_its_key_in_order(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    relay = relays()
    for number in range(5):
        write(connection, f"a{number}", "a")
    crash_points.install(lambda name: cut(relay) if name == "relay.published" else None)
    try:
        relay.run_once()
    finally:
        crash_points.install(None)
    marked = states(connection)
    assert marked == sorted(marked, reverse=True)  # published ones first
    while relay.run_once().published:
        pass
    assert list(dict.fromkeys(keys(drained(bank)))) == [f"a{number}" for number in range(5)]
    assert set(states(connection)) == {"published"}


def test_a_lane_of_a_relay_that_died_goes_on_when_its_reservation_is_over(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    def die(name: str) -> None:
        if name == "relay.selected":
            raise SystemExit(1)

    write(connection, "a1", "a")
    crash_points.install(die)
    try:
        with pytest.raises(SystemExit):
            relays().run_once()
    finally:
        crash_points.install(None)
    other = relays()
    assert other.run_once() == Relayed(0, 0)
    let_pass(connection)
    assert other.run_once() == Relayed(1, 0)


# ---------------------------------------------------------------- blocked, and what a person does


@pytest.fixture
def untold(bank: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task has no `on_failed`: what has not begun may be discarded, since nobody has to be told."""
    monkeypatch.setattr(bank.tasks[b.deposit.name], "on_failed", None)


@pytest.fixture
def blocked(relays: Callable[..., Relay], connection: Connection) -> tuple[Relay, int]:
    """A key whose first row has failed, with two rows behind it; the relay and the dead letter."""
    relay = relays()
    message_id = write(connection, "a1", "a", route=TOO_LONG)
    write(connection, "a2", "a")
    write(connection, "a3", "a")
    letter = fail(connection, relay, message_id)
    assert lanes(connection) == {"a": True}
    let_pass(connection)
    assert relay.run_once() == Relayed(0, 0)
    return relay, letter


@pytest.mark.usefixtures("untold")
def test_a_discarded_row_holds_back_its_key_no_longer(
    bank: Celery, blocked: tuple[Relay, int], connection: Connection
) -> None:
    relay, letter = blocked
    with runtime_of(bank).engine.begin() as transaction:
        discard.request(transaction, Person("ann", "operator"), letter, "of no use")
        discard.approve(transaction, Person("bob", "admin"), letter, app=bank)
    assert relay.run_once() == Relayed(2, 0)
    assert keys(drained(bank)) == ["a2", "a3"]
    assert states(connection) == ["failed", "published", "published"]
    assert lanes(connection) == {}


def test_a_replayed_row_goes_in_its_old_place(bank: Celery, blocked: tuple[Relay, int], connection: Connection) -> None:
    relay, letter = blocked
    mended = Message.composed(b.app, b.deposit.name, ("a1",), {}, task_id="t-a1", headers={KEY_HEADER: "a1"})
    connection.execute(
        text("UPDATE idempotency.outbox SET message = :message WHERE status = 'failed'"), {"message": mended.to_text()}
    )
    with runtime_of(bank).engine.begin() as transaction:
        dead_letters.replay(transaction, letter)
    assert relay.run_once() == Relayed(3, 0)
    assert keys(drained(bank)) == ["a1", "a2", "a3"]
    first = op.outbox(connection)[0]
    assert (first.status, first.origin, first.settled_at) == ("published", "replay", None)


def test_a_replayed_row_delivers_the_generation_that_was_opened(
    bank: Celery, blocked: tuple[Relay, int], connection: Connection
) -> None:
    relay, letter = blocked
    mended = Message.composed(b.app, b.deposit.name, ("a1",), {}, task_id="t-a1", headers={KEY_HEADER: "a1"})
    connection.execute(
        text("UPDATE idempotency.outbox SET message = :message WHERE status = 'failed'"), {"message": mended.to_text()}
    )
    op.failed(connection, OperationId("default", b.deposit.name, "a1"), fingerprint="v1:f")
    # as `store_end` leaves it for a copy that reached a worker
    connection.execute(text("UPDATE idempotency.dead_letters SET generation = 1 WHERE id = :id"), {"id": letter})
    with runtime_of(bank).engine.begin() as transaction:
        dead_letters.replay(transaction, letter)
    assert [row.generation for row in op.outbox(connection)] == [2, 1, 1]
    assert relay.run_once() == Relayed(3, 0)
    assert [message.headers[GENERATION_HEADER] for message in drained(bank)] == [2, 1, 1]


@pytest.mark.usefixtures("untold")
def test_the_purge_leaves_what_holds_back_a_key(
    bank: Celery, blocked: tuple[Relay, int], connection: Connection
) -> None:
    _, letter = blocked

    def purged() -> int:
        connection.execute(
            text("UPDATE idempotency.outbox SET settled_at = settled_at - interval '1 year', kept_at = NULL")
        )
        return maintenance.purge_once(bank, limit=100).rows

    assert purged() == 0
    assert lanes(connection) == {"a": True}
    with runtime_of(bank).engine.begin() as transaction:
        discard.request(transaction, Person("ann", "operator"), letter, "of no use")
        discard.approve(transaction, Person("bob", "admin"), letter, app=bank)
    assert purged() == 1
    assert states(connection) == ["pending", "pending"]
    assert lanes(connection) == {"a": False}


def test_rows_behind_a_failed_one_are_counted_as_unpublished(
    bank: Celery, blocked: tuple[Relay, int], connection: Connection
) -> None:
    write(connection, "b1", None)
    with overview.monitoring_connection(settings_of(bank)) as connection:
        found = connection.exec_driver_sql(
            overview._UNPUBLISHED, {"bound": overview.BOUND, "service": op.SERVICE}
        ).one()
    assert (found.pending, found.unpublished, found.failed) == (3, 3, 1)


def test_a_replay_that_fails_again_blocks_its_key_again(
    bank: Celery, blocked: tuple[Relay, int], connection: Connection
) -> None:
    relay, letter = blocked
    with runtime_of(bank).engine.begin() as transaction:
        dead_letters.replay(transaction, letter)
    assert lanes(connection) == {"a": False}
    for _ in range(relay_module.OWN_ERRORS):
        let_pass(connection)
        relay.run_once()
    again = [row.id for row in op.dead_letters(connection) if row.status == "open"]
    assert len(again) == 1
    assert again != [letter]
    assert lanes(connection) == {"a": True}


@pytest.mark.usefixtures("untold")
def test_a_discard_and_a_relay_at_once_leave_the_key_open(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    """The relay notes a failure while a person discards it: the later one sees what the other did."""
    relay = relays()
    message_id = write(connection, "a1", "a", route=TOO_LONG)
    write(connection, "a2", "a")
    letter = fail(connection, relay, message_id)
    with runtime_of(bank).engine.connect() as person:
        discard.request(person, Person("ann", "operator"), letter, "of no use")
        discard.approve(person, Person("bob", "admin"), letter, app=bank)
        late = threading.Thread(target=refresh, args=(bank, (b.deposit.name, "a")))
        late.start()  # waits for the lane, and then looks
        late.join(0.3)
        person.commit()
        late.join(10)
    assert lanes(connection) == {"a": False}
    assert relay.run_once() == Relayed(1, 0)


def refresh(bank: Celery, lane: tuple[str, str]) -> None:
    with runtime_of(bank).autocommit() as connection:
        outbox.refresh_lanes(connection, [lane])


def test_a_lane_stays_while_a_row_of_it_is_being_committed(
    bank: Celery, relays: Callable[..., Relay], connection: Connection
) -> None:
    relay = relays()
    write(connection, "a1", "a")
    with runtime_of(bank).engine.connect() as slow:
        write(slow, "a2", "a")
        slow.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))  # as far as a COMMIT that waits for its standby
        assert relay.run_once() == Relayed(1, 0)
        assert lanes(connection) == {"a": False}
        slow.commit()
    assert relay.run_once() == Relayed(1, 0)
    assert lanes(connection) == {}


@pytest.mark.parametrize("keys_blocked", [1, 2000], ids=["behind one row", "of as many keys"])
def test_blocked_rows_are_not_read_by_a_pass(
    bank: Celery, relays: Callable[..., Relay], connection: Connection, keys_blocked: int
) -> None:
    connection.execute(
        text("""
            INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, origin, ordering_key,
                                            service)
            SELECT 'e' || n, 'default', 'events', 'k' || n, 'f', '{}', 'enqueue', 'blocked ' || n % :keys, 'bank'
            FROM generate_series(1, 4000) n
        """),
        {"keys": keys_blocked},
    )
    connection.execute(
        text("""
            UPDATE idempotency.outbox SET status = 'failed', last_error = 'e'
            WHERE id IN (SELECT min(id) FROM idempotency.outbox GROUP BY ordering_key)
        """)
    )
    connection.execute(text("SELECT idempotency.refresh_lane(task, ordering_key) FROM idempotency.lanes"))
    write(connection, "a1", "a")
    write(connection, "free", None)
    connection.execute(text("VACUUM ANALYZE idempotency.outbox, idempotency.lanes"))
    for statement in (outbox._RESERVE_ROWS, outbox._RESERVE_LANES):
        assert rows_read(bank, statement, service=op.SERVICE, batch=200, seconds=0.0, silent=[]) < 20
    assert relays().run_once() == Relayed(2, 0)
    assert sorted(keys(drained(bank))) == ["a1", "free"]


@pytest.mark.parametrize(
    ("statement", "index"), [("_RESERVE_ROWS", "outbox_pending"), ("_RESERVE_LANES", "outbox_ordered")]
)
def test_the_relay_reserves_by_its_indexes(bank: Celery, statement: str, index: str) -> None:
    with runtime_of(bank).autocommit() as connection:
        plan = explain(connection, getattr(outbox, statement))
    assert f"using {index}" in plan, plan
    assert "Seq Scan on outbox" not in plan
    assert "Seq Scan on lanes" not in plan
