"""A person's data is erased: none of our tables has it any more, and the key stays spent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import IntegrityError

from idempotency import FingerprintMismatch, IdempotentTask, OperationFailed, PermanentError, lookup
from idempotency.application import runtime_of
from idempotency.errors import ChangeRefused, OperationNotFound, ReplayRefused, ResultErased
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.operate import discard
from idempotency.operate.change import Change
from idempotency.operate.erase import erase
from idempotency.operate.people import Person
from idempotency.operate.replay import replay
from idempotency.store import dead_letters, erasure
from idempotency.upkeep import maintenance
from idempotency.wire.headers import KEY_HEADER, TENANT_HEADER
from tests.support import operations as op
from tests.support.commands import runner
from tests.support.dead_messages import headers, publish
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.dump import holding
from tests.support.operators import act, snapshot
from tests.support.processes import eventually
from tests.support.tasks import enqueued

CANARY = "canary-7f3a"
ASKED = Change("ann", "request 17")


@pytest.fixture
def greet(bank: Celery, engine: Engine) -> Iterator[Any]:
    """A task that has a person's data in its arguments, a step, an effect, its result and its errors."""
    ran: list[str] = []

    @bank.task(base=IdempotentTask, bind=True, key="{id}", name="tests.greet", shared=False, max_attempts=2)
    def greet(self: IdempotentTask, id: str, name: str) -> dict[str, str]:
        ran.append(id)
        self.step("note", lambda session, noted: noted, name)
        self.effect("mail", lambda *, to, idempotency_key: {"to": to}, to=name)
        if id.startswith("bad"):
            if len(ran) == 1:
                raise ValueError(f"{name} is away")
            raise PermanentError(f"{name} has died", "unknown_person")
        return {"name": name}

    greet.ran = ran
    yield greet
    bank.tasks.pop(greet.name)


def carry_out(connection: Connection, deliveries: Deliveries, task: Any, key: str) -> None:
    """Enqueued, delivered until it has ended, and its letter discarded."""
    enqueued(connection, task, key, CANARY)
    id = op.operation(task, key)
    for _ in range(2):
        if op.status(connection, id) in (None, "released"):
            op.sent(connection, id)
            if op.status(connection, id) == "released":
                op.age(connection, id, available_at=-1)
            deliver_row(deliveries, task, op.outbox(connection, id)[-1])
    for letter in op.dead_letters(connection, id):
        act(deliveries.app, discard.request, Person("eve", "operator"), letter.id, "account closed")
        act(deliveries.app, discard.approve, Person("ben", "admin"), letter.id)


@pytest.mark.parametrize(("key", "status"), [("p1", "completed"), ("bad1", "failed")])
def test_of_an_erased_operation_nothing_is_left_but_its_spent_key(
    bank: Celery, deliveries: Deliveries, connection: Connection, greet: Any, key: str, status: str
) -> None:
    carry_out(connection, deliveries, greet, key)
    id, runs = op.operation(greet, key), len(greet.ran)
    before = op.record(connection, id)
    assert before.status == status
    found = {"records", "outbox"} | ({"dead_letters"} if status == "failed" else set())
    assert holding(connection.engine, CANARY) == found
    assert erase(bank, id, ASKED).operations == [id]

    assert holding(connection.engine, CANARY) == set()
    after = op.record(connection, id)
    kept = ("tenant", "task", "key", "fingerprint", "status", "generation", "fence", "error_code", "response_code")
    times = ("created_at", "completed_at", "expires_at")
    assert [getattr(after, name) for name in (*kept, *times)] == [getattr(before, name) for name in (*kept, *times)]
    assert set(after.effects) == {"note", "mail"}
    assert after.effects["mail"]["key"] == before.effects["mail"]["key"]  # by which the provider knows the call
    (row,) = connection.execute(text("SELECT * FROM idempotency.audit WHERE action = 'erase'")).all()
    assert (row.actor, row.reason, row.key, row.details) == ("ann", "request 17", key, {})

    duplicate, other = deliveries.deliver(greet, key, CANARY), deliveries.deliver(greet, key, "another")
    assert (type(other.value), len(greet.ran)) == (FingerprintMismatch, runs)
    stored = lookup(bank, greet.name, key)
    if status == "completed":
        assert (duplicate.state, stored.is_erased) == ("IGNORED", True)  # no failure: its errbacks are not called
        with pytest.raises(ResultErased, match="carried out once; its data has been erased since"):
            _ = stored.result
    else:
        assert (type(duplicate.value), duplicate.value.code) == (OperationFailed, "unfinished")
        assert stored.error == {"code": "unfinished", "message": "erased"}


LATE = text("""
INSERT INTO idempotency.dead_letters (source, tenant, task, key, generation, fingerprint, consumer_service, reason, payload)
SELECT 'broker', tenant, task, key, generation, fingerprint, 'bank', 'rejected', :payload
FROM idempotency.records WHERE key = 'bad1' RETURNING id
""")


def test_a_late_copy_of_an_erased_message_is_not_replayed(
    bank: Celery, deliveries: Deliveries, connection: Connection, greet: Any
) -> None:
    carry_out(connection, deliveries, greet, "bad1")
    message = op.outbox(connection)[0].message
    erase(bank, op.operation(greet, "bad1"), ASKED)
    late = connection.execute(LATE, {"payload": message}).scalar_one()
    before = snapshot(connection)
    with pytest.raises(ReplayRefused, match=r"the data of its operation was erased at .*; it never runs again"):
        replay(bank, late, ASKED)
    with pytest.raises(IntegrityError, match="was erased, so it never runs again"):  # as code of 0014 would
        act(bank, dead_letters.replay, late)
    assert snapshot(connection) == before
    with pytest.raises(ChangeRefused, match=f"dead letter {late} is open"):
        erase(bank, op.operation(greet, "bad1"), ASKED)
    act(bank, discard.request, Person("eve", "operator"), late, "request 17")
    act(bank, discard.approve, Person("ben", "admin"), late)
    assert holding(connection.engine, CANARY) == {"dead_letters"}
    erase(bank, op.operation(greet, "bad1"), ASKED)
    assert holding(connection.engine, CANARY) == set()


def open_effect(connection: Connection, deliveries: Deliveries, greet: Any) -> None:
    carry_out(connection, deliveries, greet, "p1")
    connection.execute(text("UPDATE idempotency.records SET effects = jsonb_set(effects, '{mail,state}', '\"begun\"')"))


def open_letter(connection: Connection, deliveries: Deliveries, greet: Any) -> None:
    for _ in range(2):
        deliveries.deliver(greet, "bad1", CANARY)
        connection.execute(text("UPDATE idempotency.records SET available_at = now() WHERE status = 'released'"))
    connection.execute(text("UPDATE idempotency.outbox SET status = 'published', published_at = now()"))


def accepted_again(connection: Connection, deliveries: Deliveries, greet: Any) -> None:
    carry_out(connection, deliveries, greet, "p1")
    enqueued(connection, greet, "p1", CANARY)


def another_request(connection: Connection, deliveries: Deliveries, greet: Any) -> None:
    accepted_again(connection, deliveries, greet)
    connection.execute(text("UPDATE idempotency.outbox SET status = 'published', published_at = now()"))
    connection.execute(text("UPDATE idempotency.outbox SET fingerprint = 'v1:other' WHERE settled_at IS NULL"))


IN_THE_WAY: dict[str, tuple[Callable[..., object], str]] = {
    "running": (lambda connection, _, task: op.started(connection, op.operation(task, "p1")), "is started; only what"),
    "waiting": (lambda connection, _, task: op.early(connection, op.operation(task, "p1")), "is released; only what"),
    "accepted": (lambda connection, _, task: enqueued(connection, task, "p1", CANARY), "has not begun"),
    "a letter": (open_letter, r"dead letter \d+ is open; replay it, or discard it first"),
    "an effect": (open_effect, "effect mail is open; say what became of it first"),
    "a message": (accepted_again, "a message under its key has not been delivered; try again later"),
    "another": (another_request, "a message under its key has not been delivered; try again later"),
}


@pytest.mark.parametrize(("make", "why"), IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_what_still_needs_its_data_is_not_erased(
    bank: Celery, deliveries: Deliveries, connection: Connection, greet: Any, make: Callable[..., object], why: str
) -> None:
    make(connection, deliveries, greet)
    before = snapshot(connection)
    key = "bad1" if make is open_letter else "p1"
    with pytest.raises(ChangeRefused, match=f"tests.greet {key}: {why}"):
        erase(bank, op.operation(greet, key), ASKED)
    assert snapshot(connection) == before


def test_what_there_is_not_is_not_erased(bank: Celery, connection: Connection, greet: Any) -> None:
    with pytest.raises(OperationNotFound):
        erase(bank, op.operation(greet, "p1"), ASKED)


def test_an_erased_record_stays_erased_and_is_purged_in_its_time(
    bank: Celery, deliveries: Deliveries, connection: Connection, greet: Any
) -> None:
    carry_out(connection, deliveries, greet, "p1")
    id = op.operation(greet, "p1")
    erase(bank, id, ASKED)
    for change in ("generation = 2", "message = 'x'", "result = '1'", "erased_at = NULL"):
        with pytest.raises(IntegrityError, match="was erased, so it never runs again"):
            connection.execute(text(f"UPDATE idempotency.records SET {change}"))
    with runtime_of(bank).autocommit() as other:
        assert erasure.erased_at(other, id) is not None
    op.age(connection, id, expires_at=-1)
    connection.execute(text("UPDATE idempotency.outbox SET published_at = now() - interval '1 year'"))
    assert maintenance.purge(bank) == 1
    assert op.record(connection, id) is None


def test_the_command_erases_once_and_says_what(
    bank: Celery,
    deliveries: Deliveries,
    connection: Connection,
    greet: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = runner(monkeypatch, capsys)
    carry_out(connection, deliveries, greet, "p1")
    erasing = ("erase", "p1", "--task", "greet", "--reason", "request 17", "--request-id", "r17")
    assert run(*erasing).out == "erased: tests.greet p1\n"
    again = run(*erasing, "--json").document  # the same request is carried out once
    assert again["operations"] == [{"tenant": "default", "task": "tests.greet", "key": "p1"}]
    assert connection.execute(text("SELECT count(*) FROM idempotency.audit")).scalar_one() == 1
    assert CANARY not in json.dumps(run("show", "p1", "--task", "greet", "--json").document)


@pytest.mark.parametrize("tenant", ["default", None])
def test_a_letter_whose_task_is_in_its_headers_alone_is_in_the_way_and_erased(
    bank: Celery,
    deliveries: Deliveries,
    connection: Connection,
    greet: Any,
    consumer: DeadLetterConsumer,
    tenant: str | None,
) -> None:
    """No worker could run the copy, so nothing else says whose it is."""
    carry_out(connection, deliveries, greet, "p1")
    consumer.run_once()
    sent = headers(task=greet.name, timelimit="soon", **{KEY_HEADER: "p1", TENANT_HEADER: tenant})
    death = {"x-death": [{"queue": bank.conf.task_default_queue, "reason": "rejected"}]}
    publish(
        bank,
        json.dumps([["p1", CANARY], {}, {}]),
        queue=f"{bank.conf.task_default_queue}-dead",
        headers=sent | death,
    )
    eventually(lambda: (consumer.run_once() and False) or len(op.dead_letters(connection)) == 1)
    (letter,) = op.dead_letters(connection)
    assert (letter.task, letter.header_task, letter.status) == (None, greet.name, "open")
    id = op.operation(greet, "p1")
    with pytest.raises(ChangeRefused, match=f"dead letter {letter.id} is open"):
        erase(bank, id, ASKED)
    connection.execute(text("UPDATE idempotency.dead_letters SET status = 'discarded', closed_at = now()"))
    erase(bank, id, ASKED)
    assert holding(connection.engine, CANARY) == set()


# An application's own trigger: it keeps a number of each message that goes. That of one customer is no number.
ARCHIVE = """
CREATE FUNCTION archive() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM (((OLD.message::json ->> 'body')::json -> 0) ->> 1)::int;
    RETURN OLD;
END $$;
CREATE TRIGGER archive BEFORE DELETE ON idempotency.outbox FOR EACH ROW EXECUTE FUNCTION archive();
"""


def test_what_a_row_was_set_aside_for_quotes_no_data_and_is_erased(
    bank: Celery, deliveries: Deliveries, connection: Connection, greet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    carry_out(connection, deliveries, greet, "p1")
    connection.execute(
        text(
            "UPDATE idempotency.outbox SET status = 'published', published_at = now() - interval '99 d', "
            "settled_at = now() - interval '99 d'"
        )
    )
    connection.exec_driver_sql(ARCHIVE)
    try:
        maintenance.purge_once(bank, limit=1000)
    finally:
        connection.exec_driver_sql("DROP TRIGGER archive ON idempotency.outbox; DROP FUNCTION archive()")
    (row,) = connection.execute(text("SELECT sweep, error FROM idempotency.set_aside")).all()
    assert "invalid input syntax for type integer" in row.error
    assert CANARY not in row.error + caplog.text
    erase(bank, op.operation(greet, "p1"), ASKED)
    (after,) = connection.execute(text("SELECT sweep, error FROM idempotency.set_aside")).all()
    assert (after.sweep, "integer" in after.error) == (row.sweep, False)
