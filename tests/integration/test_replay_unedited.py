"""A replay of what somebody has asked to edit: not by the way, and never with others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text
from typer.testing import CliRunner, Result

from idempotency import OperationId
from idempotency.application import runtime_of
from idempotency.cli.root import cli
from idempotency.errors import IdempotencyError
from idempotency.operate.change import Change
from idempotency.operate.edit import approve_edit, edit
from idempotency.operate.people import Person
from idempotency.operate.replay import NotConfirmed, replay, to_confirm
from idempotency.store import discards
from idempotency.wire.message import Message
from tests.support import bank as b
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.tasks import make_task

ANN = Change("ann", "too much", is_verified=True)
BEN = Change("ben", "the provider is back", is_verified=True)


@pytest.fixture
def deliveries(bank: Celery) -> Deliveries:
    return Deliveries(bank)


def refund(self: Any, order_id: str, cents: int) -> None:
    raise ValueError("the provider is away")


@pytest.fixture
def task(bank: Celery) -> Any:
    return make_task(bank, refund, key="{order_id}", max_attempts=1, moves_money=True)


@pytest.fixture
def letters(bank: Celery, task: Any, deliveries: Deliveries, connection: Connection) -> list[int]:
    """The letters of three refunds; somebody has asked to edit the second."""
    for number in range(3):
        deliveries.deliver(task, order_id=f"o{number}", cents=50_000)
    found = [row.id for row in op.dead_letters(connection)]
    right = json.dumps({"kwargs": {"order_id": "o1", "cents": 500}})
    assert not edit(bank, found[1], right, ANN, person=Person("ann", "operator"))
    return found


def run(*arguments: object, status: int = 0) -> Result:
    result = CliRunner().invoke(cli, [*map(str, arguments), "-A", "tests.support.bank"])
    exit_code = 1 if isinstance(result.exception, IdempotencyError) else result.exit_code
    assert exit_code == status, (result.output, result.exception)
    return result


def test_a_replay_has_to_know_of_an_edit_that_waits(bank: Celery, letters: list[int], connection: Connection) -> None:
    first, second, third = letters
    assert [(each.letter, each.was) for each in to_confirm(connection, letters)] == [(second, "to_be_edited")]
    for letter in (first, third):
        replay(bank, letter, BEN, confirmed=())
    with pytest.raises(NotConfirmed, match=r"'ann' has asked at .* nobody has approved it") as refused:
        replay(bank, second, BEN, confirmed=())
    assert refused.value.was == "to_be_edited"
    replay(bank, second, BEN, confirmed=to_confirm(connection, [second]))


@pytest.mark.long
def test_what_was_read_of_one_edit_is_not_confirmed_of_the_next(
    bank: Celery, letters: list[int], connection: Connection
) -> None:
    read = to_confirm(connection, [letters[1]])
    right = json.dumps({"kwargs": {"order_id": "o1", "cents": 5}})
    edit(bank, letters[1], right, ANN, person=Person("ann", "operator"))
    with pytest.raises(NotConfirmed):
        replay(bank, letters[1], BEN, confirmed=read)


def test_an_edit_that_was_approved_is_sent_without_a_word(
    bank: Celery, letters: list[int], connection: Connection
) -> None:
    waiting = connection.execute(text("SELECT id FROM idempotency.letter_edits")).scalar_one()
    approve_edit(bank, Person("eve", "approver"), letters[1], waiting)
    assert to_confirm(connection, letters) == []
    replay(bank, letters[1], BEN, confirmed=())
    assert "50000" not in Message.from_text(op.outbox(connection)[-1].message).body


def test_another_letter_of_the_operation_is_not_sent_without_a_word_either(
    bank: Celery, task: Any, letters: list[int], connection: Connection
) -> None:
    """A copy of the same message, which has died since."""
    copy = connection.execute(
        text(
            "INSERT INTO idempotency.dead_letters (source, tenant, task, key, fingerprint, reason, consumer_service, payload)"
            " SELECT 'broker', tenant, task, key, fingerprint, 'unhandled', 'bank', payload FROM idempotency.dead_letters"
            " WHERE id = :id RETURNING id"
        ),
        {"id": letters[1]},
    ).scalar_one()
    (found,) = to_confirm(connection, [copy])
    assert (found.letter, f"of its dead letter {letters[1]}" in found.warning) == (copy, True)
    with pytest.raises(NotConfirmed):
        replay(bank, copy, BEN, confirmed=())


def test_a_bulk_command_leaves_out_what_somebody_has_asked_to_edit(
    bank: Celery, letters: list[int], connection: Connection, monkeypatch: pytest.MonkeyPatch, task: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(task, "moves_money", False)
    first, second, third = letters
    bulk = ("dead-letters", "replay", "--task", task.name)
    counted = json.loads(run(*bulk, "--dry-run", "--json").stdout)
    assert counted == {"dry_run": True, "replayed": [first, third], "to_be_edited": [second]}
    assert run(*bulk, "--dry-run").stdout.endswith("; left out: 1 was to be edited\n")
    assert "name the dead letters" in run(*bulk, "--unedited", status=2).output
    done = run(*bulk, "--yes", "--json", status=1)
    assert json.loads(done.stdout)["replayed"] == [first, third]
    assert "'ann' has asked" in done.stderr
    assert [row.status for row in op.dead_letters(connection)] == ["replayed", "open", "replayed"]


def test_a_named_letter_is_sent_without_its_edit_if_the_command_says_so(
    bank: Celery, letters: list[int], connection: Connection, monkeypatch: pytest.MonkeyPatch, task: Any
) -> None:
    monkeypatch.setattr(task, "moves_money", False)
    refused = run("dead-letters", "replay", letters[1], "--yes", status=1)
    assert "give --unedited" in str(refused.exception)
    assert f"dead letter {letters[1]} replayed" in run("dead-letters", "replay", letters[1], "--unedited").output


@pytest.mark.long
def test_what_was_declined_is_still_asked_about_once_its_edit_is_left_out_of_the_question(
    bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """A letter may be both: who gives --unedited is still asked, and who gives --yes is still refused."""
    deliveries.deliver(b.failing, "a", "permanent")
    (letter,) = op.dead_letters(connection)
    connection.execute(
        text(
            "INSERT INTO idempotency.letter_edits (letter, tenant, task, key, edited_by, reason, before, after, fingerprint_after)"
            " VALUES (:id, :tenant, :task, :key, 'ann', 'x', :payload, :payload, 'v1:x')"
        ),
        {name: letter._mapping[name] for name in ("id", "tenant", "task", "key", "payload")},
    )
    assert [each.was for each in to_confirm(connection, [letter.id])] == ["to_be_edited", "declined"]
    replaying = ("dead-letters", "replay", letter.id)
    assert "add --yes" in str(run(*replaying, "--unedited", status=1).exception)
    assert "give --unedited" in str(run(*replaying, "--yes", status=1).exception)
    run(*replaying, "--unedited", "--yes")
    assert op.record(connection, OperationId(letter.tenant, letter.task, letter.key)).status == "released"


def test_an_edit_that_is_asked_for_while_a_replay_is_under_way_is_seen_by_it(
    bank: Celery, task: Any, deliveries: Deliveries, connection: Connection
) -> None:
    """Of what has no record that both would lock: its message has died before anything began."""
    deliveries.deliver(task, order_id="o1", cents=1)
    (letter,) = (row.id for row in op.dead_letters(connection))
    connection.execute(text("DELETE FROM idempotency.records"))
    connection.execute(
        text("UPDATE idempotency.dead_letters SET generation = NULL, reason = 'unhandled', source = 'broker'")
    )
    with runtime_of(bank).engine.begin() as asking:
        discards.lock(asking, letter)
        replaying = op.in_background(lambda: replay(bank, letter, BEN, confirmed=()))
        op.wait_for_a_lock(connection)
        asking.execute(
            text(
                "INSERT INTO idempotency.letter_edits (letter, tenant, task, key, edited_by, reason, before, after, fingerprint_after)"
                " SELECT id, tenant, task, key, 'ann', 'x', payload, payload, 'v1:x' FROM idempotency.dead_letters"
            )
        )
    with pytest.raises(NotConfirmed, match="'ann' has asked"):
        replaying.result()
