"""Lists of the page: nothing of other applications, and each row on one page."""

from __future__ import annotations

import html
import re
from dataclasses import asdict
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text

from idempotency.application import runtime_of
from idempotency.sagas import observe, saga
from idempotency.store import letter_pages, operation_pages
from idempotency.store.visible import parameters
from idempotency.wire.keys import OperationId
from tests.support import bank as b
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.web.conftest import Open


def test_the_tenants_of_another_application_are_not_listed(browser: Open, connection: Connection) -> None:
    op.completed(connection, OperationId("secret-customer-of-shop", "shop.pay", "k"))
    connection.execute(text("UPDATE idempotency.records SET service = 'shop'"))
    op.completed(connection, OperationId("acme", "shop.pay", "k"))
    op.completed(connection, OperationId("secret-customer-of-shop-too", "bank.pay", "k"))
    connection.execute(text("UPDATE idempotency.records SET service = 'bank' WHERE service IS DISTINCT FROM 'shop'"))
    page = browser("otto").get("/tenants").text
    names = re.findall(r'<th scope="row">([^<]+)</th>', page)
    assert names == ["acme", "secret-customer-of-shop-too"]


def test_sagas_of_one_moment_are_each_on_one_page(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    @saga("web.trip2", key="{name}", entity="name", events={"picked": "{name}"}, app=bank)
    def trip(saga: Any, name: str) -> None:
        saga.wait_for("picked", match=name, timeout=3600.0)

    deliveries.deliver(trip, "s")
    connection.execute(
        text(
            "INSERT INTO idempotency.sagas SELECT (jsonb_populate_record(g, jsonb_build_object('id', gen_random_uuid(), 'key',"
            " 'trip-' || n))).* FROM idempotency.sagas g, generate_series(1, 59) n WHERE g.key = 's'"
        )
    )
    otto, seen, at = browser("otto"), [], "/sagas"
    for _ in range(4):
        page = otto.get(at).text
        seen += re.findall(r'title="([^"]+)"', page)
        following = re.search(r'rel="next" href="([^"]+)"', page)
        if following is None:
            break
        at = html.unescape(following[1])
    assert (len(seen), len({*seen})) == (60, 60)
    assert otto.get("/sagas?before=2026-01-01|x").status_code == 409


def test_the_page_of_a_process_that_an_observer_has_noted_is_there(
    browser: Open, bank: Celery, connection: Connection
) -> None:
    with runtime_of(bank).engine.begin() as own:
        observe(own, "placement", "order-7", "requested", None, status="RUNNING", app=bank)
    otto = browser("otto")
    found = re.search(r'href="(/saga\?[^"]+)"', otto.get("/sagas").text)
    assert found is not None
    path = html.unescape(found[1])
    answer = otto.get(path)
    assert (answer.status_code, "order-7" in answer.text, "requested" in answer.text) == (200, True, True)
    assert browser("tina").get(path).status_code == 404, "another tenant's"


def test_failures_that_were_not_all_counted_say_so(
    browser: Open, deliveries: Deliveries, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        deliveries.deliver(b.failing, f"a{number}", "permanent")
    monkeypatch.setattr(letter_pages, "BOUND", 6)
    assert "letters were counted" not in browser("otto").get("/failures").text
    monkeypatch.setattr(letter_pages, "BOUND", 3)
    page = browser("otto").get("/failures").text
    assert '<td class="number">3+</td>' in page
    assert "Only 3 open letters were counted" in page


def test_a_key_that_was_not_looked_for_everywhere_is_not_said_to_be_absent(
    browser: Open, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tenant in ("acme", "zeta"):
        op.failed(connection, OperationId(tenant, "tests.support.bank.deposit", f"key-of-{tenant}"))
    otto = browser("otto")
    assert otto.get("/operations?key=key-of-zeta").status_code == 303
    assert "among those that were looked at" not in otto.get("/operations?key=nothing").text
    monkeypatch.setattr(operation_pages, "KINDS", 1)
    page = otto.get("/operations?key=key-of-zeta")
    assert (page.status_code, "among those that were looked at" in page.text) == (200, True)
    assert otto.get("/operations?key=key-of-acme").status_code == 303


def test_what_a_tenant_has_accepted_is_found_behind_that_of_others(
    browser: Open, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    b.enqueue_deposit()
    copy = (
        "INSERT INTO idempotency.outbox OVERRIDING SYSTEM VALUE SELECT (jsonb_populate_record(o, jsonb_build_object('id', o.id + n,"
        " 'key', cast(:key AS text) || n, 'tenant', cast(:tenant AS text), 'message_id', gen_random_uuid()::text))).*"
        " FROM idempotency.outbox o, generate_series(cast(:first AS int), cast(:last AS int)) n"
        " WHERE o.id = (SELECT min(id) FROM idempotency.outbox)"
    )
    connection.execute(text(copy), {"key": "g", "tenant": "globex", "first": 1, "last": 25})
    connection.execute(text(copy), {"key": "mine", "tenant": "acme", "first": 60, "last": 60})
    monkeypatch.setattr(operation_pages, "WINDOW", 10)
    tina, at, pages = browser("tina"), "/operations?stage=accepted", 0
    while "mine60" not in (page := tina.get(at).text):
        following = re.search(r'rel="next" href="([^"]+)"', page)
        assert following is not None
        at, pages = html.unescape(following[1]), pages + 1
    assert pages == 2


# ---------------------------------------------------------------- the archive


def test_letters_are_archived_and_restored_on_the_page(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    for account in ("a1", "a2", "a3"):
        deliveries.deliver(b.failing, account, "permanent", tenant="acme")
    first, second, third = (row.id for row in op.dead_letters(connection))
    page = browser("tina")
    assert page.post(f"/letters/{first}/archive", {"reason": "a test account"}).status_code == 303
    shown = page.get(f"/letters/{first}").text
    assert "a test account" in shown
    assert "restore it first" in shown
    assert f'action="/letters/{first}/replay"' not in shown
    assert page.post(f"/letters/{first}/replay", {"reason": "x"}).status_code == 409

    form = {"reason": "later", "only_task": b.failing.name, "request_id": "r1"}
    answer = page.post("/letters/archive", form)
    assert answer.status_code == 303
    assert "no letter matches" in page.get("/letters").text
    assert "no open dead letter" in page.get("/failures").text
    archived = page.get("/letters?status=archived").text
    assert all(f'href="/letters/{each}"' in archived for each in (first, second, third))
    # a bulk replay leaves them alone
    assert "no open letter matches" in page.post("/bulk/begin", {"reason": "x", "only_task": b.failing.name}).text

    fields = {"reason": "now", "only_task": b.failing.name, "only_status": "archived"}
    assert page.post("/letters/restore", fields).status_code == 303
    assert f'href="/letters/{third}"' in page.get("/letters").text
    assert "no letter matches" in page.get("/letters?status=archived").text
    # the old form once more: what it has archived before was restored since
    told = page.get(page.post("/letters/archive", form).headers["location"]).text
    assert "1 dead letter is archived; 2 refused" in told
    assert "and restored since" in told
    # all at once only by a filter, and not by a reader
    assert page.post("/letters/archive", {"reason": "later"}).status_code == 409
    assert browser("rita").post(f"/letters/{first}/archive", {"reason": "x"}).status_code == 403


@pytest.mark.long
def test_counting_failures_reads_no_archived_letter(connection: Connection) -> None:
    """However many there are: they are for later."""
    connection.execute(
        text(
            "INSERT INTO idempotency.dead_letters (source, tenant, task, key, reason, consumer_service, payload, archived_at, archived_by)"
            " SELECT 'operation', 'default', 't', 'k' || n, 'gone', 'bank', '{}', CASE WHEN n > 3 THEN now() END, 'ann'"
            " FROM generate_series(1, 30000) n"
        )
    )
    connection.execute(text("VACUUM ANALYZE idempotency.dead_letters"))
    only = letter_pages.Letters(reason="gone")
    fields = parameters("bank", None, limit=100, bound=letter_pages.BOUND) | asdict(only)
    for statement in (letter_pages._GROUPS, letter_pages._PAGE, letter_pages._IDS):
        query = f"EXPLAIN (ANALYZE, FORMAT JSON) {statement.format(conditions=only.conditions())}"
        (plan,) = connection.exec_driver_sql(query, fields).scalar_one()
        scans = [node for node in nodes(plan["Plan"]) if "Relation Name" in node]
        assert sum(node["Actual Rows"] for node in scans) == 3
        assert sum(node.get("Rows Removed by Filter", 0) for node in scans) == 0, plan
    assert [row.letters for row in letter_pages.groups(connection, "bank", None, limit=100)] == [3]


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """A plan and all that is below it."""
    return [plan, *(found for below in plan.get("Plans", []) for found in nodes(below))]
