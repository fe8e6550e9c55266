"""More ends that a second reader proved wrong: letters, messages, sessions, and what grows."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import typer
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from idempotency import Defer, DidNotHappen, OperationId, PermanentError, SessionNotYours
from idempotency.cli.dead_letter_commands import _each
from idempotency.letters.dead_letter_queue import DeadLetterConsumer
from idempotency.operate import discards, operators
from idempotency.operate.discards import Person
from idempotency.relay.reconcile import reconcile
from idempotency.store import dead_letters
from idempotency.store.dead_letters import ReplayRefused, Selection
from idempotency.upkeep import maintenance
from tests.integration.test_proven_ends import DEFERRED, open_case
from tests.support import bank as b
from tests.support import operations as op
from tests.support.bank import INSERT
from tests.support.dead_messages import die, headers, reject
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import Entries, Record, code, make_due
from tests.support.operators import ANN, shown
from tests.support.tasks import Provider, lost, make_task, unwrite, write

# ---------------------------------------------------------------- letters


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
    operators.resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN, end=True)
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
        operators.replay(bank, broken, ANN)

    def work(letter: int) -> dict[str, Any]:
        operators.replay(bank, letter, ANN)
        return {}

    with pytest.raises(typer.Exit):
        _each([broken, good], work, "replayed", single=None, dry_run=False, as_json=True)
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


# ---------------------------------------------------------------- messages


def test_deferrals_leave_at_most_a_few_outbox_rows(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """A refund asks every 2 s whether its payment is settled, for up to 12 hours."""

    def body(self: Any, note: str) -> None:
        raise Defer(2.0, "still pending")

    task = make_task(bank, body)
    deliveries.deliver(task, key="k", note="x" * 10_000)
    for _ in range(6):
        connection.execute(
            text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp() - interval '1d'")
        )
        make_due(engine, "k")
        deliver_row(deliveries, task, op.outbox(connection)[-1])
        reconcile(bank, lambda queue: 1_000_000)
        maintenance.purge(bank)
    assert (record("k").status, record("k").attempts) == ("released", 0)
    assert len(op.outbox(connection)) <= 3


def test_a_dead_message_ends_over_an_on_failed_that_cannot_commit(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    connection.execute(text(DEFERRED))

    def body(self: Any) -> None:
        raise ValueError("again")

    task = make_task(bank, body, on_failed=open_case)
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    marks = op.sent(connection, OperationId("default", task.name, "k"))
    consumer = DeadLetterConsumer(bank)
    message = headers(task=task.name) | {"idempotency-key": "k"} | marks
    die(bank, consumer, json.dumps([[], {}, {}]), headers=message)
    op.eventually(consumer.run_once)
    consumer.close()
    (letter,) = op.dead_letters(connection)
    assert (record("k").status, letter.status, letter.reason) == ("failed", "open", "on_failed_error")
    assert operators.replay(bank, letter.id, ANN).key == "k"


def test_a_dead_message_ends_nothing_that_an_older_row_will_deliver(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record, entries: Entries
) -> None:
    """Accepted twice: for later, still in the outbox, and for now; the message of the second one dies."""
    with Session(engine) as session, session.begin():
        b.deposit.enqueue(session, "a", countdown=3600)
        b.deposit.enqueue(session, "a")
    id = OperationId("default", b.deposit.name, "a")
    later = op.outbox(connection, id)[0]
    consumer = DeadLetterConsumer(bank)
    die(bank, consumer, json.dumps([["a"], {}, {}]), headers=headers() | op.sent(connection, id))
    op.eventually(consumer.run_once)
    consumer.close()
    assert (later.status, record("a"), op.dead_letters(connection)) == ("pending", None, [])
    deliver_row(deliveries, b.deposit, later)
    assert (record("a").status, entries("a")) == ("completed", 1)


def test_a_discarded_letter_settles_the_row_of_its_own_message_only(
    bank: Celery, engine: Engine, connection: Connection, record: Record
) -> None:
    """Accepted twice; one message cannot be decoded. The other one comes back after the broker is wiped."""
    with Session(engine) as session, session.begin():
        b.deposit.enqueue(session, "a")
        b.deposit.enqueue(session, "a")
    id = OperationId("default", b.deposit.name, "a")
    marks = op.sent(connection, id)
    connection.execute(text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()"))
    consumer = DeadLetterConsumer(bank)
    die(bank, consumer, "not JSON", headers=headers() | marks)
    op.eventually(consumer.run_once)
    consumer.close()
    (letter,) = op.dead_letters(connection)
    assert letter.reason == "undecodable"
    with engine.begin() as transaction:
        discards.request(transaction, Person("ann", "operator"), letter.id, "a broken copy")
        discards.approve(transaction, Person("bob", "admin"), letter.id)
    assert [row.settled_at is not None for row in op.outbox(connection, id)] == [False, True]
    connection.execute(text("UPDATE idempotency.outbox SET published_at = clock_timestamp() - interval '1d'"))
    assert reconcile(bank, lambda queue: 0).resent == 1
    assert op.outbox(connection, id)[0].status == "pending"


# ---------------------------------------------------------------- sessions


def commit_the_connection(session: Session) -> None:
    session.connection().commit()


def commit_the_transaction(session: Session) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    transaction.commit()


def leave_the_session(session: Session) -> None:
    """SQLAlchemy's own idiom; its end closes, which rolls back."""
    with session:
        pass


@pytest.mark.parametrize("end", [commit_the_connection, commit_the_transaction, leave_the_session])
def test_a_body_that_ends_its_transaction_is_refused_and_leaves_nothing(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries, end: Any
) -> None:
    def body(self: Any) -> str:
        self.session.execute(INSERT, {"account": "row", "amount": 1})
        end(self.session)
        return "paid"

    assert isinstance(deliveries.deliver(make_task(bank, body), key="k").value, SessionNotYours)
    assert (record("k").status, code(record("k"))[0], entries("row")) == ("failed", "session_not_yours", 0)
