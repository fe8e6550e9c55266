"""Headers of a caller that have the name of something in Celery's body."""

from __future__ import annotations

import json
from typing import Any

import kombu
import pytest
from celery import Celery
from sqlalchemy import Engine

from idempotency.application import close_runtime
from idempotency.errors import InvalidArguments
from idempotency.letters.examine import examine
from tests.support import bank as b
from tests.support.tasks import transactional


@pytest.mark.parametrize("name", ["chain", "chord", "taskset", "called_directly"])
def test_what_a_worker_would_refuse_is_refused_where_it_is_given(bank: Celery, engine: Engine, name: str) -> None:
    with (
        transactional(engine).begin() as caller,
        pytest.raises(InvalidArguments, match=f"headers: '{name}' is a field of Celery's message"),
    ):
        b.deposit.enqueue(caller, "a", headers={name: "ethereum"})


@pytest.mark.parametrize(("is_in_body", "reason"), [(True, None), (False, "unsigned")])
def test_a_plain_tasks_header_counts_only_where_its_body_lacks_the_name(
    bank: Celery, is_in_body: bool, reason: str | None
) -> None:
    @bank.task(name="plain", shared=False)
    def plain() -> None:
        pass

    bank.finalize()
    wire = bank.amqp.as_task_v2("1", "plain", (), {})
    args, kwargs, embed = wire.body
    headers: dict[str, Any] = {**wire.headers, "chain": "ethereum"}
    arrived = kombu.Message(
        body=json.dumps([args, kwargs, embed if is_in_body else {}]),
        headers=headers,
        content_type="application/json",
        content_encoding="utf-8",
        accept={"application/json"},
    )
    close_runtime(bank)
    bank.conf.idempotency_message_secrets = "a" * 32
    try:
        assert examine(bank, arrived).reason == reason
    finally:
        close_runtime(bank)
        bank.conf.idempotency_message_secrets = ""
        bank.tasks.pop("plain")
