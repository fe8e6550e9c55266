"""Replays of many letters: what is confirmed, what is said of them, and when they go no further."""

from __future__ import annotations

import re
from typing import Any

from celery import Celery
from sqlalchemy import Connection

from idempotency import PermanentError
from idempotency.web import bulk
from idempotency.web.bulk import Bulk
from tests.support.deliveries import Deliveries
from tests.support.tasks import make_task
from tests.web.conftest import Browser, Open
from tests.web.test_changes import audited, confirm, deliver_all, shown


def declining(bank: Celery) -> Any:
    """A task that ends by the reason that `declined` has for its number."""

    def body(self: Any, n: int) -> str:
        if n in reasons:
            raise PermanentError("no", reasons[n])
        return "ok"

    reasons: dict[int, str] = {}
    task = make_task(bank, body)
    task.declined = reasons
    return task


def decline(task: Any, deliveries: Deliveries, *numbers: int, tenant: str = "default") -> None:
    """End the operations `k00`, `k01` … so."""
    for n in numbers:
        task.declined[n] = "gone"
        deliveries.deliver(task, n=n, key=f"k{n:02}", tenant=tenant)


def begun(page: Browser, **fields: str) -> tuple[str, dict[str, str]]:
    """Begin a bulk with its warnings read. Returns its address, and the fields of its form."""
    first = page.post("/bulk/begin", {"only_reason": "gone", "reason": "again"} | fields)
    assert first.status_code == 200, first.text
    address = confirm(page, first).headers["location"]
    found = re.search(r'name="of" value="([^"]*)"', page.get(address).text)
    assert found is not None
    return address, {"of": found[1]}


def said(page: Browser, address: str) -> str:
    """What the page of a bulk says."""
    return re.sub(r"\s+", " ", shown(page.get(address)))


def test_only_what_a_person_has_read_is_confirmed(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """Not what matches once the form comes back."""
    task = declining(bank)
    decline(task, deliveries, 1)
    otto = browser("otto")
    first = otto.post("/bulk/begin", {"only_reason": "gone", "reason": "again"})
    assert "Of 1 letters" in first.text
    decline(task, deliveries, 2)
    address = confirm(otto, first).headers["location"]
    assert "0 of 1 completed" in said(otto, address)
    task.declined.clear()
    of = re.findall(r'name="(of)" value="([^"]*)"', otto.get(address).text)
    for _ in range(2):
        otto.post("/bulk/next", dict(of))
        deliver_all(bank, deliveries, connection)
    assert [row.key for row in audited(connection, "replay")] == ["k01"]


def test_all_warnings_are_shown_before_they_are_confirmed(browser: Open, bank: Celery, deliveries: Deliveries) -> None:
    decline(declining(bank), deliveries, *range(30))
    first = browser("otto").post("/bulk/begin", {"only_reason": "gone", "reason": "again"})
    assert [n for n in range(30) if f"k{n:02}" not in first.text] == []


def test_what_was_chosen_is_of_the_person_who_was_shown_it(browser: Open, bank: Celery, deliveries: Deliveries) -> None:
    decline(declining(bank), deliveries, 1)
    first = browser("otto").post("/bulk/begin", {"only_reason": "gone", "reason": "again"})
    refused = confirm(browser("olga"), first)
    assert (refused.status_code, "choose again" in shown(refused)) == (409, True)


def test_the_address_of_the_largest_bulk_fits_into_a_buffer_of_a_proxy(browser: Open) -> None:
    desk = browser("otto").client.app.state.desk
    ids = list(range(10_345_000, 10_345_000 + 7 * bulk.MOST, 7))
    largest = Bulk("f" * 32, ids, "otto", "again " * 20, frozenset(), goes_on=True)
    of = largest.signed(desk)
    assert len(of) < bulk.LONGEST
    assert Bulk.of(desk, of) == largest
