"""A message that nobody has signed, and a relay that is deployed after the workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from pydantic import SecretStr
from sqlalchemy import Connection, text

from idempotency.application import close_runtime
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.relay.relay import Relay
from idempotency.wire.message import FINGERPRINT_HEADER, KEY_HEADER, TENANT_HEADER
from idempotency.wire.signing import signed_at
from tests.integration.test_signed_messages import SECRET, bank, environment  # noqa: F401
from tests.support import bank as b
from tests.support.dead_messages import body_of, headers, publish
from tests.support.processes import eventually

ADOPTED = "bank.adopted"


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
