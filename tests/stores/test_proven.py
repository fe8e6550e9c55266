"""What goes wrong in stores today: each test passes while its fault is there."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Retry

from idempotency import DeduplicatedTask, PermanentError
from idempotency.errors import AttemptsExhausted
from idempotency.worker.store_runtimes import close_store_runtimes
from tests.stores.test_tasks import ageing, copies, deliver, id_of, make, new_key, ours, shop, store_of  # noqa: F401


def test_an_error_that_is_longer_than_an_item_is_never_recorded_and_the_body_runs_again(
    shop: Celery,  # noqa: F811
    deliver: Any,  # noqa: F811
) -> None:
    """An item of DynamoDB ends at 400 KB. What is refused as too long counts as a store that does not answer.

    So a permanent error is no end: the delivery waits (five minutes, without a time limit), and the body runs `max_attempts` times.
    """
    ran: list[str] = []

    def body(self: DeduplicatedTask, account: str) -> None:
        ran.append(account)
        raise PermanentError("x" * 500_000, "no_account")

    if store_of(shop).name != "dynamodb":
        pytest.skip("an item of Redis may be that long")
    key = new_key()
    task = make(shop, body, key="{account}", time_limit=3, max_attempts=3)
    headers: dict[str, Any] = {}
    seen: list[Any] = []
    for _ in range(12):
        seen.append(deliver(task, key, headers=headers).value)
        if not isinstance(seen[-1], Retry):
            break
        (copy,) = copies(shop)
        headers = ours(copy)
        stored = store_of(shop).read(id_of(task, key))
        assert stored is not None
        ageing(shop).lease_over(id_of(task, key))
    assert "ValidationException" in str(seen[0].exc)
    assert len(ran) == 3
    assert isinstance(seen[-1], AttemptsExhausted)


def test_a_renamed_application_runs_again_what_it_has_done(
    shop: Celery,  # noqa: F811
    deliver: Any,  # noqa: F811
) -> None:
    """A record is known by the application's name, and no command moves it, nor does a page say so."""
    ran: list[str] = []

    def body(self: DeduplicatedTask, account: str) -> str:
        ran.append(self.outside_key)
        return account

    key = new_key()
    task = make(shop, body, key="{account}")
    assert deliver(task, key).state == "SUCCESS"
    assert deliver(task, key).state == "SUCCESS"
    assert len(ran) == 1
    shop.conf.idempotency_service = "renamed"
    close_store_runtimes(shop)
    assert deliver(task, key).state == "SUCCESS"
    assert len(ran) == 2
