"""Money in doubt: no call is hidden by others, and a list that stops says so."""

from __future__ import annotations

import re
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text

from idempotency.store import doubts
from tests.support import operations as op
from tests.support.deliveries import Deliveries
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
