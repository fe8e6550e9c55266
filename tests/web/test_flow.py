"""The flow: whose work is shown to whom, and what a count says that stopped at its limit."""

from __future__ import annotations

import re
from typing import Any

import pytest
from sqlalchemy import Connection, text

from idempotency.store import flow
from idempotency.wire.keys import OperationId
from tests.support import operations as op
from tests.web.conftest import Open
from tests.web.test_changes import shown

BOUND = 40


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "BOUND", BOUND)


def many(connection: Connection, key: str, count: int) -> None:
    """More records like that of this key."""
    connection.execute(
        text(
            "INSERT INTO idempotency.records SELECT (jsonb_populate_record(r, jsonb_build_object('key', r.key || n, 'token',"
            " CASE WHEN r.token IS NOT NULL THEN 't' || n END))).* FROM idempotency.records r, generate_series(1, :count) n"
            " WHERE r.key = :key"
        ),
        {"key": key, "count": count},
    )


def figures(answer: Any, queue: str) -> str:
    row = answer.text[answer.text.index(f'<th scope="row" class="mono">{queue}</th>') :]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", row[: row.index("</tr>")])).strip()


def test_a_person_of_some_tenants_sees_no_queue_and_no_process_of_others(browser: Open, connection: Connection) -> None:
    op.started(connection, OperationId("globex", "x", "k"), queue="globex-payments")
    op.early(connection, OperationId("globex", "x", "k2"), queue="globex-mails")
    op.early(connection, OperationId("acme", "x", "k3"), queue="acme-mails")
    connection.execute(
        text(
            "INSERT INTO idempotency.processes (kind, name, host, pid, service, version, queues, started_at, seen_at)"
            " VALUES ('worker', 'globex-worker@h', 'h', 7, 'bank', '1', '{globex-orders}', now(), now())"
        )
    )
    tina, otto = browser("tina").get("/").text, browser("otto").get("/").text
    assert [name for name in ("globex-payments", "globex-mails", "globex-worker", "globex-orders") if name in otto] == [
        "globex-payments", "globex-mails", "globex-worker", "globex-orders",
    ]  # fmt: skip
    assert "globex" not in tina
    assert "acme-mails" in tina
    assert "No relay is running" not in tina


@pytest.mark.long
def test_what_others_have_counts_for_the_limit_and_a_count_that_stopped_there_says_so(
    browser: Open, connection: Connection
) -> None:
    """acme's own come after globex's: more than none, or more than one."""
    first = op.early(connection, OperationId("globex", "x", "g"), queue="payments")
    op.age(connection, first.id, available_at=60)
    many(connection, "g", BOUND)
    mine = op.early(connection, OperationId("acme", "x", "a"), queue="payments")
    op.age(connection, mine.id, available_at=600)
    page = browser("tina").get("/")
    assert figures(page, "payments") == "payments 0 0 ? ? 0 0+ 0 0 –"
    assert "Not all rows were looked at" in page.text
    op.completed(connection, OperationId("acme", "x", "ended"), queue="payments")
    many(connection, "ended", 50)
    connection.execute(
        text("UPDATE idempotency.records SET completed_at = now() - interval '30 minutes' WHERE key LIKE 'ended%'")
    )
    op.completed(connection, OperationId("globex", "x", "e"), queue="payments")
    many(connection, "e", BOUND)
    op.completed(connection, OperationId("acme", "x", "new"), queue="payments")
    browser("tina").client.app.state.desk.forget()
    assert re.fullmatch(r"payments 0 0 \? \? 0 0\+ 1\+ 0\+ \d+ s", figures(browser("tina").get("/"), "payments"))


@pytest.mark.long
def test_a_count_of_what_runs_that_stopped_at_its_limit_says_so(browser: Open, connection: Connection) -> None:
    op.started(connection, OperationId("acme", "x", "a"), queue="payments", token="t")
    many(connection, "a", BOUND - 2)
    otto = browser("otto")
    assert f" {BOUND - 1} " in figures(otto.get("/"), "payments")
    op.started(connection, OperationId("acme", "x", "b"), queue="payments", token="u")
    otto.client.app.state.desk.forget()
    assert f" {BOUND}+ " in figures(otto.get("/"), "payments")


@pytest.mark.long
def test_what_waits_for_its_caller_and_not_in_a_queue_is_no_work_of_a_queue(
    browser: Open, connection: Connection
) -> None:
    op.early(connection, OperationId("acme", "http", "a"), queue="http", message="")
    op.early(connection, OperationId("acme", "x", "b"), queue="payments")
    page = browser("otto").get("/")
    assert figures(page, "payments").split()[6] == "1"
    assert '<th scope="row" class="mono">http</th>' not in page.text


@pytest.mark.long
def test_a_silent_process_says_where_it_was_and_how_to_start_it_again(browser: Open, connection: Connection) -> None:
    """What the alert says is here, too: without it, the alarm cannot be ended by the page alone."""
    insert = (
        "INSERT INTO idempotency.processes (kind, name, host, pid, service, version, queues, started_at, seen_at, command, directory)"
        " VALUES ('beat', 'beat@h', 'web-1', 71, 'bank', '1', '{}', now(), now() - interval '3 hours', :command, '/srv/shop'),"
        " ('worker', 'w $(x)', 'web-2', 72, 'bank', '1', '{mails}', now(), now() - interval '3 hours', NULL, NULL),"
        " ('relay', 'r@h', 'web-3', 73, 'bank', '1', '{}', now(), now(), :relay, '/srv/shop')"
    )
    command = ["celery", "-A", "shop", "beat", "--scheduler", "redbeat.RedBeatScheduler"]
    relay = ["idempotency", "relay", "-A", "shop"]
    connection.execute(text(insert), {"command": command, "relay": relay})
    page = shown(browser("otto").get("/"))
    text_of = " ".join(page.split())
    assert "Look on web-1 whether pid 71 is there" in text_of
    assert (
        "in /srv/shop , by what starts your processes or by celery -A shop beat --scheduler redbeat.RedBeatScheduler"
        in text_of
    )
    assert "idempotency forget beat@h --reason WHY" in text_of
    # of older code, and with a name that a shell must not take apart
    assert "by celery -A yourapp worker --hostname 'w $(x)' --queues mails , of which the application" in text_of
    assert "idempotency forget 'w $(x)' --reason WHY" in text_of
    assert "started as idempotency relay -A shop in /srv/shop" in text_of
    assert "/srv/shop" not in browser("tina").get("/").text


def test_a_relay_that_was_killed_is_not_running(browser: Open, connection: Connection) -> None:
    insert = (
        "INSERT INTO idempotency.processes (kind, name, host, pid, service, version, queues, started_at, seen_at)"
        " VALUES ('relay', 'r@h', 'h', 7, 'bank', '1', '{}', now() - interval '9 hours', now() - interval '3 hours')"
    )
    connection.execute(text(insert))
    otto = browser("otto")
    assert "No relay is running" in otto.get("/").text
    connection.execute(text("UPDATE idempotency.processes SET seen_at = now()"))
    otto.client.app.state.desk.forget()
    assert "No relay is running" not in otto.get("/").text
