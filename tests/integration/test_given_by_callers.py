"""What ordinary callers give: a name to be shown, and what follows a plain task."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from tests.support import bank as b
from tests.support.processes import Processes, eventually


def test_a_shadow_may_be_made_of_the_messages_key(bank: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery gives `shadow_name` all options of the message: with its headers, where the key is, and its `argsrepr`."""

    def shadow_name(args: Any, kwargs: Any, options: dict[str, Any]) -> str:
        return f"deposit {options['headers']['idempotency-key']}"

    monkeypatch.setattr(b.deposit, "shadow_name", shadow_name)
    assert b.deposit.apply_async(("a",)).id


@pytest.mark.few(1)
@pytest.mark.timeout(120)
def test_what_follows_a_plain_task_and_no_worker_takes_is_a_letter(bank: Celery, processes: Processes) -> None:
    """Nothing looks at it where the plain task is sent, and its worker has nobody to tell."""
    worker = processes.worker("--concurrency", "1")
    follows = b.deposit.si("a1").set(task_id="refund\u00a0of ann")
    bank.tasks["celery.accumulate"].apply_async(("done",), link=follows)
    refused = "event=refused task=tests.support.bank.deposit reason=invalid_header detail=id"
    eventually(lambda: refused in worker.log, what="the follower is refused, and goes to the letters")
    assert "raised unexpected" not in worker.log
