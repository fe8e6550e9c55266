"""What comes back is signed anew: no message that nobody has signed, and no late copy."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from pydantic import SecretStr
from sqlalchemy import Connection, text

from idempotency import IdempotentTask
from idempotency.application import close_runtime
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.relay.relay import Relay
from idempotency.store import claims
from idempotency.wire.headers import FINGERPRINT_HEADER, KEY_HEADER, SIGNATURE_HEADER, TENANT_HEADER
from idempotency.wire.signing import sign, signed_at
from tests.integration.test_signed_messages import SECRET, bank, environment, letters, signed  # noqa: F401
from tests.integration.test_waiting import impatient, proxy, soon  # noqa: F401
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import body_of, headers, publish
from tests.support.deliveries import Deliveries
from tests.support.processes import eventually
from tests.support.proxy import Proxy

ADOPTED, DAILY = "bank.adopted", "bank.daily"
# Since then, the operation of a message may have been completed and purged.
LONG_AGO = time.time() - 30 * 86400


@pytest.fixture
def old_relay(bank: Celery) -> Iterator[Celery]:  # noqa: F811
    """An application in which a task is still a plain one, that its workers' newer code has made idempotent."""

    @bank.task(name=ADOPTED, shared=False)
    def adopted(account: str) -> None: ...

    assert ADOPTED in bank.tasks
    bank.conf.idempotency_unknown_task_grace = 3600.0
    bank.conf.idempotency_message_secrets = [SECRET]
    close_runtime(bank)
    yield bank
    bank.tasks.pop(ADOPTED, None)
    bank.conf.idempotency_unknown_task_grace = 0.0
    close_runtime(bank)


def test_a_relay_signs_no_message_that_was_not(old_relay: Celery, relay: Relay, connection: Connection) -> None:
    """In a deploy that makes a plain task idempotent, a relay that knows the task as a plain one looks at signatures, too."""
    dead = f"{old_relay.conf.task_default_queue}-dead"
    named: dict[str, Any] = {
        KEY_HEADER: "victim", TENANT_HEADER: "default", FINGERPRINT_HEADER: b.fingerprint_of("victim"),
        "x-death": [{"queue": old_relay.conf.task_default_queue, "reason": "rejected"}],
    }  # fmt: skip
    consumer = DeadLetterConsumer(old_relay)
    consumer.run_once()
    publish(old_relay, body_of("victim"), queue=dead, headers=headers(task=ADOPTED) | named)
    waits = "SELECT count(*) FROM idempotency.outbox"
    stored = "SELECT count(*) FROM idempotency.dead_letters"

    def handled() -> bool:
        consumer.run_once()
        return any(connection.execute(text(each)).scalar_one() for each in (waits, stored))

    eventually(handled, timeout=20)
    consumer.close()
    connection.execute(text("UPDATE idempotency.outbox SET available_at = now()"))
    relay.run_once()
    with old_relay.connection_for_write() as broker:
        sent = broker.channel().basic_get(old_relay.conf.task_default_queue, no_ack=True)
    signed = None if sent is None else signed_at(sent.headers, sent.body, [SecretStr(SECRET)])
    assert signed is None, f"the relay has signed it for {sent.headers[KEY_HEADER]!r}"


@pytest.mark.parametrize("is_known", [True, False])
def test_no_relay_puts_back_a_late_copy_whether_it_knows_the_task_or_not(
    bank: Celery,  # noqa: F811
    connection: Connection,
    letters: Callable[[int], Any],  # noqa: F811
    is_known: bool,
) -> None:
    """In a deploy a relay may lack the task, and identify the operation by the message's headers."""
    bank.conf.idempotency_unknown_task_grace = 3600.0
    close_runtime(bank)
    sent = signed("a1", at=LONG_AGO, **{FINGERPRINT_HEADER: b.fingerprint_of("a1")})
    sent["x-death"] = [{"queue": bank.conf.task_default_queue, "reason": "rejected"}]
    task = bank.tasks[b.deposit.name]
    try:
        if not is_known:
            bank.tasks.pop(b.deposit.name)
        publish(bank, body_of("a1"), queue=f"{bank.conf.task_default_queue}-dead", headers=sent)
        (letter,) = letters(1)
    finally:
        bank.tasks.register(task)
        bank.conf.idempotency_unknown_task_grace = 0.0
    assert (letter.reason, letter.key) == ("stale", "a1")
    assert op.outbox(connection) == []


@pytest.fixture
def copied(bank: Celery) -> Callable[[], Any]:  # noqa: F811
    """The copy that a worker has sent to its queue."""

    def take() -> Any:
        with bank.connection_for_read() as broker:
            channel = broker.channel()
            taken = eventually(lambda: channel.basic_get(bank.conf.task_default_queue, no_ack=True))
            return channel.message_to_python(taken)

    return take


def test_a_late_copy_stays_one_while_postgres_is_away(
    bank: Celery,  # noqa: F811
    proxy: Proxy,  # noqa: F811
    deliveries: Deliveries,
    impatient: None,  # noqa: F811
    entries: Callable[[str], int],
    copied: Callable[[], Any],
) -> None:
    sent = signed("a1", at=LONG_AGO)
    proxy.refuse()
    assert deliveries.deliver(b.deposit, "a1", headers=sent, task_id=sent["id"]).state == "IGNORED"
    proxy.heal()
    copy = copied()
    assert signed_at(copy.headers, copy.body, [SecretStr(SECRET)]) == pytest.approx(LONG_AGO, abs=0.001)
    outcome = deliveries.deliver(b.deposit, "a1", headers=copy.headers, task_id=sent["id"])
    assert (outcome.state, outcome.value.code, entries("a1")) == ("FAILURE", "stale", 0)


def test_no_late_copy_is_kept_in_the_outbox_while_its_claim_has_no_answer(
    bank: Celery,  # noqa: F811
    deliveries: Deliveries,
    connection: Connection,
    impatient: None,  # noqa: F811
    copied: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There it would look like a message that has never come."""

    def no_answer(*_: Any, **__: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(claims, "claim", no_answer)
    for account, at in (("late", LONG_AGO), ("new", time.time())):
        sent = signed(account, at=at)
        assert deliveries.deliver(b.deposit, account, headers=sent, task_id=sent["id"]).state == "IGNORED"
    assert [row.key for row in op.outbox(connection)] == ["new"]
    assert copied().headers[KEY_HEADER] == "late"


def test_no_late_copy_comes_back_under_a_key_that_is_made_anew(
    bank: Celery,  # noqa: F811
    deliveries: Deliveries,
    connection: Connection,
) -> None:
    """A key function may read a clock, so a message without its key is put back with it."""

    @bank.task(base=IdempotentTask, bind=True, name=DAILY, key=lambda arguments: f"{time.time()}", shared=False)
    def daily(self: IdempotentTask, account: str) -> str:
        return account

    try:
        for account, at, state in (("late", LONG_AGO, "FAILURE"), ("new", time.time(), "IGNORED")):
            sent = headers(task=DAILY)
            sent |= {SIGNATURE_HEADER: sign(sent, body_of(account), SecretStr(SECRET), at=at)}
            assert deliveries.deliver(daily, account, headers=sent, task_id=sent["id"]).state == state
        (row,) = op.outbox(connection)
        assert json.loads(json.loads(row.message)["body"])[0] == ["new"]
        assert [letter.reason for letter in op.dead_letters(connection)] == ["stale"]
    finally:
        bank.tasks.pop(DAILY)
