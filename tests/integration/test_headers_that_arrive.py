"""What the signature does not cover, and a worker would take for its own, is refused where it arrives."""

from __future__ import annotations

import kombu
import pytest
from celery import Celery

from idempotency import IdempotentTask
from idempotency.letters.examine import examine
from tests.support import bank as b
from tests.support import queues
from tests.support.tasks import make_task


def calling(self: IdempotentTask, account: str) -> None:
    b.deposit.delay(account)


@pytest.mark.parametrize("name", ["_children", "_protected"])
def test_who_adds_a_header_that_is_an_attribute_of_celerys_has_its_message_refused(bank: Celery, name: str) -> None:
    bank.finalize()
    task = make_task(bank, calling, key="{account}", max_attempts=1)
    queues.drained(bank)
    task.delay("a1")
    (message,) = queues.drained(bank)
    arrived = kombu.Message(
        body=message.body,
        headers={**message.headers, name: "x"},
        content_type="application/json",
        content_encoding="utf-8",
        accept={"application/json"},
    )
    assert examine(bank, arrived).reason == "invalid_header"
