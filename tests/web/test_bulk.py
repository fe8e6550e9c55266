"""Replays of many letters: what is confirmed, what is said of them, and when they go no further."""

from __future__ import annotations

import re
import threading
from typing import Any

from celery import Celery
from sqlalchemy import Connection, text

from idempotency import IdempotentTask, PermanentError
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.operate.people import Person
from idempotency.web import bulk
from idempotency.web.bulk import Bulk
from tests.support.dead_messages import body_of, headers, publish
from tests.support.deliveries import Deliveries
from tests.support.processes import eventually
from tests.support.tasks import make_task
from tests.web.conftest import Browser, Open
from tests.web.test_changes import audited, confirm, deliver_all, letters, shown


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
    assert "Of 1 letter that matches" in first.text
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


def test_what_has_completed_has_not_failed_again(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """Another message under its key was rejected, which is a letter of its own with a higher number."""
    task = declining(bank)
    decline(task, deliveries, 1)
    deliveries.deliver(task, n=2, key="k01")
    assert [(row.reason, row.status) for row in letters(connection)] == [
        ("gone", "open"),
        ("fingerprint_mismatch", "open"),
    ]
    task.declined.clear()
    otto = browser("otto")
    address, of = begun(otto)
    otto.post("/bulk/next", of)
    assert "0 of 1 completed · 1 running" in said(otto, address)
    deliver_all(bank, deliveries, connection)
    assert "1 of 1 completed" in said(otto, address)
    assert "failed again as" in said(otto, address), "the column"
    assert "Stopped" not in said(otto, address)


def test_a_bulk_ends_also_when_what_has_completed_is_purged(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """A letter stays longer than its operation's record."""
    task = declining(bank)
    decline(task, deliveries, 0, 1)
    task.declined.clear()
    otto = browser("otto")
    address, of = begun(otto)
    otto.post("/bulk/next", of)
    deliver_all(bank, deliveries, connection)
    connection.execute(text("DELETE FROM idempotency.records WHERE key = 'k00'"))
    connection.execute(text("UPDATE idempotency.outbox SET settled_at = clock_timestamp() WHERE key = 'k00'"))
    assert "0 of 2 completed · 1 waiting · 1 purged" in said(otto, address)
    assert otto.post("/bulk/next", of).status_code == 303
    deliver_all(bank, deliveries, connection)
    connection.execute(text("DELETE FROM idempotency.dead_letters WHERE key = 'k00'"))
    told = said(otto, address)
    assert "Stopped" not in told, "nothing is left to send"
    assert ("1 of 2 completed · 1 gone" in told, "It is over" in told) == (True, True)


def test_a_bulk_is_shown_only_to_who_may_see_all_its_letters(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = declining(bank)
    decline(task, deliveries, 0, tenant="acme")
    decline(task, deliveries, 1, tenant="globex")
    task.declined.clear()
    otto, tina = browser("otto"), browser("tina")
    address, of = begun(otto, reason="globex is furious")
    for _ in range(2):
        answer = tina.get(address)
        assert (answer.status_code, "furious" in answer.text, "of 2" in answer.text) == (404, False, False)
        otto.post("/bulk/next", of)
        deliver_all(bank, deliveries, connection)
    connection.execute(text("DELETE FROM idempotency.dead_letters"))
    assert tina.get(address).status_code == 404
    assert "2 gone" in said(otto, address)


def test_a_bulk_goes_on_by_itself_only_where_its_last_stage_was_sent(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """Not where somebody opens its link, in another session of the same person, and not after a refusal."""
    task = declining(bank)
    decline(task, deliveries, *range(12))
    task.declined.clear()
    otto = browser("otto")
    address, of = begun(otto, goes_on="1")
    assert "data-submit" not in otto.get(address).text, "a person sends the first one"
    after = otto.post("/bulk/next", of).headers["location"]
    deliver_all(bank, deliveries, connection)
    assert 'data-submit="1"' in otto.get(after).text
    for other, link in ((otto, address), (browser("otto"), after), (browser("otto"), address)):
        page = other.get(link).text
        assert ("Replay the next 10" in page, "data-submit" in page) == (True, False)
    connection.execute(
        text("UPDATE idempotency.dead_letters SET reason = 'beyond_limit', fingerprint = NULL WHERE key = 'k05'")
    )
    after = otto.post("/bulk/next", of).headers["location"]
    assert "was refused" in otto.get(after).text
    deliver_all(bank, deliveries, connection)
    again = otto.get(after)
    assert ("Replay the next" in again.text, "data-submit" in again.text) == (True, False)


def test_two_who_send_a_stage_at_once_replay_each_letter_once(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = declining(bank)
    decline(task, deliveries, *range(12))
    task.declined.clear()
    one, two = browser("otto"), browser("otto")
    _, of = begun(one)
    one.post("/bulk/next", of)
    deliver_all(bank, deliveries, connection)
    sends = [
        threading.Thread(target=page.post, args=("/bulk/next", of), kwargs={"csrf": page.csrf()}) for page in (one, two)
    ]
    for each in sends:
        each.start()
    for each in sends:
        each.join()
    assert sorted(row.key for row in audited(connection, "replay")) == [f"k{n:02}" for n in range(11)]


def test_a_bulk_goes_no_further_once_nobody_knows_how_one_has_ended(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """The letter of one that failed again, and its first one, are purged meanwhile."""
    task = declining(bank)
    decline(task, deliveries, 0, 1, 2)
    otto = browser("otto")
    address, of = begun(otto)
    otto.post("/bulk/next", of)
    deliver_all(bank, deliveries, connection)
    assert "Stopped: 1 failed again" in said(otto, address)
    connection.execute(text("DELETE FROM idempotency.dead_letters WHERE key = 'k00'"))
    assert "Stopped: 1 are gone" in said(otto, address)
    assert otto.post("/bulk/next", of).status_code == 409


def test_who_has_fewer_tenants_by_now_sends_nothing_more(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = declining(bank)
    decline(task, deliveries, 0, tenant="globex")
    decline(task, deliveries, 1, 2, tenant="acme")
    otto = browser("otto")
    _, of = begun(otto)
    otto.post("/bulk/next", of)
    deliver_all(bank, deliveries, connection)
    narrower = Person("otto", "operator", bank.conf["idempotency_oidc_issuer"], tenants=frozenset({"acme"}))
    session = otto.client.app.state.desk.sessions.begin(narrower)
    otto.client.cookies.clear()
    otto.client.cookies.set("__Host-idempotency", session, domain="ops.test")
    assert otto.post("/bulk/next", of).status_code == 404
    assert len(audited(connection, "replay")) == 1


def test_letters_of_a_task_that_no_worker_knew_are_followed_to_the_end(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """Of a bad deploy: they name no operation, which only their replays do."""
    dead = f"{bank.conf.task_default_queue}-dead"
    death = {"x-death": [{"queue": bank.conf.task_default_queue, "reason": "rejected"}]}
    consumer = DeadLetterConsumer(bank)

    def stored() -> bool:
        consumer.run_once()
        return len(letters(connection)) == 2

    try:
        consumer.run_once()
        for account in ("u1", "u2"):
            publish(bank, body_of(account), queue=dead, headers=headers(task="web.soon") | death)
        eventually(stored, what="two letters")
    finally:
        consumer.close()

    @bank.task(base=IdempotentTask, bind=True, name="web.soon", key="{account}", shared=False)
    def soon(self: Any, account: str) -> str:
        return "ok"

    try:
        otto = browser("otto")
        address = otto.post("/bulk/begin", {"only_reason": "unknown_task", "reason": "deployed"}).headers["location"]
        of = dict(re.findall(r'name="(of)" value="([^"]*)"', otto.get(address).text))
        for completed in (1, 2):
            otto.post("/bulk/next", of)
            assert deliver_all(bank, deliveries, connection) == 1
            assert f"{completed} of 2 completed" in said(otto, address)
    finally:
        bank.tasks.pop("web.soon", None)
