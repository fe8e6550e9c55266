"""Attempts that begin at the same time see each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from idempotency.store import webhooks as stored
from idempotency.testing import Outbox
from tests.support.operations import at_once
from tests.support.tasks import transactional


@pytest.mark.long
@pytest.mark.parametrize(("is_failing", "most"), [(True, 1), (False, 3)])
def test_an_endpoint_has_no_more_attempts_at_a_time_than_it_may(
    shop: Celery,
    happen: Callable[..., str],
    register: Callable[..., Any],
    outbox: Outbox,
    engine: Engine,
    rows: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    is_failing: bool,
    most: int,
) -> None:
    monkeypatch.setattr(stored, "AT_ONCE", 3)
    register()
    for _ in range(5):
        happen()
    for _ in range(5):
        due = outbox._next()  # the fan-out of each
        assert due is not None
        outbox._deliver(due)
    deliveries = [each.id for each in rows("deliveries")]
    assert len(deliveries) == 5
    if is_failing:
        with engine.connect() as connection:
            connection.execute(text("UPDATE idempotency.webhook_endpoints SET failing_since = clock_timestamp()"))

    def begin(index: int) -> type:
        with transactional(engine).begin() as connection:
            return type(stored.begin_attempt(connection, deliveries[index], 0, most=10, longest=30.0))

    begun = at_once(len(deliveries), begin)
    assert begun.count(stored.Begun) == most
