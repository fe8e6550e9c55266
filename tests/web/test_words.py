"""One of a thing is said as one, and no word twice: on each page, in commands, and in what alarms say."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text

from tests.support import bank as b
from tests.support import commands
from tests.support import operations as op
from tests.support.commands import Run
from tests.support.deliveries import Deliveries
from tests.unit.test_runbooks import all_wrong
from tests.web.conftest import Open

NOUNS = (
    "attempts|calls|claims|consumers|days|groups|hours|keys|letters|messages|operations|partitions|processes|queues|records|rows|"
    "sagas|statements|steps|tasks|tenants|tries|times|undos|workers"
)
WRONG = re.compile(rf"(?<![\d.,/-])1 (?:[a-z]+ )?(?:{NOUNS})\b|\b([a-z]{{3,}}) \1\b")
PATHS = (
    "/",
    "/failures",
    "/letters",
    "/doubts",
    "/approvals",
    "/operations",
    "/operations?stage=accepted",
    "/sagas",
    "/tenants",
)


def wrong(said: str) -> list[str]:
    return [found[0] for found in WRONG.finditer(said)]


def in_lines(answer: Any) -> str:
    """What a page says: what a tag divides is not one sentence."""
    return html.unescape(re.sub(r"<(?!/?(?:strong|code|em|a)\b)[^>]+>", "\n", answer.text))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return commands.runner(monkeypatch, capsys)


def test_wrong_numbers_and_doubled_words_are_noticed() -> None:
    assert wrong("1 letters, 1 open letters, of 11 letters, 1 letter, an operation operation") == [
        "1 letters", "1 open letters", "operation operation",
    ]  # fmt: skip


@pytest.mark.long
def test_one_is_said_as_one_and_no_word_twice(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, run: Run
) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    b.enqueue_deposit()
    op.started(connection)
    connection.execute(
        text(
            "INSERT INTO idempotency.processes (kind, name, host, pid, service, version, queues, started_at, seen_at)"
            " VALUES ('worker', 'w@h', 'h', 7, 'bank', '1', '{}', now(), now() - interval '3 hours'),"
            " ('relay', 'r@h', 'h', 8, 'shop', '1', '{}', now(), now())"
        )
    )
    (letter,) = op.dead_letters(connection)
    otto = browser("otto")
    paths = [*PATHS, f"/letters/{letter.id}", f"/operation?tenant=default&task={b.failing.name}&key=a1"]
    said = {path: in_lines(otto.get(path)) for path in paths}
    assert "ended after 1 attempt" in said[paths[-1]]
    for typed in (
        "status",
        "list",
        "show a1",
        f"dead-letters show {letter.id}",
        "dead-letters list",
        "dead-letters report --days 1",
    ):
        said[typed] = run(*typed.split()).out
    assert {name: found for name, text in said.items() if (found := wrong(text))} == {}


def test_alarms_about_one_say_one() -> None:
    said = {alarm.name: f"{alarm.subject}: {alarm.found}" for alarm in all_wrong()}
    assert len(said) > 8
    assert {name: found for name, text in said.items() if (found := wrong(text))} == {}
