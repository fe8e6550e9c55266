"""Edits of what has not begun, repeated ones, and what a refusal may name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import Celery
from pydantic import BaseModel
from sqlalchemy import Connection, text

from idempotency import IdempotentTask, PermanentError
from idempotency.errors import ChangeRefused
from idempotency.operate.archive import archive
from idempotency.operate.change import Change
from idempotency.operate.edit import approve_edit, edit
from idempotency.operate.people import Person
from idempotency.operate.replay import replay
from idempotency.store import edits
from idempotency.upkeep import maintenance
from tests.integration.test_edit import ANN, RIGHT, WRONG, payload, task_of
from tests.support import operations as op
from tests.support.dead_messages import unpublishable
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.tasks import enqueued, make_task


@pytest.fixture
def ran(bank: Celery) -> list[int]:
    """The amounts that the body has run with."""
    return []


@pytest.fixture
def letter(bank: Celery, ran: list[int], deliveries: Deliveries, connection: Connection) -> int:
    deliveries.deliver(task_of(bank, ran), **WRONG)
    (found,) = op.dead_letters(connection)
    return int(found.id)


@pytest.mark.few(1)
@pytest.mark.parametrize("is_replayed", [False, True])
@pytest.mark.parametrize("edits_of_it", [1, 2])
def test_a_request_of_before_never_runs_also_where_the_operation_has_not_begun(
    bank: Celery, connection: Connection, deliveries: Deliveries, ran: list[int], is_replayed: bool, edits_of_it: int
) -> None:
    task, five = task_of(bank, ran, moves_money=True), {"order_id": "o1", "cents": 5}
    found = unpublishable(connection, task, **five)
    for cents in (400, 500)[-edits_of_it:]:
        edit(bank, found.id, payload(order_id="o1", cents=cents), ANN, person=Person("ann", "approver"))
        approve_edit(bank, Person("ben", "approver"), found.id, edits.history(connection, found.id)[-1].id)
    if is_replayed:  # its row is pending
        replay(bank, found.id, Change("ann", "corrected", is_verified=True))
    enqueued(connection, task, **five)
    again = op.outbox(connection)[-1]
    connection.execute(
        text("UPDATE idempotency.outbox SET status = 'published', published_at = now() WHERE id = :id"),
        {"id": again.id},
    )
    deliver_row(deliveries, task, again)
    assert maintenance.recover(bank) == 0
    assert ran == []
    if not is_replayed:
        replay(bank, found.id, Change("ann", "corrected", is_verified=True))
    first = op.outbox(connection)[0]
    assert deliver_row(deliveries, task, first).value == {"refunded": 500}
    assert ran == [500]
    assert [each.reason for each in op.dead_letters(connection)] == ["unpublishable"]


def test_a_request_id_is_of_one_payload(bank: Celery, letter: int, connection: Connection) -> None:
    change = Change("ann", "typo", "r1")
    assert edit(bank, letter, payload(order_id="o1", cents=1), change)
    assert edit(bank, letter, payload(order_id="o1", cents=1), change)
    with pytest.raises(ChangeRefused, match="--request-id: was used before"):
        edit(bank, letter, payload(**RIGHT), change)
    assert json.loads(json.loads(op.dead_letters(connection)[0].payload)["body"])[1]["cents"] == 1


def test_a_number_that_python_does_not_read_is_refused_in_words(bank: Celery, letter: int) -> None:
    with pytest.raises(ChangeRefused, match="payload: a number with too many digits"):
        edit(bank, letter, '{"kwargs": {"order_id": "o1", "cents": ' + "1" * 5000 + "}}", ANN)


def test_a_refusal_does_not_name_the_key_of_a_mapping(
    bank: Celery, connection: Connection, deliveries: Deliveries
) -> None:
    class Shares(BaseModel):
        cents: dict[str, int]

    def refund(self: Any, order_id: str, shares: Any) -> int:
        raise PermanentError("no", "invalid_amount")

    refund.__annotations__["shares"] = Shares
    task = make_task(bank, refund, key="{order_id}", max_attempts=1, pydantic=True)
    deliveries.deliver(task, order_id="o1", shares={"cents": {"a": 1}})
    (found,) = op.dead_letters(connection)
    with pytest.raises(ChangeRefused) as refused:
        edit(bank, found.id, payload(order_id="o1", shares={"cents": {"alice@example.com": "x"}}), ANN)
    assert str(refused.value) == "payload: shares.cents: int_parsing"


def test_a_letter_whose_edit_waits_for_another_person_is_not_archived(
    bank: Celery, connection: Connection, deliveries: Deliveries, ran: list[int]
) -> None:
    task = task_of(bank, ran, moves_money=True)
    deliveries.deliver(task, **WRONG)
    (found,) = op.dead_letters(connection)
    edit(bank, found.id, payload(**RIGHT), ANN, person=Person("ann", "approver"))
    with pytest.raises(ChangeRefused, match="'ann' has asked for an edit; another person can approve it"):
        archive(bank, found.id, Change("olga", "later", is_verified=True))


@pytest.mark.parametrize("why_not", ["known otherwise", "of another message"])
def test_an_edit_that_nobody_can_approve_any_more_is_replaced_by_the_next_person_who_asks(
    bank: Celery, connection: Connection, deliveries: Deliveries, ran: list[int], why_not: str
) -> None:
    task = task_of(bank, ran, moves_money=True)
    deliveries.deliver(task, **WRONG)
    (found,) = op.dead_letters(connection)
    edit(bank, found.id, payload(order_id="o1", cents=4), ANN, person=Person("ann", "operator"))
    (asked,) = edits.history(connection, found.id)
    company = None
    if why_not == "known otherwise":
        company = "https://login.example"
    else:
        connection.execute(text("UPDATE idempotency.dead_letters SET payload = replace(payload, '-5', '-6')"))
    ben, eve = Person("ben", "approver", company), Person("eve", "approver", company)
    with pytest.raises(ChangeRefused, match="ask again"):
        approve_edit(bank, ben, found.id, asked.id)
    given = Change("ben", "as ann has said", is_verified=True)
    assert edit(bank, found.id, payload(**RIGHT), given, person=ben) is False
    (asked,) = edits.history(connection, found.id)
    assert (asked.edited_by, asked.known_by) == ("ben", company)
    with pytest.raises(ChangeRefused, match="'ben' has asked for an edit already; another person can approve"):
        edit(bank, found.id, payload(**RIGHT), Change("eve", "too", is_verified=True), person=eve)
    approve_edit(bank, eve, found.id, asked.id)
    replay(bank, found.id, Change("eve", "corrected", is_verified=True))
    assert deliver_row(deliveries, task, op.outbox(connection)[-1]).value == {"refunded": 500}


@pytest.mark.parametrize("changed", ["refuses the arguments", "names them otherwise", None])
def test_an_edit_that_todays_task_would_make_something_else_of_is_not_approved(
    bank: Celery, connection: Connection, deliveries: Deliveries, ran: list[int], changed: str | None
) -> None:
    """Between the request and its approval there was a deploy."""
    task = task_of(bank, ran, moves_money=True)
    deliveries.deliver(task, **WRONG)
    (found,) = op.dead_letters(connection)
    edit(bank, found.id, json.dumps({"args": ["o1", 4]}), ANN, person=Person("ann", "operator"))
    (asked,) = edits.history(connection, found.id)

    def refusing(self: Any, order_id: str) -> None: ...

    def renamed(self: Any, order_id: str, fee: int) -> None: ...

    new: Any = {"refuses the arguments": refusing, "names them otherwise": renamed}.get(changed or "")
    if new is not None:
        options = {"bind": True, "key": "{order_id}", "moves_money": True, "shared": False}
        bank.tasks.pop(task.name)
        bank.task(base=IdempotentTask, name=task.name, **options)(new)
    ben = Person("ben", "approver")
    if new is None:
        approve_edit(bank, ben, found.id, asked.id)
        return
    with pytest.raises(ChangeRefused):
        approve_edit(bank, ben, found.id, asked.id)
    assert op.dead_letters(connection)[0].payload == found.payload
