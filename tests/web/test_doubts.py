"""Money in doubt: no call is hidden by others, and a list that stops says so."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency import Happened, OperationId
from idempotency.operate.archive import archive, restore
from idempotency.operate.change import Change, read
from idempotency.operate.resolve import resolve_effect
from idempotency.sagas import saga
from idempotency.store import doubts
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.operations import make_due
from tests.support.tasks import Provider, lost, make_task
from tests.web.conftest import Open
from tests.web.test_changes import shown

COPIES = """
INSERT INTO idempotency.records SELECT (jsonb_populate_record(r, jsonb_build_object('key', 'w' || n))).*
FROM idempotency.records r, generate_series(1, :count) n WHERE r.key = :key
"""


@pytest.fixture
def tries(bank: Celery, deliveries: Deliveries) -> str:
    """The key of an operation that has called, and whose next attempt asks what became of it."""
    task = make_task(bank, lambda self: self.effect("charge", Provider(lost(), lost())), max_attempts=5)
    deliveries.deliver(task, key="k")
    return "k"


def tried(page: Any) -> list[str]:
    """The calls of the list of what has not ended."""
    return re.findall(r'<th scope="row">(\w+)<br>', page.text[page.text.index('id="tried"') :])


def test_a_call_in_doubt_is_not_hidden_by_many_that_wait(
    browser: Open, connection: Connection, monkeypatch: pytest.MonkeyPatch, tries: str
) -> None:
    connection.execute(text("UPDATE idempotency.records SET queue = 'payments' WHERE key = :key"), {"key": tries})
    early = op.early(connection, queue="mails")
    connection.execute(text(COPIES), {"count": 600, "key": early.id.key})
    otto = browser("otto")
    page = otto.get("/doubts")
    assert tried(page) == ["charge"]
    assert "no call is in doubt" not in page.text
    monkeypatch.setattr(doubts, "BOUND", 600)
    page = otto.get("/doubts")
    assert 'id="tried"' not in page.text
    assert ("no call is in doubt" in page.text, "not all were looked at" in page.text) == (False, True)


def test_a_list_of_calls_that_stops_says_so(browser: Open, connection: Connection, tries: str) -> None:
    otto = browser("otto")
    connection.execute(text(COPIES), {"count": 99, "key": tries})
    page = otto.get("/doubts")
    assert (len(tried(page)), "there are more" in shown(page)) == (100, False)
    connection.execute(text("UPDATE idempotency.records SET key = 'first' WHERE key = 'k'"))
    connection.execute(text(COPIES.replace("'w'", "'x'")), {"count": 1, "key": "first"})
    page = otto.get("/doubts")
    assert (len(tried(page)), "there are more" in shown(page)) == (100, True)


def test_a_call_whose_holder_has_died_is_in_doubt(browser: Open, connection: Connection) -> None:
    """Its lease is over, and nobody has recovered it yet."""
    held = op.expired(connection)
    connection.execute(
        text(
            "UPDATE idempotency.records SET effects = jsonb_build_object('charge', jsonb_build_object('kind', 'effect',"
            " 'state', 'begun', 'key', 'pk', 'number', 0, 'position', 0, 'begun_at', 1700000000)) WHERE key = :key"
        ),
        {"key": held.id.key},
    )
    page = browser("otto").get("/doubts")
    assert tried(page) == ["charge"]
    assert "its holder is gone" in page.text


@pytest.fixture
def unknown(bank: Celery, deliveries: Deliveries, engine: Engine) -> Any:
    """A task whose operation `k` has ended over a call whose outcome nobody knows, after two attempts."""
    task = make_task(bank, lambda self: self.effect("charge", Provider(*[lost()] * 4)), max_attempts=2)
    for _ in range(3):
        deliveries.deliver(task, key="k")
        make_due(engine, "k")
    return task


def links(page: Any) -> list[str]:
    return [html.unescape(each) for each in re.findall(r'href="(/doubts/resolve[^"]+)"', page.text)]


def test_a_letter_about_a_call_in_doubt_leads_to_its_resolution(
    browser: Open, connection: Connection, unknown: Any
) -> None:
    (letter,) = op.dead_letters(connection)
    otto = browser("otto")
    desk = otto.client.app.state.desk
    desk.settings = desk.settings.model_copy(update={"web_effect_link": "https://dashboard.example/search?query={key}"})
    page = otto.get(f"/letters/{letter.id}")
    named = {"tenant": "default", "task": unknown.name, "key": "k"}
    operation = otto.get("/operation", params=named)
    key = connection.execute(text("SELECT effects -> 'charge' ->> 'key' FROM idempotency.records")).scalar_one()
    for shown_by in (page, operation):
        (link,) = links(shown_by)
        assert otto.get(link).status_code == 200
        assert f"https://dashboard.example/search?query={key}" in shown_by.text
    assert 'href="/doubts"' in page.text[page.text.index('id="doubt"') :]
    reader = browser("rita").get(f"/letters/{letter.id}")
    assert (links(reader), "needs an operator" in reader.text) == ([], True)
    # what a person has said may be corrected from here, until the letter is closed
    record = connection.execute(text("SELECT status, fence FROM idempotency.records")).one()
    given = {"effect": "charge", "outcome": "not_happened", "status": record.status, "fence": record.fence}
    assert otto.post("/doubts/resolve", named | given | {"reason": "looked it up"}).status_code == 303
    page = otto.get(f"/letters/{letter.id}")
    assert ("Correct" in page.text, len(links(page))) == (True, 1)
    assert otto.post(f"/letters/{letter.id}/replay", {"reason": "go on"}).status_code == 303
    assert links(otto.get(f"/letters/{letter.id}")) == []


def test_a_letter_of_a_saga_leads_to_the_call_that_it_has_stopped_for(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    @saga("web.charged", key="{name}", entity="name", app=bank, max_attempts=1)
    def charged(saga: Any, name: str) -> None:
        saga.effect("charge", Provider(*[lost()] * 4))

    for _ in range(4):
        deliveries.deliver(charged, "s")
        connection.execute(text("UPDATE idempotency.records SET available_at = now() WHERE available_at IS NOT NULL"))
    letter = next(each for each in op.dead_letters(connection) if each.reason == "effect_unknown")
    otto = browser("otto")
    (link,) = links(otto.get(f"/letters/{letter.id}"))
    assert otto.get(link).status_code == 200


def test_the_claim_that_ends_an_operation_is_not_called_an_attempt(
    browser: Open, connection: Connection, unknown: Any
) -> None:
    record = connection.execute(text("SELECT attempts, spent_at FROM idempotency.records")).one()
    assert (record.attempts, record.spent_at) == (3, 3), "of two that the task may have"
    (letter,) = op.dead_letters(connection)
    otto = browser("otto")
    paths = [f"/letters/{letter.id}", f"/operation?tenant=default&task={unknown.name}&key=k", "/operations?stage=ended"]
    for path in paths:
        said = shown(otto.get(path))
        assert "2 attempts, and 1 claim to end it" in said, path
        assert "3 attempts" not in said, path


@pytest.mark.long
def test_an_archived_letter_is_not_on_the_list_of_money_in_doubt(
    browser: Open, bank: Celery, connection: Connection, unknown: Any
) -> None:
    """A person has said what has become of its call; replayed it is once it is restored."""
    (letter,) = op.dead_letters(connection)
    id = OperationId("default", unknown.name, "k")
    otto, link = browser("otto"), f'href="/letters/{letter.id}"'
    said = Change("ann", "it is there", is_verified=True)
    resolve_effect(bank, read(connection, id, "bank"), "charge", Happened(1), said)
    assert link in otto.get("/doubts").text
    archive(bank, letter.id, said)
    assert link not in otto.get("/doubts").text
    assert "said by a person" in otto.get(f"/letters/{letter.id}").text
    restore(bank, letter.id, said)
    assert link in otto.get("/doubts").text
