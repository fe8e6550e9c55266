"""What a second reader suspects of signed messages: each test passes while the fault is there."""

# ruff: noqa: F811  fixtures of another module

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from tests.integration.test_signed_messages import bank, environment, letters  # noqa: F401
from tests.support import bank as b
from tests.support import operations as op
from tests.support.processes import Processes, eventually
from tests.support.tasks import transactional

# a space that does not break, as names of customers have it: `str.isprintable` says no
UNFIT = "refund\u00a0of ann"


def resent(bank: Celery, connection: Connection) -> int:
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 day'"))
    return resend_lost(bank, lambda _: 0).resent


@pytest.mark.parametrize("options", [{"task_id": UNFIT}, {"headers": {"headers": "text"}}], ids=["task_id", "headers"])
def test_what_the_application_has_signed_itself_is_altered_and_sent_again_for_ever(
    bank: Celery,
    relay: Relay,
    processes: Processes,
    engine: Engine,
    connection: Connection,
    letters: Callable[[int], Any],
    options: dict[str, Any],
) -> None:
    """Its task id is unfit, which `enqueue` takes. Nobody has touched the message."""
    processes.worker()
    with transactional(engine).begin() as caller:
        b.deposit.enqueue(caller, "a1", **options)
    found = letters(1)
    for number in (2, 3):
        assert resent(bank, connection) == 1  # nothing has ended, and no letter names it
        found = letters(number)
    assert {letter.reason for letter in found} == {"altered"}
    assert {(letter.task, letter.key, letter.outbox_id) for letter in found} == {(None, None, None)}
    (row,) = op.outbox(connection)
    assert row.settled_at is None
    assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 0


@pytest.mark.parametrize("options", [{"shadow": UNFIT}, {"task_id": UNFIT}, {"time_limit": "soon"}], ids=str)
def test_what_a_caller_has_sent_is_called_altered(
    bank: Celery, processes: Processes, letters: Callable[[int], Any], options: dict[str, Any]
) -> None:
    processes.worker()
    b.deposit.apply_async(("a1",), **options)
    (letter,) = letters(1)
    assert letter.reason == "altered"

