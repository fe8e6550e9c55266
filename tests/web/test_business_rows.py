"""Rows of the application on an operation's timeline: masked, bounded, read only, and never in the way of the page."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from idempotency.errors import SettingsError
from idempotency.web import business
from idempotency.web.application import create_app
from idempotency.web.business import BusinessRow, Described
from tests.support import bank as b
from tests.support.deliveries import Deliveries
from tests.support.documents import python_blocks
from tests.support.operations import at_once
from tests.support.processes import eventually
from tests.web.conftest import Browser, Open
from tests.web.test_changes import audited, shown

NAMED = {"tenant": "acme", "task": b.deposit.name, "key": "a1"}
RowsOf = Callable[[Session, Described], Any]

# What the application's function is in a test; the setting names `rows_of` below.
_given: list[RowsOf] = []


def rows_of(session: Session, operation: Described) -> Any:
    return _given[-1](session, operation)


@pytest.fixture
def page(
    configure: Callable[..., None], browser: Open, bank: Celery, deliveries: Deliveries, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[RowsOf], Browser]]:
    """The page of an operation with this function of the application."""
    deliveries.deliver(b.deposit, "a1", 12, tenant="acme")

    def opened(function: RowsOf) -> Browser:
        _given.append(function)
        found = browser("tina")
        desk: Any = found.client.app.state.desk
        desk.business.close()
        settings = desk.settings.model_copy(update={"business_rows": f"{__name__}:rows_of"})
        desk.business = business.BusinessRows(settings)
        return found

    yield opened
    _given.clear()


def entries(session: Session, operation: Described) -> Iterator[BusinessRow]:
    for row in session.execute(text("SELECT * FROM entries WHERE account = :account"), {"account": operation.key}):
        yield BusinessRow("entry", {"account": row.account, "amount": row.amount}, datetime(2020, 1, 1, tzinfo=UTC))
    yield BusinessRow("balance", {"of": operation.arguments["account"], "is_open": True, "parts": [1, 2]})


@pytest.mark.long
def test_rows_are_on_the_timeline_by_their_time_and_masked(
    page: Callable[[RowsOf], Browser], connection: Connection
) -> None:
    browser = page(entries)
    answer = browser.get("/operation", params=NAMED)
    found = " ".join(shown(answer).split())
    timeline = found.partition("Timeline")[2]
    assert timeline.index("2020-01-01 00:00:00 entry account ••• text; amount ••• number") < timeline.index(
        "first claimed"
    )
    assert timeline.index("balance of ••• text; is_open •••; parts ••• list of 2") > timeline.index("ended after")
    revealed = " ".join(shown(browser.post("/operation/reveal", NAMED | {"reason": "ticket 7"})).split())
    assert "entry account a1; amount 12" in revealed
    assert [row.reason for row in audited(connection, "reveal")] == ["ticket 7"]


@pytest.mark.long
def test_what_is_shown_of_them_is_bounded_and_escaped(page: Callable[[RowsOf], Browser]) -> None:
    made = []

    def many(session: Session, operation: Described) -> Iterator[BusinessRow]:
        while True:
            made.append(1)
            yield BusinessRow("<b>row\n</b>" + "x" * 200, {"\u202e" + "n" * 200: 1})

    answer = page(many).get("/operation", params=NAMED)
    assert answer.text.count("&lt;b&gt;row") == business.MOST
    assert len(made) == business.MOST + 1
    assert "<b>row" not in answer.text
    assert "x" * 80 not in answer.text
    assert "\u202e" not in answer.text
    assert f"The first {business.MOST} of the application&#39;s rows are shown; there are more." in answer.text


def write(session: Session, operation: Described) -> list[BusinessRow]:
    session.execute(text("INSERT INTO entries (account, amount) VALUES ('stolen', 1)"))
    session.commit()
    return []


def write_all_the_same(session: Session, operation: Described) -> list[BusinessRow]:
    session.execute(text("SET TRANSACTION READ WRITE"))
    return write(session, operation)


def sleep_in_postgres(session: Session, operation: Described) -> list[BusinessRow]:
    session.execute(text("SELECT pg_sleep(60)"))
    return []


def leak(session: Session, operation: Described) -> list[BusinessRow]:
    raise ValueError(f"iban of {operation.key}: DE02120300000000202051")


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (write, "raised OperationalError"),  # as of a standby, to this library
        (write_all_the_same, "raised InternalError"),
        (sleep_in_postgres, "raised OperationalError"),
        (leak, "raised ValueError"),
        (lambda session, operation: ["a row"], "raised TypeError"),
        (lambda session, operation: [BusinessRow("x", at=datetime(2020, 1, 1))], "raised ValueError"),  # noqa: DTZ001
        (lambda session, operation: None, "raised TypeError"),
    ],
)
def test_a_function_that_fails_is_a_sentence(
    page: Callable[[RowsOf], Browser],
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    function: RowsOf,
    why: str,
) -> None:
    monkeypatch.setattr(business, "STATEMENT", 100)
    answer = page(function).get("/operation", params=NAMED)
    assert answer.status_code == 200
    assert "first claimed" in answer.text
    assert "rows are not shown" in answer.text
    assert why in answer.text
    assert "DE02" not in answer.text
    assert connection.execute(text("SELECT account FROM entries")).scalars().all() == ["a1"]


@pytest.mark.long
def test_a_function_that_is_slow_is_a_sentence_and_takes_no_more_threads(
    page: Callable[[RowsOf], Browser], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(business, "PATIENCE", 0.1)
    monkeypatch.setattr(business, "AT_ONCE", 1)
    browser = page(lambda session, operation: time.sleep(1.5))
    assert "did not answer within 0.1 s" in browser.get("/operation", params=NAMED).text
    assert "still busy with other operations" in browser.get("/operation", params=NAMED).text


def test_no_more_functions_run_at_once_than_may_and_none_keeps_its_place(
    page: Callable[[RowsOf], Browser], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(business, "AT_ONCE", 2)
    running: list[None] = []
    most: list[int] = []
    both = threading.Event()

    def count(session: Session, operation: Described) -> list[BusinessRow]:
        running.append(None)
        most.append(len(running))
        if len(running) == 2:
            both.set()
        both.wait(1)  # a busy machine may begin the second late
        time.sleep(0.002)
        running.pop()
        return []

    desk: Any = page(count).client.app.state.desk
    asked = Described(**NAMED)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        found = at_once(8, lambda _: [desk.business.of(asked).why for _ in range(25)])
    finally:
        sys.setswitchinterval(interval)
    assert max(most) == 2
    busy = "The application's rows are not shown: its function is still busy with other operations."
    assert {why for each in found for why in each} == {None, busy}
    eventually(lambda: desk.business.of(asked).why is None, what="a place is free again")


@pytest.mark.long
def test_without_a_function_the_page_says_how_there_would_be_rows(browser: Open, deliveries: Deliveries) -> None:
    deliveries.deliver(b.deposit, "a1", tenant="acme")
    assert "idempotency_business_rows" in browser("tina").get("/operation", params=NAMED).text


@pytest.mark.parametrize(
    ("name", "why"), [("tests.nowhere:rows_of", "No module named"), (f"{__name__}:gone", "has no attribute"), (f"{__name__}:NAMED", "is no function")]
)  # fmt: skip
def test_a_name_of_no_function_is_refused_when_the_page_starts(
    configure: Callable[..., None], bank: Celery, name: str, why: str
) -> None:
    configure(business_rows=name)
    with pytest.raises(SettingsError, match=why):
        create_app(bank)


def test_the_example_of_the_page_runs(connection: Connection) -> None:
    (example,) = python_blocks("docs/web.md")
    names: dict[str, Any] = {}
    exec(example, names)
    connection.execute(text("CREATE TEMP TABLE payments (id text, status text, amount int, created_at timestamptz)"))
    connection.execute(text("INSERT INTO payments VALUES ('p1', 'captured', 500, now()), ('p2', 'failed', 1, now())"))
    asked = [Described("acme", task, "p1", {"payment_id": "p1"}) for task in ("payments.capture", "mails.send")]
    (row,), nothing = (list(names["rows_of"](Session(connection), operation)) for operation in asked)
    assert (row.title, row.fields) == ("payment", {"status": "captured", "amount": 500})
    assert row.at.tzinfo is not None
    assert nothing == []


class Unshowable:
    """As a row of a model is whose session is closed."""

    def __str__(self) -> str:
        raise RuntimeError("detached")


def cancelled(session: Session, operation: Described) -> Any:
    raise asyncio.CancelledError


def leaves(session: Session, operation: Described) -> Any:
    sys.exit(1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda session, operation: [BusinessRow("x", None)], "TypeError"),  # type: ignore[arg-type]
        (lambda session, operation: [BusinessRow(Unshowable())], "RuntimeError"),  # type: ignore[arg-type]
        (lambda session, operation: [BusinessRow("x", {Unshowable(): 1})], "RuntimeError"),  # type: ignore[dict-item]
        (lambda session, operation: [BusinessRow("x", {"a": Unshowable()})], "RuntimeError"),
        (
            lambda session, operation: [
                BusinessRow("x", at=datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))))
            ],
            "OverflowError",
        ),
        (cancelled, "Exited"),
        (leaves, "Exited"),
    ],
    ids=["no fields", "title", "name", "value", "time", "cancelled", "exit"],
)
def test_what_cannot_be_shown_or_ends_a_process_is_a_sentence(
    page: Callable[[RowsOf], Browser], function: RowsOf, error: str
) -> None:
    browser = page(function)
    for answer in (browser.get("/operation", params=NAMED), browser.post("/operation/reveal", NAMED | {"reason": "t"})):
        assert answer.status_code == 200
        assert f"rows are not shown: its function raised {error}." in answer.text


@pytest.mark.long
def test_no_transaction_of_the_function_writes(page: Callable[[RowsOf], Browser], connection: Connection) -> None:
    def write(session: Session, operation: Described) -> Any:
        session.rollback()
        session.execute(text("SET TRANSACTION READ WRITE"))
        session.execute(text("INSERT INTO entries (account, amount) VALUES ('stolen', 1)"))
        session.commit()
        return []

    assert "its function raised" in page(write).get("/operation", params=NAMED).text
    assert "stolen" not in connection.execute(text("SELECT account FROM entries")).scalars().all()


NEVER_ENDS = """
import sys, time
from idempotency.settings import Settings
from idempotency.web import business
business.PATIENCE = 0.2
business.BusinessRows._ask = lambda *_: time.sleep(60)
rows = business.BusinessRows(Settings.read({"database_url": sys.argv[1], "business_rows": "os:getcwd"}))
print(rows.of(business.Described("t", "k", "1")).why)
rows.close()
"""


@pytest.mark.long
def test_a_function_that_never_ends_keeps_no_process_from_ending(database: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEVER_ENDS, database], capture_output=True, text=True, timeout=40, check=False
    )
    assert (done.returncode, "did not answer within" in done.stdout) == (0, True), done.stderr
