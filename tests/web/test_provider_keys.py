"""An operation is found by the key that its provider was given, whatever has become of it."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency.application import runtime_of
from idempotency.sagas import saga
from idempotency.store import provider_keys
from idempotency.store.visible import VISIBLE
from tests.support import commands
from tests.support.commands import Run
from tests.support.deliveries import Deliveries
from tests.support.operations import make_due
from tests.support.plans import explain
from tests.support.tasks import Provider, lost, make_task
from tests.web.conftest import Browser, Open
from tests.web.test_changes import shown


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return commands.runner(monkeypatch, capsys)


@pytest.fixture
def worked(bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection) -> dict[str, str]:
    """The provider's keys of operations that completed, failed over an unknown outcome, and wait; and of a saga."""
    completed = make_task(bank, lambda self: self.effect("charge", Provider()))
    deliveries.deliver(completed, key="completed")
    doubtful = make_task(bank, lambda self: self.effect("charge", Provider(*[lost()] * 4)), max_attempts=2)
    for _ in range(3):
        deliveries.deliver(doubtful, key="failed")
        make_due(engine, "failed")
    deliveries.deliver(doubtful, key="waits")

    @saga("web.paid", key="{name}", entity="name", app=bank)
    def paid(saga: Any, name: str) -> None:
        saga.effect("charge", Provider())

    deliveries.deliver(paid, "saga")
    rows = connection.execute(
        text(
            "SELECT key, effects -> 'charge' ->> 'key' AS given FROM idempotency.records WHERE effects <> '{}' UNION ALL"
            " SELECT 'saga', entry ->> 'key' FROM idempotency.saga_steps WHERE kind = 'effect'"
        )
    )
    found = {row.key: row.given for row in rows}
    assert sorted(found) == ["completed", "failed", "saga", "waits"]
    return found


def searched(browser: Browser, key: str) -> str:
    answer = browser.get("/operations", params={"key": key})
    return str(answer.headers["location"]) if answer.status_code == 303 else shown(answer)


@pytest.mark.long
def test_an_operation_is_found_by_the_key_at_its_provider(
    browser: Open, connection: Connection, run: Run, worked: dict[str, str]
) -> None:
    otto = browser("otto")
    for key, given in worked.items():
        assert searched(otto, given).endswith(f"&key={key}"), key
        answer = run("effects", "find", given, "--json")
        assert [(row["key"], row["effect"]) for row in answer.document] == [(key, "charge")]
    assert "No operation that you may see" in searched(otto, "idem-nothing")
    assert "among those" not in searched(otto, "idem-nothing")
    nothing = run("effects", "find", "idem-nothing")
    assert (nothing.status, "no operation has called under it" in nothing.error) == (1, True)


def test_of_another_tenant_or_application_none_is_found(
    browser: Open, connection: Connection, worked: dict[str, str], run: Run
) -> None:
    tina = browser("tina")
    assert all("No operation that you may see" in searched(tina, given) for given in worked.values())
    connection.execute(text("UPDATE idempotency.records SET service = 'shop'"))
    otto = browser("otto")
    assert all("No operation that you may see" in searched(otto, given) for given in worked.values())
    assert {run("effects", "find", given).status for given in worked.values()} == {1}


@pytest.mark.long
def test_where_not_all_was_asked_the_answer_says_so(
    browser: Open, connection: Connection, worked: dict[str, str], monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(provider_keys, "BOUND", 0)
    otto = browser("otto")
    assert "among those that were looked at" in searched(otto, worked["waits"])
    assert "than were looked at" in run("effects", "find", worked["waits"]).error
    assert searched(otto, worked["completed"]).endswith("&key=completed")
    # a deploy whose migration is still to come
    monkeypatch.setattr(provider_keys, "BOUND", 20_000)
    connection.execute(text("ALTER INDEX idempotency.records_provider_keys RENAME TO hidden"))
    try:
        assert "among those that were looked at" in searched(otto, worked["completed"])
        assert searched(otto, worked["waits"]).endswith("&key=waits")
    finally:
        connection.execute(text("ALTER INDEX idempotency.hidden RENAME TO records_provider_keys"))


@pytest.mark.plain
def test_what_has_ended_is_found_by_the_index(bank: Celery) -> None:
    with runtime_of(bank).autocommit() as connection:
        ended = provider_keys._FIND.format(of=provider_keys._ENDED, visible=VISIBLE)
        assert "records_provider_keys" in explain(connection, ended)
        assert "saga_steps_provider_keys" in explain(connection, provider_keys._OF_SAGAS)
