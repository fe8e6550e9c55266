"""Letters of messages that were never signed, once a deploy knows their task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection

from idempotency import IdempotentTask
from idempotency.application import close_runtime
from idempotency.errors import ReplayRefused
from idempotency.operate.replay import replay
from idempotency.wire.message import KEY_HEADER
from tests.integration.test_signed_messages import bank, environment, letters  # noqa: F401
from tests.support.dead_messages import body_of, headers, publish
from tests.support.operators import ANN

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
