"""Copies of signed messages: what nobody has signed of them ends nothing, and keeps nothing from being sent again."""

# ruff: noqa: F811  fixtures of another module

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import kombu
import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency import OperationId
from idempotency.errors import InvalidArguments
from idempotency.letters.examine import examine
from idempotency.operate import discard
from idempotency.operate.erase import erase
from idempotency.operate.people import Person
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.upkeep import maintenance
from tests.integration.test_signed_messages import bank, environment, letters, signed  # noqa: F401
from tests.support import bank as b
from tests.support import operations as op
from tests.support import queues
from tests.support.dead_messages import body_of, publish, take
from tests.support.operators import ANN, act
from tests.support.processes import Processes, eventually
from tests.support.tasks import transactional


@pytest.fixture
def task(request: pytest.FixtureRequest) -> Any:
    return getattr(request, "param", b.deposit)


@pytest.fixture
def taken(bank: Celery, relay: Relay, engine: Engine, task: Any) -> Any:
    """The message of an accepted deposit, which somebody with the right to read has taken away."""
    with transactional(engine).begin() as caller:
        task.enqueue(caller, "a1")
    return take(bank)


def resent(bank: Celery, connection: Connection) -> int:
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 day'"))
    return resend_lost(bank, lambda _: 0).resent


def test_a_copy_that_is_made_to_expire_ends_nothing_and_the_original_runs(
    bank: Celery,
    processes: Processes,
    connection: Connection,
    entries: Callable[[str], int],
    letters: Callable[[int], Any],
) -> None:
    """AMQP's `expiration` is a property and not signed: RabbitMQ itself dead-letters the copy, with an `x-death` that is true."""
    original = signed("a1")
    publish(bank, body_of("a1"), headers=original, expiration=0.001)
    (letter,) = letters(1)
    assert letter.reason == "expired_early"
    publish(bank, body_of("a1"), headers=original)
    processes.worker()
    eventually(lambda: entries("a1") == 1)
    statuses = connection.execute(text("SELECT status FROM idempotency.records WHERE key = 'a1'")).scalars().all()
    assert statuses == ["completed"]


@pytest.mark.parametrize(("minutes", "reason"), [(0, "expired"), (60, "expired_early")])
def test_a_message_expires_when_its_sender_has_said_and_not_earlier(
    bank: Celery, letters: Callable[[int], Any], minutes: int, reason: str
) -> None:
    expires = (datetime.now(UTC) + timedelta(minutes=minutes, seconds=2)).isoformat()
    publish(bank, body_of("a1"), headers=signed("a1", expires=expires), expiration=0.001)
    assert [letter.reason for letter in letters(1)] == [reason]


@pytest.mark.long
def test_a_death_that_a_copy_has_brought_with_it_changes_nothing(
    bank: Celery,
    processes: Processes,
    entries: Callable[[str], int],
    letters: Callable[[int], Any],
) -> None:
    """RabbitMQ counts up such an entry, and adds nothing about the expiration."""
    name = bank.conf.task_default_queue
    forged = {"count": 1, "queue": name, "reason": "expired", "exchange": "", "routing-keys": [name]}
    original = signed("a1")
    publish(bank, body_of("a1"), headers=original | {"x-death": [forged]}, expiration=0.001)
    assert [letter.reason for letter in letters(1)] == ["expired_early"]
    publish(bank, body_of("a1"), headers=original)
    processes.worker()
    eventually(lambda: entries("a1") == 1)


def test_a_copy_of_long_ago_that_expires_is_stale(bank: Celery, letters: Callable[[int], Any]) -> None:
    publish(bank, body_of("a1"), headers=signed("a1", at=time.time() - 3 * 86400), expiration=0.001)
    assert [letter.reason for letter in letters(1)] == ["stale"]


def test_a_copy_that_expires_of_what_is_known_is_nothing(
    bank: Celery, taken: Any, connection: Connection, letters: Callable[[int], Any]
) -> None:
    publish(bank, taken.body, headers=taken.properties["application_headers"], expiration=0.001)
    publish(bank, body_of("other"), headers=signed("other"), expiration=0.001)  # comes after it
    (letter,) = letters(1)
    assert (letter.reason, letter.task, letter.key, letter.outbox_id) == ("expired_early", None, None, None)
    assert "other" in letter.payload
    assert resent(bank, connection) == 1


UNSIGNED: list[dict[str, Any]] = [{"is_eager": True}, {"headers": "no object"}, {"chain": [{"task": "any"}]}]


def add_to_a_copy(bank: Celery, taken: Any, changed: dict[str, Any]) -> None:
    death = {"x-death": [{"queue": bank.conf.task_default_queue, "reason": "rejected"}]}  # as a worker rejects it
    headers = taken.properties["application_headers"] | changed | death
    publish(bank, taken.body, queue=f"{bank.conf.task_default_queue}-dead", headers=headers)


@pytest.mark.few(1)
@pytest.mark.parametrize("changed", UNSIGNED)
def test_a_lost_message_is_sent_again_whatever_its_copies_say(
    bank: Celery, taken: Any, connection: Connection, letters: Callable[[int], Any], changed: dict[str, Any]
) -> None:
    add_to_a_copy(bank, taken, changed)
    (letter,) = letters(1)
    assert (letter.reason, letter.task, letter.key, letter.outbox_id) == ("altered", None, None, None)
    assert resent(bank, connection) == 1


@pytest.mark.parametrize("task", [b.waited_deposit], indirect=True)
def test_who_discards_the_letter_of_a_copy_gives_nothing_up(
    bank: Celery, taken: Any, connection: Connection, letters: Callable[[int], Any]
) -> None:
    add_to_a_copy(bank, taken, UNSIGNED[0])
    (letter,) = letters(1)
    act(bank, discard.request, Person("ann", "operator"), letter.id, "a copy that somebody has made")
    act(bank, discard.approve, Person("ben", "approver"), letter.id)
    (row,) = op.outbox(connection)
    assert row.settled_at is None
    assert resent(bank, connection) == 1


@pytest.mark.long
@pytest.mark.parametrize("how", ["purge", "erase"])
def test_a_copy_keeps_no_record_of_what_has_ended(
    bank: Celery,
    taken: Any,
    processes: Processes,
    connection: Connection,
    entries: Callable[[str], int],
    letters: Callable[[int], Any],
    how: str,
) -> None:
    add_to_a_copy(bank, taken, UNSIGNED[0])
    letters(1)
    publish(bank, taken.body, headers=taken.properties["application_headers"])
    processes.worker()
    eventually(lambda: entries("a1") == 1)
    if how == "erase":
        erase(bank, OperationId("default", b.deposit.name, "a1"), ANN)
        return
    for change in (
        "UPDATE idempotency.outbox SET settled_at = now() - interval '1 year', published_at = now() - interval '1 year'",
        "UPDATE idempotency.records SET completed_at = now() - interval '2 years', expires_at = now() - interval '1 year'",
    ):
        connection.execute(text(change))
    maintenance.purge(bank)
    assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 0


@pytest.mark.long
def test_what_the_application_itself_has_refused_to_send_is_not_called_altered(
    bank: Celery, processes: Processes, letters: Callable[[int], Any]
) -> None:
    processes.worker()
    b.deposit.apply_async(("a1",), headers={"expires": "2000-01-01"}, idempotency_follows=True)
    (letter,) = letters(1)
    assert letter.reason == "invalid_header"


UNFIT = "refund\u00a0of ann"


@pytest.mark.parametrize("options", [{"shadow": UNFIT}, {"headers": {"headers": "text"}}, {"task_id": UNFIT}], ids=str)
def test_what_follows_a_task_and_is_unfit_is_not_called_altered(bank: Celery, options: dict[str, Any]) -> None:
    """No caller can be told any more, so it is sent, and says of itself that it was refused."""
    queues.drained(bank)
    b.deposit.apply_async(("a1",), idempotency_follows=True, **options)
    (sent,) = queues.drained(bank)
    arrived = kombu.Message(
        body=sent.body,
        headers=sent.headers,
        content_type="application/json",
        content_encoding="utf-8",
        accept={"application/json"},
    )
    assert examine(bank, arrived).reason == "invalid_header"


@pytest.mark.long
@pytest.mark.parametrize("unfit", ["id", "shadow"])
def test_what_code_before_has_signed_and_is_unfit_is_one_letter_of_its_operation(
    bank: Celery, relay: Relay, engine: Engine, connection: Connection, unfit: str
) -> None:
    """It was accepted, and a relay signs it: nobody has touched it, and to send it again would lead to nothing."""
    with transactional(engine).begin() as caller:
        b.deposit.enqueue(caller, "a1")
        path = "{headers," + unfit + "}"
        caller.execute(
            text("UPDATE idempotency.outbox SET message = jsonb_set(message::jsonb, :path, :unfit)::text"),
            {"path": path, "unfit": json.dumps(UNFIT)},
        )
    make_due = text("UPDATE idempotency.outbox SET available_at = now() WHERE status = 'pending'")
    eventually(lambda: connection.execute(make_due) and op.dead_letters(connection))
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, letter.task, letter.key) == ("unpublishable", b.deposit.name, "a1")
    assert resent(bank, connection) == 0


def test_no_sender_gives_a_message_a_time_to_live(bank: Celery) -> None:
    with pytest.raises(InvalidArguments, match="expiration: an accepted operation is never dropped"):
        b.deposit.apply_async(("a1",), expiration=1)


@pytest.mark.long
def test_what_follows_a_task_is_not_dropped_for_a_time_to_live(
    bank: Celery, processes: Processes, entries: Callable[[str], int]
) -> None:
    """A step of a chain that code before this has sent with one."""
    b.deposit.apply_async(("a1",), expiration=0.001, idempotency_follows=True)
    processes.worker()
    eventually(lambda: entries("a1") == 1)
