"""Proofs of a second reader: what ordinary callers of signed and unsigned messages lose."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text

from tests.support import bank as b
from tests.support import operations as op
from tests.support.processes import Processes, eventually


def test_a_shadow_made_of_the_messages_key_fails_its_call(bank: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery gives `shadow_name` all options of the message: with its headers, where the key is, and its `argsrepr`."""

    def shadow_name(args: Any, kwargs: Any, options: dict[str, Any]) -> str:
        return f"deposit {options['headers']['idempotency-key']}"

    monkeypatch.setattr(b.deposit, "shadow_name", shadow_name)
    with pytest.raises(KeyError):
        b.deposit.apply_async(("a",))


@pytest.mark.few(1)
@pytest.mark.timeout(120)
def test_a_plain_task_that_has_run_fails_for_what_follows_it_and_that_is_gone(
    bank: Celery, connection: Connection, processes: Processes
) -> None:
    """Nothing looks at what follows a plain task where it is sent: before, its worker sent this, and it was a letter `invalid_header`."""
    worker = processes.worker("--concurrency", "1")
    follows = b.deposit.si("a1").set(task_id="refund\u00a0of ann")
    bank.tasks["celery.accumulate"].apply_async(("done",), link=follows)
    eventually(lambda: "must be printable" in worker.log or op.dead_letters(connection), what="the follower")
    print([line for line in worker.log.splitlines() if "accumulate" in line])
    assert op.dead_letters(connection) == []
    assert "raised unexpected" in worker.log
    assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 0
