"""A bulk replay passes over no letter for what is not its fault: a session that ends, a lock of the table."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency.application import close_runtime
from idempotency.operate.replay import replay
from idempotency.web import access, bulk
from tests.support.deliveries import Deliveries
from tests.support.tasks import transactional
from tests.web.conftest import Browser, Open
from tests.web.test_bulk import begun_without_warnings, failing, said
from tests.web.test_changes import audited, deliver_all


def next_of(page: Browser, address: str) -> dict[str, str]:
    (field,) = re.findall(r'name="of" value="([^"]*)"', page.get(address).text)
    return {"of": field}


@pytest.mark.long
def test_a_session_that_ends_during_a_stage_passes_over_no_letter(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, fails = failing(bank, deliveries, *(f"n{n:02}" for n in range(30)))
    otto = browser("otto")
    _, of = begun_without_warnings(otto, only_task=task.name)
    fails.clear()
    after = otto.post("/bulk/next", of).headers["location"]
    assert deliver_all(bank, deliveries, connection) == 1
    clock = SimpleNamespace(time=time.time)
    monkeypatch.setattr(access, "time", clock)
    whole = replay

    def replayed(*args: Any, **options: Any) -> Any:
        try:
            return whole(*args, **options)
        finally:
            clock.time = lambda: time.time() + 7 * 86400  # the session is over once the second letter was sent

    monkeypatch.setattr(bulk, "replay", replayed)
    assert otto.post("/bulk/next", next_of(otto, after)).status_code == 403
    clock.time = time.time
    assert deliver_all(bank, deliveries, connection) == 1
    assert len(audited(connection, "replay")) == 2
    told = said(browser("otto"), after)  # who has logged in again
    assert ("2 of 30 completed" in told, "28 waiting" in told, "refused" in told) == (True, True, False)


@pytest.fixture
def quick(bank: Celery) -> Iterator[None]:
    before = {name: bank.conf[name] for name in ("idempotency_lease", "idempotency_heartbeat")}
    bank.conf.update(idempotency_lease=2.0, idempotency_heartbeat=0.5)
    close_runtime(bank)
    yield
    bank.conf.update(before)
    close_runtime(bank)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_lock_of_the_table_ends_a_stage_and_passes_over_no_letter(
    quick: None, browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, engine: Engine
) -> None:
    """As `CREATE INDEX` on the letters has one: not one letter is the cause, and each is waited for in turn."""
    task, fails = failing(bank, deliveries, *(f"n{n:02}" for n in range(6)))
    otto = browser("otto")
    _, of = begun_without_warnings(otto, only_task=task.name)
    fails.clear()
    with transactional(engine).begin() as other:
        other.execute(text("LOCK TABLE idempotency.dead_letters IN SHARE MODE"))
        refused = otto.post("/bulk/next", of)
    assert refused.status_code == 409
    assert "is locked by something else" in refused.text
    assert "6 waiting" in otto.get("/bulk", params=of).text
    with transactional(engine).begin() as other:
        other.execute(text("LOCK TABLE idempotency.dead_letters IN SHARE MODE"))
        refused = otto.post("/letters/archive", {"only_task": task.name, "reason": "known"})
    assert refused.status_code == 409
    assert "0 archived; letter" in refused.text
