"""Dead letters: what they say, and which deliveries they stand for."""

from __future__ import annotations

import calendar
import json
import sys
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import typer
from celery import Celery
from kombu import Queue
from sqlalchemy import Connection, Engine, Row, text
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from idempotency import DidNotHappen, OperationId, PermanentError
from idempotency.broker.queues import declare_queues
from idempotency.cli.many import each_of
from idempotency.cli.root import cli
from idempotency.errors import DiscardRefused, ReplayRefused
from idempotency.letters import consumer as consuming
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.letters.ending import LETTER_TRIES
from idempotency.operate import discard
from idempotency.operate.cancel import cancel
from idempotency.operate.change import read
from idempotency.operate.people import Person
from idempotency.operate.replay import replay
from idempotency.operate.resolve import resolve_effect
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.store import dead_letters, discards, ends, sweeps
from idempotency.store import lost as losing
from idempotency.store.dead_letters import Selection
from idempotency.wire import keys
from idempotency.wire.headers import KEY_HEADER
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import body_of, bury, die, headers, reject, waiting
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import Entries, Record, code, make_due
from tests.support.operators import ANN, act, shown, snapshot
from tests.support.outside import OutsideWorld
from tests.support.processes import eventually
from tests.support.tasks import Provider, accept, lost, make_task, transactional, unwrite, write


def lose(connection: Connection) -> None:
    """Everything was published a day ago, and the broker has lost it."""
    connection.execute(
        text("""UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp() - interval '1 day'
                WHERE status <> 'failed'""")
    )


def break_copy(app: Celery, task: Any, row: Row[Any]) -> None:
    """A copy of this row's message comes to the dead-letter queue as something that is no JSON."""
    consumer = DeadLetterConsumer(app)
    die(app, consumer, "not JSON", headers=headers(task=task.name) | {"idempotency-outbox-id": row.message_id})
    eventually(consumer.run_once)
    consumer.close()


def sends(app: Celery) -> int:
    """How many operations are sent again, in passes of which the last finds no more."""
    return resend_lost(app).resent + resend_lost(app).resent


# ---------------------------------------------------------------- open and discarded letters


def test_a_replay_that_was_lost_is_sent_again_beside_an_open_letter(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection
) -> None:
    id = accept(engine, b.failing, "a", "permanent")
    (row,) = op.outbox(connection, id)
    op.sent(connection, id)
    deliver_row(deliveries, b.failing, row)
    break_copy(bank, b.failing, row)
    failed, broken = op.dead_letters(connection, id)
    replay(bank, failed.id, ANN)
    lose(connection)
    assert (broken.outbox_id, sends(bank)) == (row.id, 1)
    replayed = op.outbox(connection, id)[-1]
    assert (replayed.generation, replayed.status, replayed.origin) == (2, "pending", "resend")


ASKS, APPROVES = Person("ann", "operator"), Person("bob", "admin")


def discard_letter(app: Celery, letter: int) -> None:
    act(app, discard.request, ASKS, letter, "a broken copy")
    act(app, discard.approve, APPROVES, letter)


@pytest.mark.few(1)
@pytest.mark.parametrize("broken", [0, 1], ids=["the first", "the second"])
def test_a_letter_of_one_acceptance_loses_no_other(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, entries: Entries, broken: int
) -> None:
    for _ in range(2):
        id = accept(engine, b.deposit, "a")
    rows = op.outbox(connection, id)
    lose(connection)
    break_copy(bank, b.deposit, rows[broken])
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.outbox_id) == ("undecodable", rows[broken].id)

    sent = sends(bank)
    discard_letter(bank, letter.id)
    assert sent + sends(bank) == 1
    healthy = op.outbox(connection, id)[1 - broken]
    assert (healthy.id, healthy.status) == (rows[1 - broken].id, "pending")
    assert deliver_row(deliveries, b.deposit, healthy).state == "SUCCESS"
    assert entries("a") == 1


def test_a_row_with_its_letter_open_is_looked_at_once(bank: Celery, engine: Engine, connection: Connection) -> None:
    id = accept(engine, b.deposit, "a")
    (row,) = op.outbox(connection, id)
    lose(connection)
    break_copy(bank, b.deposit, row)
    assert sends(bank) == 0
    assert op.outbox(connection, id)[0].taken  # so no index that a pass reads has it


def test_a_pass_begun_before_a_discard_does_not_hide_what_it_gave_back(
    bank: Celery, engine: Engine, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        id = accept(engine, b.deposit, "a")
    lose(connection)
    break_copy(bank, b.deposit, op.outbox(connection, id)[1])
    (letter,) = op.dead_letters(connection)

    # behind its snapshot, before its first row
    wait = "(SELECT pg_advisory_xact_lock_shared(7)::text IS NOT NULL) AND r.queue = %(queue)s"
    monkeypatch.setattr(losing, "_JUDGE", losing._JUDGE.replace("r.queue = %(queue)s", wait))
    monkeypatch.setattr(sweeps, "LOCK_TIMEOUT_MS", 10_000)
    connection.exec_driver_sql("SELECT pg_advisory_lock(7)")
    passing = op.in_background(lambda: resend_lost(bank))
    op.wait_for_a_lock(connection)
    discard_letter(bank, letter.id)
    connection.exec_driver_sql("SELECT pg_advisory_unlock(7)")
    assert passing.result(30).resent == 0
    monkeypatch.undo()
    assert not op.outbox(connection, id)[0].taken
    assert sends(bank) == 1


def unpublishable(app: Celery, connection: Connection) -> Row[Any]:
    """The letter of what is in the outbox and can never be published."""
    connection.execute(
        text("""UPDATE idempotency.outbox SET message = 'not a message', attempts = 4,
                available_at = clock_timestamp() - interval '1 s'""")
    )
    relay = Relay(app)
    relay.run_once()
    relay.close()
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.source) == ("unpublishable", "relay")
    return letter


def reserving(app: Celery) -> Any:
    """A task whose every attempt does its step and asks for another."""

    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=unwrite)
        raise ValueError("again")

    return make_task(app, body)


def test_the_last_delivery_of_an_operation_is_not_discarded_until_it_ended(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record, entries: Entries
) -> None:
    task = reserving(bank)
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    letter = unpublishable(bank, connection)
    act(bank, discard.request, ASKS, letter.id, "too large")
    before = snapshot(connection)
    with pytest.raises(DiscardRefused, match=r"has not ended and nothing else will deliver it; replay .* or cancel"):
        act(bank, discard.approve, APPROVES, letter.id)
    assert snapshot(connection) == before

    cancel(bank, read(connection, OperationId("default", task.name, "k"), op.SERVICE), ANN)
    assert (record("k").status, entries("reserved")) == ("failed", 0)
    # ended by the cancel, whose own letter says so: there is nothing left to discard
    assert [each.status for each in op.dead_letters(connection)] == ["replayed", "open"]


def test_no_letter_of_a_running_operation_is_discarded(bank: Celery, engine: Engine, connection: Connection) -> None:
    id = accept(engine, b.deposit, "a")
    (row,) = op.outbox(connection, id)
    letter = unpublishable(bank, connection)
    held = op.started(connection, id, fingerprint=row.fingerprint)
    act(bank, discard.request, ASKS, letter.id, "too large")
    with pytest.raises(DiscardRefused, match="is running"):
        act(bank, discard.approve, APPROVES, letter.id)
    ends.complete(connection, held, "1", retention=60.0, lease=60.0)
    act(bank, discard.approve, APPROVES, letter.id)


def test_discarding_a_broken_copy_of_a_retry_sends_the_retry_again(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    task = reserving(bank)
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    lose(connection)
    (retry,) = op.outbox(connection)
    break_copy(bank, task, retry)
    assert sends(bank) == 0
    (letter,) = op.dead_letters(connection)
    discard_letter(bank, letter.id)
    assert sends(bank) == 1
    assert deliver_row(deliveries, task, retry).state == "RETRY"
    assert record("k").attempts == 2


def test_another_requests_letter_is_discarded_while_the_operation_runs(
    bank: Celery, engine: Engine, connection: Connection
) -> None:
    id = accept(engine, b.deposit, "a")
    letter = unpublishable(bank, connection)
    op.started(connection, id, fingerprint="v1:another request")
    discard_letter(bank, letter.id)
    (found,) = op.dead_letters(connection)
    assert (found.id, found.status) == (letter.id, "discarded")


# ---------------------------------------------------------------- what a letter says and stops


def test_a_letter_follows_the_code_that_a_person_ends_its_operation_with(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    """So that a bulk replay of what is unknown does not take what a person has ended."""

    def body(self: Any) -> Any:
        self.step("reserve", write, "reserved", undo=unwrite)
        try:
            return self.effect("call", Provider(lost()))
        except ConnectionError:
            raise PermanentError("gave up", "gave_up") from None

    task = make_task(bank, body)
    deliveries.deliver(task, key="k")
    (unknown,) = dead_letters.select_ids(connection, Selection("open", reason="effect_unknown"), limit=10)
    resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN, end=True)
    assert code(record("k")) == ("gave_up", None)
    assert dead_letters.select_ids(connection, Selection("open", reason="effect_unknown"), limit=10) == []
    assert dead_letters.select_ids(connection, Selection("open", reason="gave_up"), limit=10) == [unknown]


def test_a_key_function_that_raises_refuses_its_replay_and_stops_no_other(
    bank: Celery, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(bank, lambda self, order: "done", key=lambda arguments: arguments["order"]["id"])
    consumer = DeadLetterConsumer(bank)
    with monkeypatch.context() as patch:
        patch.delitem(bank.tasks, task.name)  # both came while no worker knew the task
        die(bank, consumer, json.dumps([[{}], {}, {}]), headers=headers(task=task.name))
        reject(bank, json.dumps([[{"id": "o-1"}], {}, {}]), dead=2, headers=headers(task=task.name))
        taken = 0
        while taken < 2:
            taken += consumer.run_once()
    consumer.close()
    broken, good = (letter.id for letter in op.dead_letters(connection))

    with pytest.raises(ReplayRefused):
        replay(bank, broken, ANN)

    def work(letter: int) -> dict[str, Any]:
        replay(bank, letter, ANN)
        return {}

    with pytest.raises(typer.Exit):
        each_of([broken, good], work, "replayed", single=None, dry_run=False, as_json=True)
    assert [letter.status for letter in op.dead_letters(connection)] == ["open", "replayed"]


def test_an_undo_that_cannot_be_imported_stops_no_other_dead_message(
    bank: Celery,
    deliveries: Deliveries,
    connection: Connection,
    record: Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The undo's module needs a secret that workers have and relays do not: a KeyError, which is no ImportError."""
    (tmp_path / "with_a_secret.py").write_text(
        textwrap.dedent("""
        import os
        SECRET = os.environ["A_SECRET_OF_WORKERS"]
        def undo(session, result): pass
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("A_SECRET_OF_WORKERS", "x")
    import with_a_secret  # type: ignore[import-not-found]

    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=with_a_secret.undo)
        raise ValueError("again")

    task = make_task(bank, body)
    deliveries.deliver(task, key="k")
    # the relay: another process, without the secret
    monkeypatch.delenv("A_SECRET_OF_WORKERS")
    monkeypatch.delitem(sys.modules, "with_a_secret")
    connection.execute(text("UPDATE idempotency.outbox SET settled_at = clock_timestamp()"))
    consumer = DeadLetterConsumer(bank)
    die(bank, consumer, json.dumps([[], {}, {}]), headers=headers(task=task.name) | {"idempotency-key": "k"})
    reject(bank, dead=2)
    taken = 0
    while taken < 2:
        taken += consumer.run_once()
    consumer.close()
    assert (code(record("k"))[0], record("a1").status) == ("unfinished", "failed")
    assert len(op.dead_letters(connection)) == 2


def test_an_error_text_is_kept_up_to_500_characters(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    def body(self: Any) -> None:
        raise PermanentError("x" * 100_000, "refused")

    deliveries.deliver(make_task(bank, body), key="k")
    (letter,) = op.dead_letters(connection)
    for kept in (record("k").error, letter.last_error, letter.first_error):
        assert len(json.loads(kept)["message"]) <= 500


# ---------------------------------------------------------------- which deliveries are left


def test_a_dead_message_ends_nothing_that_an_older_row_will_deliver(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record, entries: Entries
) -> None:
    """Accepted twice: for later, still in the outbox, and for now; the message of the second one dies."""
    with Session(transactional(engine)) as session, session.begin():
        b.deposit.enqueue(session, "a", countdown=3600)
        b.deposit.enqueue(session, "a")
    id = OperationId("default", b.deposit.name, "a")
    later = op.outbox(connection, id)[0]
    consumer = DeadLetterConsumer(bank)
    die(bank, consumer, json.dumps([["a"], {}, {}]), headers=headers() | op.sent(connection, id))
    eventually(consumer.run_once)
    consumer.close()
    assert (later.status, record("a"), op.dead_letters(connection)) == ("pending", None, [])
    deliver_row(deliveries, b.deposit, later)
    assert (record("a").status, entries("a")) == ("completed", 1)


def test_a_discarded_letter_settles_the_row_of_its_own_message_only(
    bank: Celery, engine: Engine, connection: Connection, record: Record
) -> None:
    """Accepted twice; one message cannot be decoded. The other one comes back after the broker is wiped."""
    with Session(transactional(engine)) as session, session.begin():
        b.deposit.enqueue(session, "a")
        b.deposit.enqueue(session, "a")
    id = OperationId("default", b.deposit.name, "a")
    marks = op.sent(connection, id)
    connection.execute(text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()"))
    consumer = DeadLetterConsumer(bank)
    die(bank, consumer, "not JSON", headers=headers() | marks)
    eventually(consumer.run_once)
    consumer.close()
    (letter,) = op.dead_letters(connection)
    assert letter.reason == "undecodable"
    with engine.begin() as transaction:
        discard.request(transaction, Person("ann", "operator"), letter.id, "a broken copy")
        discard.approve(transaction, Person("bob", "admin"), letter.id, app=bank)
    assert [row.settled_at is not None for row in op.outbox(connection, id)] == [False, True]
    connection.execute(text("UPDATE idempotency.outbox SET published_at = clock_timestamp() - interval '1d'"))
    assert resend_lost(bank, lambda queue: 0).resent == 1
    assert op.outbox(connection, id)[0].status == "pending"


# ---------------------------------------------------------------- letters of the relay


def test_the_letter_of_what_the_relay_could_not_handle_can_be_replayed(
    bank: Celery, deliveries: Deliveries, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consuming, "HELD_PAUSE", 0.0)
    id = OperationId("default", b.deposit.name, "stuck")
    op.due(connection, id)
    accepted = keys.fingerprint({"account": "stuck"})
    for table in ("records", "outbox"):
        connection.execute(text(f"UPDATE idempotency.{table} SET fingerprint = '{accepted}'"))
    marks = op.sent(connection, id)
    connection.execute(
        text("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON idempotency.dead_letters FOR EACH ROW
        WHEN (NEW.reason <> 'unhandled') EXECUTE FUNCTION refuse()""")
    )
    consumer = DeadLetterConsumer(bank)
    stuck = headers(expires="2001-01-01T00:00:00+00:00", **{KEY_HEADER: "stuck"}) | marks
    die(bank, consumer, body_of("stuck"), headers=stuck)
    for _ in range(LETTER_TRIES + 2):
        consumer.run_once()
    consumer.close()
    connection.execute(text("DROP FUNCTION refuse() CASCADE"))
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.task, letter.key) == ("unhandled", id.task, "stuck")
    before = len(op.outbox(connection))
    replay(bank, letter.id, ANN)
    (row,) = op.outbox(connection)[before:]
    assert deliver_row(deliveries, b.deposit, row).state == "SUCCESS"


# ---------------------------------------------------------------- dead-letter queues, bulk replays and discards


def test_a_header_that_the_client_cannot_read_becomes_a_dead_letter(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timestamp in milliseconds (a producer in JavaScript, say): py-amqp would raise before there is a message."""
    consumer.run_once()
    with monkeypatch.context() as patched:
        patched.setattr(calendar, "timegm", lambda _: 1_763_784_000_000)
        bury(bank, ["foreign"], [{"sent-at": datetime.now(UTC)}])
    bury(bank, ["a1", "a2", "a3"])
    assert consumer.run_once() == 4
    assert len(op.dead_letters(connection)) == 4
    assert waiting(bank) == 0


def test_a_dead_letter_queue_declared_otherwise_is_consumed(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection
) -> None:
    """A queue that was declared differently: a classic one, say, or one with another limit."""
    name = f"{bank.conf.task_default_queue}-dead"
    with bank.connection_for_write() as broker:
        channel = broker.channel()
        Queue(name, routing_key=name, durable=True)(channel).declare()
    bury(bank, ["a1", "a2"])
    assert consumer.run_once() == 2
    assert len(op.dead_letters(connection)) == 2
    assert waiting(bank) == 0


def test_a_queue_declared_otherwise_keeps_no_other_from_being_declared(bank: Celery) -> None:
    """A worker declares its dead-letter queues before it consumes: until they exist, the broker keeps letters back."""
    names = [f"{bank.conf.task_default_queue}-{each}" for each in ("first-dead", "second-dead")]
    with bank.connection_for_write() as broker:
        Queue(names[0], routing_key=names[0], durable=True)(broker.channel()).declare()
        declare_queues(
            broker, [Queue(name, routing_key=name, queue_arguments={"x-queue-type": "quorum"}) for name in names]
        )
        found = [broker.channel().queue_declare(name, passive=True).queue for name in names]
    assert found == names


def test_one_record_that_is_refused_stops_no_bulk_replay(
    bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """Refused by a trigger here; by a lock that is held for longer than a lease, elsewhere."""
    for account in ("a1", "a2", "a3"):
        deliveries.deliver(b.failing, account, "permanent")
    connection.execute(
        text("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'frozen account'; END $$;
        CREATE TRIGGER refuse BEFORE UPDATE ON idempotency.records FOR EACH ROW
        WHEN (NEW.key = 'a2') EXECUTE FUNCTION refuse()""")
    )
    arguments = ["dead-letters", "replay", "--task", b.failing.name, "--yes", "--json", "-A", "tests.support.bank"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert (len(said["replayed"]), len(said["refused"])) == (2, 1)
    assert "frozen account" in said["refused"][0]["why"]
    assert [(letter.key, letter.status) for letter in op.dead_letters(connection)] == [
        ("a1", "replayed"),
        ("a2", "open"),
        ("a3", "replayed"),
    ]


def test_the_letter_of_an_unknown_effect_is_not_discarded(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, outside: OutsideWorld
) -> None:
    """The purge would forget the effect, and the next call would begin as if there was none."""
    task, id = bank.tasks[b.transfer.name], OperationId("default", b.transfer.name, "a1")
    outside.script = ["fail after"] * 10  # charged, and every answer is lost
    for attempt in range(10):
        if record("a1") is not None and record("a1").status == "failed":
            break
        deliveries.deliver(task, "a1", outside.url, origin="retry" if attempt else None)
        if record("a1").status == "released":
            op.age(connection, id, available_at=-1)
    assert record("a1").error_code == "effect_unknown"
    (letter,) = op.dead_letters(connection)
    before = snapshot(connection)
    with pytest.raises(DiscardRefused, match="its outcome is not known; resolve it first"):
        act(bank, discard.request, Person("ann", "admin"), letter.id, "old")
    assert snapshot(connection) == before
    discards.request(connection, letter.id, by="ann", reason="asked before the effect was begun")
    with pytest.raises(DiscardRefused, match="its outcome is not known; resolve it first"):
        act(bank, discard.approve, Person("ben", "admin"), letter.id)
    assert [letter.status for letter in op.dead_letters(connection)] == ["open"]
