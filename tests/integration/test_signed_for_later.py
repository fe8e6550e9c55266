"""Calls that are meant for later, where messages are signed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery

from tests.integration.test_signed_messages import bank, environment, letters, signed  # noqa: F401
from tests.support.dead_messages import body_of, publish
from tests.support.processes import Processes, eventually


@pytest.mark.long
def test_a_call_for_the_day_after_tomorrow_runs_then(
    bank: Celery,  # noqa: F811
    processes: Processes,
    entries: Callable[[str], int],
    letters: Callable[[int], Any],  # noqa: F811
) -> None:
    """It waits for longer than `redelivery_horizon`, and is no late copy."""
    processes.worker()
    called = time.time() - 2 * 86400
    due = datetime.now(UTC) - timedelta(seconds=1)
    publish(bank, body_of("later"), headers=signed("later", at=called, eta=due.isoformat()))
    with suppress(AssertionError):
        eventually(lambda: entries("later") == 1, timeout=5)
    reasons = [] if entries("later") else [letter.reason for letter in letters(1)]
    assert (entries("later"), reasons) == (1, [])
