"""Two applications on one database: each page is of one of them, and says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text

from idempotency.application import close_runtime
from idempotency.web.application import create_app
from idempotency.wire.keys import OperationId
from tests.support import operations as op
from tests.support.asgi import Client
from tests.web.test_changes import shown

TASK = "mail.receipt"
TABLES = {"records": "service", "outbox": "service", "dead_letters": "consumer_service"}


@pytest.fixture
def pages(bank: Celery, connection: Connection) -> Iterator[dict[str, Client]]:
    """The page of each, over an operation, a row, a letter and a relay of each; the bank's relay is silent."""
    shop = Celery("shop", set_as_current=False, broker=bank.conf.broker_url)
    shop.conf.update(idempotency_database_url=bank.conf["idempotency_database_url"])
    for number, service in enumerate(("bank", "shop")):
        op.failed(connection, OperationId("acme", TASK, f"{service}-failed"), queue=f"{service}-mails")
        op.early(connection, OperationId("acme", TASK, f"{service}-waits"), queue=f"{service}-mails")
        connection.execute(
            text(
                "INSERT INTO idempotency.processes (kind, name, host, pid, service, version, queues, started_at, seen_at)"
                " VALUES ('relay', :service || '-relay@h', 'h', 7, :service, '1', '{}', now(),"
                " clock_timestamp() - make_interval(mins => 10 * (1 - :number)))"
            ),
            {"service": service, "number": number},
        )
        for table, column in TABLES.items():
            named = text(f"UPDATE idempotency.{table} SET {column} = :service WHERE key LIKE :service || '-%'")
            connection.execute(named, {"service": service})
    with ExitStack() as stack:
        stack.callback(close_runtime, shop)
        found = {}
        for app in (bank, shop):
            served = create_app(app)
            stack.callback(served.state.desk.close)
            found[app.main] = Client(served, "http://127.0.0.1:8500")
            stack.callback(found[app.main].close)
        yield found


@pytest.mark.long
def test_a_page_is_of_one_application_and_names_the_others(pages: dict[str, Any]) -> None:
    for own, other in (("bank", "shop"), ("shop", "bank")):
        page = pages[own]
        for path in (
            "/operations?stage=ended",
            "/operations?stage=accepted",
            "/letters?status=all",
            "/failures",
            "/doubts",
        ):
            seen = page.get(path)
            assert seen.status_code == 200
            assert f"{other}-" not in shown(seen), (own, path)
            assert re.search(r'<strong class="service"[^>]*>' + own, seen.text), path
        assert f"{own}-failed" in shown(page.get("/operations?stage=ended"))
        flow = " ".join(shown(page.get("/")).split())
        assert (f"{own}-relay" in flow, f"{other}-relay" in flow) == (True, False)
        assert f"This page is of {own} alone" in flow
        for address in (f"/operation?tenant=acme&task={TASK}&key={other}-failed", f"/operations?key={other}-failed"):
            assert "there is none" in shown(page.get(address)) or "No operation that you may see" in shown(
                page.get(address)
            )


def test_what_runs_of_another_application_is_said(pages: dict[str, Any]) -> None:
    assert "shop : its relay is running; 0 rows due" in " ".join(shown(pages["bank"].get("/")).split())
    assert "bank : no relay of it is running; 0 rows due" in " ".join(shown(pages["shop"].get("/")).split())
