"""Letters of messages that were never signed: they belong to no operation, and none is replayed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from celery import Celery
from pydantic import SecretStr
from sqlalchemy import Connection, Engine

from idempotency import IdempotentTask
from idempotency.application import close_runtime
from idempotency.errors import NotAuthenticated, ReplayRefused
from idempotency.operate.change import Change
from idempotency.operate.erase import erase
from idempotency.operate.replay import replay
from idempotency.wire.headers import KEY_HEADER, OUTBOX_HEADER, SERVICE_HEADER, SIGNATURE_HEADER, TENANT_HEADER
from idempotency.wire.keys import OperationId
from idempotency.wire.signing import sign
from tests.integration.test_signed_messages import SECRET, bank, environment, letters  # noqa: F401
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import body_of, headers, publish
from tests.support.deliveries import Deliveries
from tests.support.operators import ANN
from tests.support.tasks import transactional

SOON = "bank.charge_soon"


@pytest.fixture
def deployed(bank: Celery) -> Iterator[Callable[[], None]]:  # noqa: F811
    """Deploys a new task that moves money."""

    def deploy() -> None:
        @bank.task(base=IdempotentTask, bind=True, name=SOON, key="{account}", moves_money=True)
        def charge_soon(self: IdempotentTask, account: str) -> None: ...

    yield deploy
    bank.tasks.pop(SOON, None)


def test_what_was_never_signed_is_not_replayed_after_a_deploy(
    bank: Celery,  # noqa: F811
    connection: Connection,
    letters: Callable[[int], Any],  # noqa: F811
    deployed: Callable[[], None],
) -> None:
    """While the task was not known, nothing looked at the message's signature."""
    dead = f"{bank.conf.task_default_queue}-dead"
    death = {"x-death": [{"queue": bank.conf.task_default_queue, "reason": "rejected"}]}
    publish(bank, body_of("victim"), queue=dead, headers=headers(task=SOON) | death)
    (letter,) = letters(1)
    assert letter.reason == "unknown_task"
    deployed()
    with pytest.raises(ReplayRefused, match="only what this application has signed is sent again"):
        replay(bank, letter.id, ANN)


def test_a_process_without_the_secret_replays_nothing_that_was_not_signed(
    bank: Celery,  # noqa: F811
    connection: Connection,
    letters: Callable[[int], Any],  # noqa: F811
) -> None:
    """An operator's shell may lack the secrets."""
    dead = f"{bank.conf.task_default_queue}-dead"
    publish(bank, body_of("victim"), queue=dead, headers=headers(**{KEY_HEADER: "victim"}))
    (letter,) = letters(1)
    assert letter.reason == "unsigned"
    bank.conf.idempotency_message_secrets = ""  # as in the operator's shell
    close_runtime(bank)
    with pytest.raises(ReplayRefused):
        replay(bank, letter.id, ANN)


def of_another(bank: Celery, victim: Any, **changes: Any) -> dict[str, Any]:  # noqa: F811
    """The headers of a message that names an application that nobody has heard of, and this outbox row of ours."""
    home = bank.amqp.queues[bank.conf.task_default_queue]
    place = {"exchange": home.exchange.name, "routing-keys": [home.routing_key]}
    death = {"x-death": [{"queue": "elsewhere", "reason": "rejected", **place}]}
    sent: dict[str, Any] = {"timelimit": [None, 90], SERVICE_HEADER: "nobody", OUTBOX_HEADER: victim.message_id}
    return headers(**(sent | changes)) | death


@pytest.fixture
def victim(bank: Celery, engine: Engine, connection: Connection) -> Any:  # noqa: F811
    """The outbox row of a deposit."""
    with transactional(engine).begin() as caller:
        b.deposit.enqueue(caller, "victim")
    (row,) = op.outbox(connection)
    return row


@pytest.fixture
def set_secrets(bank: Celery) -> Callable[[list[str]], None]:  # noqa: F811
    """Sets the secrets anew."""

    def set_to(secrets: list[str]) -> None:
        bank.conf.idempotency_message_secrets = secrets
        close_runtime(bank)

    return set_to


def test_an_unsigned_message_of_another_application_belongs_to_no_operation(
    bank: Celery,  # noqa: F811
    victim: Any,
    letters: Callable[[int], Any],  # noqa: F811
    deployed: Callable[[], None],
) -> None:
    """In a dead-letter queue that several may have, with the id of an outbox row of ours."""
    deployed()
    dead = f"{bank.conf.task_default_queue}-dead"
    publish(bank, body_of("evil"), queue=dead, headers=of_another(bank, victim, task=SOON))
    (letter,) = letters(1)
    assert (letter.reason, letter.header_task) == ("unsigned", SOON)
    assert (letter.task, letter.key, letter.outbox_id, letter.fingerprint) == (None, None, None, None)
    with pytest.raises(NotAuthenticated):
        replay(bank, letter.id, Change("eve", "without a token"))
    with pytest.raises(ReplayRefused, match="only what this application has signed is sent again"):
        replay(bank, letter.id, ANN)


def test_what_nobody_has_signed_keeps_no_data_from_being_erased(
    bank: Celery,  # noqa: F811
    connection: Connection,
    deliveries: Deliveries,
    letters: Callable[[int], Any],  # noqa: F811
) -> None:
    """Its sender has to know no more than a key."""
    deliveries.deliver(b.deposit, "ann", key="ann", tenant="default")
    named: dict[str, Any] = {SERVICE_HEADER: "nobody", KEY_HEADER: "ann", TENANT_HEADER: "default"}
    publish(bank, body_of("x"), queue=f"{bank.conf.task_default_queue}-dead", headers=headers(**named))
    assert [letter.reason for letter in letters(1)] == ["unsigned"]
    erase(bank, OperationId("default", b.deposit.name, "ann"), ANN)


def test_a_signed_message_of_another_application_is_kept_whole_and_can_be_replayed(
    bank: Celery,  # noqa: F811
    victim: Any,
    connection: Connection,
    letters: Callable[[int], Any],  # noqa: F811
) -> None:
    """The application may have been renamed since."""
    sent = of_another(bank, victim)
    sent |= {SIGNATURE_HEADER: sign(sent, body_of("victim"), SecretStr(SECRET), at=time.time())}
    publish(bank, body_of("victim"), queue=f"{bank.conf.task_default_queue}-dead", headers=sent)
    (letter,) = letters(1)
    assert (letter.reason, letter.key, letter.outbox_id) == ("unhandled", "victim", victim.id)
    replay(bank, letter.id, ANN)
    (row,) = op.outbox(connection)[1:]
    assert json.loads(row.message)["headers"]["timelimit"] == [None, 90]


def test_what_code_before_has_stored_without_a_look_at_its_signature_is_not_replayed(
    bank: Celery,  # noqa: F811
    victim: Any,
    letters: Callable[[int], Any],  # noqa: F811
    set_secrets: Callable[[list[str]], None],
) -> None:
    set_secrets([])
    dead = f"{bank.conf.task_default_queue}-dead"
    publish(bank, body_of("evil"), queue=dead, headers=of_another(bank, victim))
    (letter,) = letters(1)
    assert (letter.reason, letter.outbox_id) == ("unhandled", victim.id)
    set_secrets([SECRET])
    with pytest.raises(ReplayRefused, match="only what this application has signed is sent again"):
        replay(bank, letter.id, ANN)


def test_a_letter_of_an_operation_is_never_replayed_as_another_task(
    bank: Celery,  # noqa: F811
    victim: Any,
    letters: Callable[[int], Any],  # noqa: F811
    deployed: Callable[[], None],
    set_secrets: Callable[[list[str]], None],
) -> None:
    """By the letter's task, no token is asked for; its message's task moves money."""
    deployed()
    set_secrets([])
    dead = f"{bank.conf.task_default_queue}-dead"
    publish(bank, body_of("evil"), queue=dead, headers=of_another(bank, victim, task=SOON))
    (letter,) = letters(1)
    assert (letter.task, letter.header_task) == (b.deposit.name, SOON)
    with pytest.raises(ReplayRefused, match="its message is for another task"):
        replay(bank, letter.id, Change("eve", "without a token"))


@pytest.mark.parametrize("has_row", [True, False])
def test_a_replay_runs_under_the_key_that_the_letter_shows_or_not_at_all(
    bank: Celery,  # noqa: F811
    victim: Any,
    connection: Connection,
    letters: Callable[[int], Any],  # noqa: F811
    set_secrets: Callable[[list[str]], None],
    has_row: bool,
) -> None:
    """What JSON has no value for is kept as the name of its type, which would be a key, too."""
    set_secrets([])
    dead = f"{bank.conf.task_default_queue}-dead"
    sent = of_another(bank, victim) | {SERVICE_HEADER: None, KEY_HEADER: Decimal(1234), TENANT_HEADER: "default"}
    if not has_row:
        del sent[OUTBOX_HEADER]
    publish(bank, body_of("1234"), queue=dead, headers=sent)
    (letter,) = letters(1)
    assert (letter.reason, letter.key) == ("invalid_key", "1234")
    if not has_row:
        with pytest.raises(ReplayRefused, match="is for another operation"):
            replay(bank, letter.id, ANN)
        return
    replay(bank, letter.id, ANN)
    (row,) = op.outbox(connection)[1:]
    assert (row.key, json.loads(row.message)["headers"][KEY_HEADER]) == ("1234", "1234")
