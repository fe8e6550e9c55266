"""Editing the message of a dead letter: it stays the same operation, for its workers and for all who ask for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from pydantic import BaseModel
from sqlalchemy import Connection, Engine, text
from typer.testing import CliRunner

from idempotency import PermanentError
from idempotency.application import close_runtime
from idempotency.cli.root import cli
from idempotency.errors import ChangeRefused, IdempotencyError, NotAllowed, NotAuthenticated
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.letters.editing import difference
from idempotency.operate.archive import archive
from idempotency.operate.change import Change
from idempotency.operate.edit import approve_edit, edit, why_not
from idempotency.operate.erase import erase
from idempotency.operate.people import Person
from idempotency.operate.replay import replay
from idempotency.sagas import saga
from idempotency.store import edits
from idempotency.upkeep import maintenance
from idempotency.wire.keys import OperationId
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import body_of, die, reject, waiting
from tests.support.deliveries import Deliveries, Outcome, deliver_row
from tests.support.operators import snapshot
from tests.support.tasks import Provider, enqueued, make_task

ANN = Change("ann", "a typing error in the amount", is_verified=True)
WRONG: dict[str, Any] = {"order_id": "o1", "cents": -5}
RIGHT: dict[str, Any] = {"order_id": "o1", "cents": 500}


@pytest.fixture
def deliveries(bank: Celery) -> Deliveries:
    return Deliveries(bank)


@pytest.fixture
def ran(bank: Celery) -> list[int]:
    """The amounts that the body has run with."""
    return []


def task_of(bank: Celery, ran: list[int], **options: Any) -> Any:
    def refund(self: Any, order_id: str, cents: int) -> dict[str, int]:
        ran.append(cents)
        if cents < 0:
            raise PermanentError("an amount below zero", "invalid_amount")
        return {"refunded": cents}

    return make_task(bank, refund, **{"key": "{order_id}", "max_attempts": 1} | options)


@pytest.fixture
def task(bank: Celery, ran: list[int]) -> Any:
    return task_of(bank, ran)


@pytest.fixture
def letter(task: Any, deliveries: Deliveries, connection: Connection) -> int:
    enqueued(connection, task, **WRONG)
    deliver_newest(connection, deliveries, task)
    settle(connection)
    (found,) = op.dead_letters(connection)
    assert found.reason == "invalid_amount"
    return int(found.id)


def deliver_newest(connection: Connection, deliveries: Deliveries, task: Any) -> Outcome:
    """Deliver the newest row, as a relay and a worker do."""
    row = op.outbox(connection)[-1]
    connection.execute(
        text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp() WHERE id = :id"),
        {"id": row.id},
    )
    return deliver_row(deliveries, task, row)


def settle(connection: Connection) -> None:
    """As a relay does for the rows of what has ended."""
    connection.execute(text("UPDATE idempotency.outbox SET settled_at = clock_timestamp() WHERE status = 'published'"))


def payload(**kwargs: Any) -> str:
    return json.dumps({"kwargs": kwargs})


def replay_and_run(bank: Celery, letter: int, connection: Connection, deliveries: Deliveries, task: Any) -> Outcome:
    replay(bank, letter, ANN)
    return deliver_newest(connection, deliveries, task)


# ---------------------------------------------------------------- what callers get


def test_an_edited_operation_runs_with_its_new_arguments_and_answers_who_asks_with_either(
    bank: Celery, task: Any, letter: int, connection: Connection, deliveries: Deliveries, ran: list[int]
) -> None:
    before = enqueued(connection, task, **WRONG)
    deliver_newest(connection, deliveries, task)
    settle(connection)
    assert edit(bank, letter, payload(**RIGHT), ANN) is True
    assert ran == [-5]
    outcome = replay_and_run(bank, letter, connection, deliveries, task)
    assert outcome.value == {"refunded": 500}

    # who asks again, as before or corrected, gets the answer of the operation, and nothing runs
    for arguments in (WRONG, RIGHT):
        handle = enqueued(connection, task, **arguments)
        assert deliver_newest(connection, deliveries, task).value == {"refunded": 500}
        assert (handle.status(), handle.result(timeout=1)) == ("completed", {"refunded": 500})
        assert deliveries.deliver(task, **arguments).value == {"refunded": 500}
    assert before.status() == "completed"
    assert ran == [-5, 500]
    assert [row.status for row in op.dead_letters(connection)] == ["replayed"]
    # no end settles the row of a request with the arguments of before: its delivery has
    assert [row.settled_at is None for row in op.outbox(connection)][-2:] == [False, True]
    # and other arguments are another request, as ever
    assert "other arguments" in str(deliveries.deliver(task, order_id="o1", cents=7).value)


def test_a_request_of_before_never_runs_while_the_edited_one_is_due(
    bank: Celery, task: Any, letter: int, connection: Connection, deliveries: Deliveries, ran: list[int]
) -> None:
    edit(bank, letter, payload(**RIGHT), ANN)
    # not replayed yet: it has failed, for both
    assert deliveries.deliver(task, **WRONG).value.code == "invalid_amount"
    assert deliveries.deliver(task, **RIGHT).value.code == "invalid_amount"
    replay(bank, letter, ANN)
    id = OperationId("default", task.name, "o1")
    for origin in (None, "resend"):
        deliveries.deliver(task, **WRONG, origin=origin)
        assert op.status(connection, id) == "released"
    assert ran == [-5]
    assert len(op.dead_letters(connection)) == 1
    assert deliver_newest(connection, deliveries, task).value == {"refunded": 500}


def test_code_that_knows_no_edits_refuses_a_request_of_before_and_runs_the_edited_one(
    bank: Celery, task: Any, letter: int, connection: Connection, deliveries: Deliveries, ran: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    edit(bank, letter, payload(**RIGHT), ANN)
    monkeypatch.setattr(edits, "became", lambda *_: None)
    replay(bank, letter, ANN)
    assert "other arguments" in str(deliveries.deliver(task, **WRONG).value)
    assert deliver_newest(connection, deliveries, task).value == {"refunded": 500}
    assert ran == [-5, 500]
    assert [row.reason for row in op.dead_letters(connection)] == ["invalid_amount", "fingerprint_mismatch"]


def test_an_edit_may_be_edited_again_and_taken_back(
    bank: Celery, task: Any, letter: int, connection: Connection, deliveries: Deliveries, ran: list[int]
) -> None:
    edit(bank, letter, payload(order_id="o1", cents=1), ANN)
    edit(bank, letter, payload(**RIGHT), Change("ben", "five hundred"))
    with pytest.raises(ChangeRefused, match="has these arguments already"):
        edit(bank, letter, payload(**RIGHT), ANN)
    for cents in (-5, 1, 500):
        assert deliveries.deliver(task, order_id="o1", cents=cents).value.code == "invalid_amount"
    rows = edits.history(connection, letter)
    assert [(row.edited_by, row.reason) for row in rows] == [("ann", ANN.reason), ("ben", "five hundred")]
    assert [list(difference(row.before, row.after)) for row in rows] == [[("cents", -5, 1)], [("cents", 1, 500)]]
    edit(bank, letter, payload(**WRONG), ANN)
    assert (
        connection.execute(text("SELECT became FROM idempotency.former_fingerprints")).scalars().all()
        == [op.record(connection, OperationId("default", task.name, "o1")).fingerprint] * 2
    )
    assert replay_and_run(bank, letter, connection, deliveries, task).value.code == "invalid_amount"
    assert ran == [-5, -5]


def test_recovery_delivers_the_edited_message(
    bank: Celery, task: Any, letter: int, connection: Connection, deliveries: Deliveries, ran: list[int]
) -> None:
    edit(bank, letter, payload(**RIGHT), ANN)
    replay(bank, letter, ANN)
    id = OperationId("default", task.name, "o1")
    assert json.loads(json.loads(op.record(connection, id).message)["body"])[1] == RIGHT
    # its worker dies
    connection.execute(
        text("UPDATE idempotency.records SET status = 'started', fence = nextval('idempotency.fence'), token = 't',"
             " locked_by = 'w', available_at = NULL, locked_until = clock_timestamp() - interval '1 s'")
    )  # fmt: skip
    maintenance.recover(bank)
    assert deliver_newest(connection, deliveries, task).value == {"refunded": 500}
    assert ran == [-5, 500]


# ---------------------------------------------------------------- a message that no worker could run


def test_a_message_whose_arguments_did_not_fit_is_corrected_before_it_has_begun(
    bank: Celery, task: Any, connection: Connection, deliveries: Deliveries, ran: list[int]
) -> None:
    """As the consumer of dead letters stores it: its outbox row says which operation it is for."""
    handle = enqueued(connection, task, **WRONG)
    row = op.outbox(connection)[-1]
    broken = json.loads(row.message) | {"body": json.dumps([[], {"order": "o1"}, {}])}
    connection.execute(
        text("UPDATE idempotency.outbox SET message = :message, status = 'published', published_at = now()"),
        {"message": json.dumps(broken)},
    )
    connection.execute(
        text("INSERT INTO idempotency.dead_letters (source, outbox_id, message_id, tenant, task, key, fingerprint, header_task,"
             " consumer_service, reason, payload) SELECT 'broker', id, message_id, tenant, task, key, fingerprint, task, service,"
             " 'invalid_arguments', message FROM idempotency.outbox")
    )  # fmt: skip
    (found,) = op.dead_letters(connection)
    with pytest.raises(ChangeRefused, match="missing a required argument: 'cents'"):
        edit(bank, found.id, payload(order_id="o1"), ANN)
    with pytest.raises(ChangeRefused, match="these arguments make another key"):
        edit(bank, found.id, payload(order_id="o2", cents=500), ANN)
    assert edit(bank, found.id, payload(**RIGHT), ANN)
    # the row that it came by has the corrected message, too: resent, it would bring that
    assert json.loads(json.loads(op.outbox(connection)[-1].message)["body"])[1] == RIGHT
    assert replay_and_run(bank, found.id, connection, deliveries, task).value == {"refunded": 500}
    assert handle.result(timeout=1) == {"refunded": 500}
    assert ran == [500]


def test_a_row_that_could_not_be_published_keeps_its_place_with_its_new_message(
    bank: Celery, task: Any, connection: Connection, deliveries: Deliveries, ran: list[int]
) -> None:
    enqueued(connection, task, **WRONG, ordering_key="customer-1")
    place = op.outbox(connection)[-1].place
    assert place is not None
    connection.execute(
        text(
            "UPDATE idempotency.outbox SET status = 'failed', settled_at = now(), last_error = 'too long', attempts = 1"
        )
    )
    connection.execute(
        text("INSERT INTO idempotency.dead_letters (source, outbox_id, message_id, tenant, task, key, fingerprint, header_task,"
             " consumer_service, reason, payload) SELECT 'relay', id, message_id, tenant, task, key, fingerprint, task, service,"
             " 'unpublishable', message FROM idempotency.outbox")
    )  # fmt: skip
    (found,) = op.dead_letters(connection)
    assert edit(bank, found.id, payload(**RIGHT), ANN)
    replay(bank, found.id, ANN)
    (row,) = op.outbox(connection)
    assert (row.status, row.place) == ("pending", place)
    assert deliver_newest(connection, deliveries, task).value == {"refunded": 500}
    assert ran == [500]


def test_a_body_that_could_not_be_read_is_replaced(
    bank: Celery, task: Any, connection: Connection, deliveries: Deliveries
) -> None:
    message = {
        "headers": {"task": task.name, "argsrepr": "['secret']"},
        "body": "{",
        "properties": {},
        "route": {"queue": "celery"},
    }
    connection.execute(
        text("INSERT INTO idempotency.dead_letters (source, tenant, key, header_task, consumer_service, reason, payload)"
             " VALUES ('broker', 'default', 'o1', :task, 'bank', 'undecodable', :payload)"),
        {"task": task.name, "payload": json.dumps(message)},
    )  # fmt: skip
    (found,) = op.dead_letters(connection)
    assert edit(bank, found.id, payload(**RIGHT), ANN)
    stored = op.dead_letters(connection)[0].payload
    assert "secret" not in stored
    assert replay_and_run(bank, found.id, connection, deliveries, task).value == {"refunded": 500}


# ---------------------------------------------------------------- what is refused


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("[1]", "must be"),
        ('{"kwargs": {}, "embed": {}}', "with nothing else"),
        ('{"kwargs": []}', "kwargs an object"),
        ("{'order_id'}", "not JSON: .* line 1, column 2"),
        ('{"kwargs": {"order_id": "o1", "cents": NaN}}', "NaN is not JSON"),
        ('{"kwargs": {"order_id": "o1", "cents": 1, "cents": 2}}', "a name twice"),
        ('{"kwargs": {"order_id": "o1", "cents": ' + "[" * 120 + "]" * 120 + "}}", "at most 100 deep"),
        ('{"kwargs": {"order_id": "o1", "cents": ' + "[" * 90_000 + "]" * 90_000 + "}}", "at most 100 deep"),
        ('{"kwargs": {"order_id": "o1", "cents": "' + "1" * 3_000_000 + '"}}', r"at most \d+ bytes"),
        ('{"kwargs": {"order_id": "o1", "cents": {"__type__": "datetime", "__value__": "soon"}}}', "none of that type"),
        ('{"kwargs": {"order_id": "o2", "cents": 500}}', "another key"),
        ('{"args": ["o1", 500, 1]}', "too many positional arguments"),
    ],
)
def test_arguments_that_are_not_the_operations_are_refused_without_their_values(
    bank: Celery, letter: int, connection: Connection, given: str, why: str
) -> None:
    before = snapshot(connection)
    with pytest.raises(ChangeRefused, match=why) as refused:
        edit(bank, letter, given, ANN)
    assert "o1" not in str(refused.value)
    assert len(str(refused.value)) < 200
    assert snapshot(connection) == before


def test_arguments_are_checked_by_the_tasks_own_model(
    bank: Celery, connection: Connection, deliveries: Deliveries
) -> None:
    class Amount(BaseModel):
        cents: int

    def refund(self: Any, order_id: str, amount: Any) -> int:
        if amount.cents < 0:
            raise PermanentError("below zero", "invalid_amount")
        return int(amount.cents)

    refund.__annotations__["amount"] = Amount
    task = make_task(bank, refund, key="{order_id}", max_attempts=1, pydantic=True)
    deliveries.deliver(task, order_id="o1", amount={"cents": -5})
    (found,) = op.dead_letters(connection)
    assert found.reason == "invalid_amount"
    with pytest.raises(ChangeRefused, match=r"^payload: amount\.cents: int_parsing$"):
        edit(bank, found.id, payload(order_id="o1", amount={"cents": "secret"}), ANN)
    edit(bank, found.id, payload(order_id="o1", amount={"cents": 500}), ANN)
    assert replay_and_run(bank, found.id, connection, deliveries, task).value == 500


def test_what_has_called_outside_is_not_edited(bank: Celery, connection: Connection, deliveries: Deliveries) -> None:
    provider = Provider(PermanentError("declined", "card_declined"))
    task = make_task(bank, lambda self, cents=-5: self.effect("charge", provider), max_attempts=1)
    deliveries.deliver(task, key="k")
    (found,) = op.dead_letters(connection)
    with pytest.raises(ChangeRefused, match="recorded calls or steps"):
        edit(bank, found.id, payload(cents=5), ANN)


def test_what_has_committed_a_step_is_not_edited(bank: Celery, connection: Connection, deliveries: Deliveries) -> None:
    def body(self: Any, cents: int = -5) -> None:
        self.step("reserve", lambda session: 1)
        raise PermanentError("no", "invalid_amount")

    task = make_task(bank, body, max_attempts=1)
    deliveries.deliver(task, key="k")
    (found,) = op.dead_letters(connection)
    with pytest.raises(ChangeRefused, match="recorded calls or steps"):
        edit(bank, found.id, payload(cents=5), ANN)


def test_what_is_not_a_failed_operations_own_letter_is_not_edited(
    bank: Celery, task: Any, letter: int, connection: Connection, deliveries: Deliveries
) -> None:
    deliveries.deliver(task, order_id="o1", cents=7)
    mismatch = op.dead_letters(connection)[-1].id
    with pytest.raises(ChangeRefused, match="its key was used with other arguments"):
        edit(bank, mismatch, payload(**RIGHT), ANN)
    archive(bank, letter, ANN)
    with pytest.raises(ChangeRefused, match="restore it first"):
        edit(bank, letter, payload(**RIGHT), ANN)
    connection.execute(text("UPDATE idempotency.dead_letters SET archived_at = NULL"))
    # a copy of the request that waits somewhere
    enqueued(connection, task, **WRONG)
    with pytest.raises(ChangeRefused, match="another message of its operation is under way"):
        edit(bank, letter, payload(**RIGHT), ANN)
    deliver_newest(connection, deliveries, task)
    settle(connection)
    replay(bank, letter, ANN)
    with pytest.raises(ChangeRefused, match="already replayed"):
        edit(bank, letter, payload(**RIGHT), ANN)


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("unsigned", "not this application's"),
        ("stale", "not this application's"),
        ("beyond_limit", "only its beginning"),
    ],
)
def test_what_nobody_may_send_is_not_edited(
    bank: Celery, letter: int, connection: Connection, reason: str, why: str
) -> None:
    connection.execute(text("UPDATE idempotency.dead_letters SET reason = :reason"), {"reason": reason})
    with pytest.raises(ChangeRefused, match=why):
        edit(bank, letter, payload(**RIGHT), ANN)
    assert why.split()[0] in (why_not(bank, connection, letter) or "")


def test_what_a_saga_has_called_is_not_edited(
    bank: Celery, deliveries: Deliveries, connection: Connection, ran: list[int]
) -> None:
    task = task_of(bank, ran)

    @saga("test.return", key="{order_id}", app=bank)
    def refunds(saga: Any, order_id: str) -> None:
        saga.call(task, order_id, -5)

    deliveries.deliver(refunds, order_id="o1")
    (row,) = [row for row in op.outbox(connection) if row.task == task.name]
    deliver_row(deliveries, task, row)
    settle(connection)
    found = op.dead_letters(connection)[0]
    assert found.task == task.name
    with pytest.raises(ChangeRefused, match="a saga has called it"):
        edit(bank, found.id, payload(**RIGHT), ANN)


def test_a_letter_that_says_no_operation_is_not_edited(bank: Celery, task: Any, connection: Connection) -> None:
    connection.execute(
        text("INSERT INTO idempotency.dead_letters (source, header_task, consumer_service, reason, payload)"
             " VALUES ('broker', :task, 'bank', 'invalid_arguments', '{}')"), {"task": task.name},
    )  # fmt: skip
    (found,) = op.dead_letters(connection)
    with pytest.raises(ChangeRefused, match="does not say which operation"):
        edit(bank, found.id, payload(**RIGHT), ANN)


# ---------------------------------------------------------------- people, and what is kept


def test_of_what_moves_money_another_person_approves(
    bank: Celery, connection: Connection, deliveries: Deliveries, ran: list[int]
) -> None:
    task = task_of(bank, ran, moves_money=True)
    deliveries.deliver(task, **WRONG)
    letter = int(op.dead_letters(connection)[0].id)
    with pytest.raises(NotAuthenticated, match="moves money"):
        edit(bank, letter, payload(**RIGHT), Change("ann", "typo"))
    ann, ben = Person("ann", "approver"), Person("ben", "approver")
    before = op.dead_letters(connection)
    assert edit(bank, letter, payload(**RIGHT), ANN, person=ann) is False
    assert op.dead_letters(connection) == before
    with pytest.raises(ChangeRefused, match="'ann' has asked for an edit already"):
        edit(bank, letter, payload(order_id="o1", cents=7), Change("ben", "x", is_verified=True), person=ben)
    (first,) = edits.history(connection, letter)
    # she thinks better of it: what another person has looked at is not what would be approved
    edit(bank, letter, payload(order_id="o1", cents=501), ANN, person=ann)
    with pytest.raises(ChangeRefused, match="look at that one"):
        approve_edit(bank, ben, letter, first.id)
    edit(bank, letter, payload(**RIGHT), ANN, person=ann)
    (asked,) = edits.history(connection, letter)
    with pytest.raises(ChangeRefused, match="another person has to approve"):
        approve_edit(bank, ann, letter, asked.id)
    with pytest.raises(NotAllowed, match="needs the role approver"):
        approve_edit(bank, Person("olga", "operator"), letter, asked.id)
    with pytest.raises(ChangeRefused, match="known in another way"):
        approve_edit(bank, Person("ben", "approver", "https://company"), letter, asked.id)
    approve_edit(bank, ben, letter, asked.id)
    with pytest.raises(ChangeRefused, match="no one has asked"):
        approve_edit(bank, ben, letter, asked.id)
    (row,) = edits.history(connection, letter)
    assert (row.edited_by, row.approved_by, row.reason) == ("ann", "ben", ANN.reason)
    assert replay_and_run(bank, letter, connection, deliveries, task).value == {"refunded": 500}
    actions = connection.execute(text("SELECT actor, action FROM idempotency.audit ORDER BY id")).all()
    assert [tuple(row) for row in actions] == [("ann", "edit_requested")] * 3 + [
        ("ben", "edit_approved"),
        ("ann", "replay"),
    ]


def test_the_history_goes_with_the_letter_and_the_former_fingerprints_with_the_record(
    bank: Celery, task: Any, letter: int, connection: Connection, deliveries: Deliveries
) -> None:
    edit(bank, letter, payload(**RIGHT), ANN)
    replay_and_run(bank, letter, connection, deliveries, task)
    settle(connection)
    connection.execute(text("UPDATE idempotency.dead_letters SET closed_at = closed_at - interval '900 days'"))
    maintenance.purge(bank)
    assert edits.history(connection, letter) == []
    assert deliveries.deliver(task, **WRONG).value == {"refunded": 500}
    connection.execute(
        text(
            "UPDATE idempotency.records SET expires_at = now() - interval '90 days', updated_at = now() - interval '90 days'"
        )
    )
    connection.execute(text("UPDATE idempotency.outbox SET published_at = now() - interval '90 days'"))
    maintenance.purge(bank)
    maintenance.purge(bank)
    assert connection.execute(text("SELECT count(*) FROM idempotency.former_fingerprints")).scalar_one() == 0


@pytest.mark.parametrize("by", ["code of before", "this code on a database without the trigger"])
def test_an_erasure_takes_the_messages_of_the_history(
    bank: Celery, task: Any, letter: int, superuser: Engine, deliveries: Deliveries, monkeypatch: Any, by: str
) -> None:
    with superuser.connect() as connection:
        if by == "code of before":
            monkeypatch.setattr(edits, "erase", lambda *_: None)
        else:
            connection.execute(text("DROP TRIGGER empty_edits ON idempotency.dead_letters"))
        edit(bank, letter, payload(**RIGHT), ANN)
        replay_and_run(bank, letter, connection, deliveries, task)
        settle(connection)
        erase(bank, OperationId("default", task.name, "o1"), ANN)
        (row,) = edits.history(connection, letter)
    assert (row.before, row.after, row.edited_by) == ("", "", "ann")


def test_an_edit_that_is_repeated_is_made_once(bank: Celery, letter: int, connection: Connection) -> None:
    change = Change("ann", "typo", "r1")
    assert [edit(bank, letter, payload(**RIGHT), change) for _ in range(2)] == [True, True]
    assert len(edits.history(connection, letter)) == 1


def test_the_commands_edit_and_show_who_has(
    bank: Celery, letter: int, connection: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: object, status: int = 0) -> str:
        result = CliRunner().invoke(cli, [*map(str, arguments), "-A", "tests.support.bank"])
        assert (1 if isinstance(result.exception, IdempotencyError) else result.exit_code) == status, result.output
        return result.output or str(result.exception)

    file = tmp_path / "payload.json"
    file.write_text(payload(**RIGHT))
    command = ("dead-letters", "edit", letter, "--payload", file, "--reason", "typing error", "--as", "ann")
    assert "another file" not in run(*command[:4], tmp_path / "none", *command[5:], status=1)
    assert f"dead letter {letter} edited" in run(*command)
    assert json.loads(run("dead-letters", "edits", letter, "--json"))[0]["changed"] == {
        "cents": {"before": "••• number", "after": "••• number"}
    }
    assert "500" not in run("dead-letters", "edits", letter)
    assert "reason" in run("dead-letters", "edits", letter, "--reveal", status=1)
    revealed = run("dead-letters", "edits", letter, "--reveal", "--reason", "ticket 7", "--json", "--as", "ann")
    assert json.loads(revealed)[0]["changed"] == {"cents": {"before": "-5", "after": "500"}}
    actions = connection.execute(text("SELECT action, reason FROM idempotency.audit ORDER BY id")).all()
    assert [tuple(row) for row in actions] == [("edit", "typing error"), ("reveal", "ticket 7")]


# ---------------------------------------------------------------- by the broker


def test_a_dead_copy_of_a_message_that_was_edited_makes_no_letter(
    bank: Celery, consumer: DeadLetterConsumer, connection: Connection, deliveries: Deliveries
) -> None:
    die(bank, consumer, body_of("a1"))
    assert consumer.run_once() == 1
    (found,) = op.dead_letters(connection)
    assert (found.reason, found.key) == ("rejected", "a1")
    edit(bank, found.id, json.dumps({"args": ["a1", 7]}), ANN)
    reject(bank, body_of("a1"))
    consumer.run_once()
    assert waiting(bank) == 0
    assert len(op.dead_letters(connection)) == 1
    task = bank.tasks[b.deposit.name]
    assert replay_and_run(bank, found.id, connection, deliveries, task).value == {"account": "a1", "amount": 7}


def test_a_letter_whose_message_was_not_signed_is_not_edited_and_one_of_an_outbox_row_is(
    bank: Celery, task: Any, letter: int, connection: Connection, deliveries: Deliveries
) -> None:
    bank.conf.idempotency_message_secrets = ["s" * 40]
    close_runtime(bank)
    try:
        assert edit(bank, letter, payload(**RIGHT), ANN)  # its operation has run: a worker has checked it
        connection.execute(text("UPDATE idempotency.dead_letters SET source = 'broker'"))
        with pytest.raises(ChangeRefused, match="only what this application has signed is sent again"):
            edit(bank, letter, payload(order_id="o1", cents=7), ANN)
        connection.execute(text("UPDATE idempotency.dead_letters SET source = 'operation'"))
        replay(bank, letter, ANN)
    finally:
        bank.conf.idempotency_message_secrets = ""
        close_runtime(bank)


@pytest.mark.parametrize("replays_first", [True, False])
def test_a_replay_and_an_edit_at_once_send_one_message_that_is_whole(
    bank: Celery,
    task: Any,
    letter: int,
    connection: Connection,
    deliveries: Deliveries,
    ran: list[int],
    replays_first: bool,
) -> None:
    def work(n: int) -> str:
        try:
            if (n == 0) is replays_first:
                replay(bank, letter, ANN)
                return "replayed"
            edit(bank, letter, payload(**RIGHT), ANN)
        except ChangeRefused as refused:
            return str(refused).partition(": ")[2]
        return "edited"

    done = set(op.at_once(2, work))
    assert done in ({"replayed", "edited"}, {"replayed", "already replayed"})
    outcome = deliver_newest(connection, deliveries, task)
    if "edited" in done:
        assert outcome.value == {"refunded": 500}
    else:
        assert outcome.value.code == "invalid_amount"
    record = op.record(connection, OperationId("default", task.name, "o1"))
    assert op.outbox(connection)[-1].fingerprint == record.fingerprint
