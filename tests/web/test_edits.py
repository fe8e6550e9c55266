"""Edits of a dead letter's message on the page: masked until revealed, and of money approved by another person."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection

from idempotency import OperationId, PermanentError
from idempotency.application import runtime_of
from idempotency.operate import discard
from idempotency.operate.change import Change
from idempotency.operate.edit import edit
from idempotency.operate.people import Person
from idempotency.web import approvals
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.tasks import make_task
from tests.web.conftest import Open, tick
from tests.web.test_changes import audited, deliver_all, letters, shown

RIGHT = json.dumps({"kwargs": {"order_id": "o1", "cents": 500, "iban": "DE02120300000000202051"}})
WRONG: dict[str, Any] = {"order_id": "o1", "cents": 500, "iban": "DE00-not-one"}


def task_of(bank: Celery, **options: Any) -> Any:
    def pay(self: Any, order_id: str, cents: int, iban: str) -> str:
        if "-" in iban:
            raise PermanentError("no such account", "invalid_account")
        return iban[:2]

    return make_task(bank, pay, key="{order_id}", max_attempts=1, **options)


def test_an_operator_edits_a_message_and_replays_it(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = task_of(bank)
    deliveries.deliver(task, **WRONG, tenant="acme")
    (letter,) = letters(connection)
    tina, path = browser("tina"), f"/letters/{letter.id}"
    page = tina.get(path)
    assert f'action="{path}/edit"' in page.text
    assert "DE00-not-one" not in page.text
    assert "DE00" not in shown(page)  # its markup has random tokens
    revealed = html.unescape(tina.post(f"{path}/reveal", {"reason": "ticket 7"}).text)
    assert '"iban": "DE00-not-one"' in revealed.partition("<textarea")[2].partition("</textarea>")[0]

    stale = tina.post(f"{path}/edit", {"reason": "x", "payload": RIGHT, "shown": "of another message"})
    assert (stale.status_code, "another one than was shown" in stale.text) == (409, True)
    refused = tina.post(f"{path}/edit", {"reason": "x", "payload": RIGHT.replace("o1", "o2")})
    assert (refused.status_code, "another key" in refused.text, "DE02" in shown(refused)) == (409, True, False)
    assert tina.post(f"{path}/edit", {"reason": "typing error", "payload": RIGHT}).status_code == 303
    page = shown(tina.get(path))
    assert "edited: tina at" in page
    assert "••• text → ••• text" in page
    assert "DE0" not in page
    assert "DE00-not-one" in shown(tina.post(f"{path}/reveal", {"reason": "ticket 7"}))
    read = tick(tina.get(path))  # its code has refused it for good, as the warning says
    assert [row.details["dead_letter"] for row in audited(connection, "edit")] == [letter.id]
    assert tina.post(f"{path}/replay", {"reason": "corrected", "confirmed": read}).status_code == 303
    assert deliver_all(bank, deliveries, connection) == 1
    assert op.record(connection, OperationId("acme", task.name, "o1")).result == '"DE"'
    # the history stays
    assert "typing error" in shown(tina.get(path))
    assert f'action="{path}/edit"' not in tina.get(path).text


@pytest.mark.long
def test_of_money_another_person_approves_an_edit(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = task_of(bank, moves_money=True)
    deliveries.deliver(task, **WRONG, tenant="globex")
    (letter,) = letters(connection)
    path = f"/letters/{letter.id}"
    adam, anna, otto = browser("adam"), browser("anna"), browser("otto")
    assert browser("rita").post(f"{path}/edit", {"reason": "x", "payload": RIGHT}).status_code == 403
    assert adam.post(f"{path}/edit", {"reason": "typing error", "payload": RIGHT}).status_code == 303
    assert "'adam' has asked at" in shown(otto.get(path))
    waiting = anna.get("/approvals").text
    assert f'href="{path}"' in waiting.partition('id="edits"')[2]
    assert f'href="{path}"' not in browser("tina").get("/approvals").text, "of another tenant"
    form = anna.get(path).text.partition("Approve the edit")[2]
    asked = {"letter": str(letter.id), "edit": form.partition('name="edit" value="')[2].partition('"')[0]}
    assert "Approve what adam has asked for" in form
    assert "Approve the edit" not in adam.get(path).text
    assert otto.post("/approvals/approve-edit", asked).status_code == 403
    assert adam.post("/approvals/approve-edit", asked).status_code == 409
    assert anna.post("/approvals/approve-edit", asked | {"edit": "999"}).status_code == 409
    assert anna.post("/approvals/approve-edit", asked).status_code == 303
    assert "no edit waits" in anna.get("/approvals").text
    assert "edited: adam at" in shown(otto.get(path))
    assert [row.actor for row in audited(connection, "edit_approved")] == ["anna"]


@pytest.mark.long
def test_edits_that_wait_are_in_pages(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approvals, "ROWS", 2)
    task = task_of(bank, moves_money=True)
    asks = Person("otto", "operator", bank.conf["idempotency_oidc_issuer"])
    for number in range(3):
        deliveries.deliver(task, **{**WRONG, "order_id": f"order-{number}"}, tenant="acme")
    for letter in op.dead_letters(connection):
        right = json.dumps({"kwargs": {**WRONG, "order_id": letter.key, "iban": "DE02"}})
        edit(bank, letter.id, right, Change("otto", "typo", is_verified=True), person=asks)
        with runtime_of(bank).engine.begin() as transaction:
            discard.request(transaction, asks, letter.id, "given up")
    olga = browser("olga")
    page = olga.get("/approvals").text
    discards, edits = page.split('id="edits"')
    assert [f"order-{number}" in edits for number in range(3)] == [False, True, True]
    (older,) = re.findall(r'href="(/approvals[^"]*#edits)"', edits)
    discards, edits = olga.get(html.unescape(older)).text.split('id="edits"')
    assert [f"order-{number}" in edits for number in range(3)] == [True, False, False]
    assert "Older ones" not in edits
    assert [f"order-{number}" in discards for number in range(3)] == [False, True, True]
    (older,) = re.findall(r'href="(/approvals[^"]*)"[^>]*>Older ones', discards)
    discards, edits = olga.get(html.unescape(older)).text.split('id="edits"')
    for part in (discards, edits):
        assert [f"order-{number}" in part for number in range(3)] == [True, False, False]


@pytest.fixture
def waits(bank: Celery, deliveries: Deliveries, connection: Connection) -> Any:
    """The letter of a refund of 50,000 cents, of which somebody has said that it should be of 500; and what has run since, by amount."""
    ran: list[int] = []
    is_broken = [True]

    def refund(self: Any, order_id: str, cents: int) -> int:
        if is_broken[0]:
            raise ValueError("the provider is away")
        ran.append(cents)
        return cents

    task = make_task(bank, refund, key="{order_id}", max_attempts=1, moves_money=True)
    deliveries.deliver(task, order_id="o1", cents=50_000)
    (letter,) = letters(connection)
    adam = Person("adam", "operator", bank.conf["idempotency_oidc_issuer"])
    right = json.dumps({"kwargs": {"order_id": "o1", "cents": 500}})
    edit(bank, letter.id, right, Change("adam", "a hundred times too much", is_verified=True), person=adam)
    is_broken[0] = False
    task.letter, task.ran, task.is_broken = letter.id, ran, is_broken
    return task


@pytest.mark.long
def test_a_bulk_leaves_out_what_somebody_has_asked_to_edit(
    browser: Open, waits: Any, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    otto = browser("otto")
    asked = {"only_task": waits.name, "reason": "the provider is back"}
    refused = otto.post("/bulk/begin", asked)
    assert refused.status_code == 409
    assert "1 letter that somebody has asked to edit: approve the edit, or replay it alone" in shown(refused)
    waits.is_broken[0] = True
    deliveries.deliver(waits, order_id="o2", cents=7)
    waits.is_broken[0] = False
    address = otto.post("/bulk/begin", asked).headers["location"]
    assert "Left out: 1 letter that somebody has asked to edit" in shown(otto.get(address))
    (of,) = re.findall(r'name="of" value="([^"]*)"', otto.get(address).text)
    otto.post("/bulk/next", {"of": of})
    assert deliver_all(bank, deliveries, connection) == 1
    assert waits.ran == [7]


@pytest.mark.long
def test_a_bulk_passes_over_what_somebody_has_asked_to_edit_since_it_was_begun(
    browser: Open, waits: Any, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    connection.exec_driver_sql("CREATE TEMP TABLE later AS SELECT * FROM idempotency.letter_edits")
    connection.exec_driver_sql("DELETE FROM idempotency.letter_edits")
    otto = browser("otto")
    address = otto.post("/bulk/begin", {"only_task": waits.name, "reason": "back"}).headers["location"]
    (of,) = re.findall(r'name="of" value="([^"]*)"', otto.get(address).text)
    connection.exec_driver_sql("INSERT INTO idempotency.letter_edits OVERRIDING SYSTEM VALUE SELECT * FROM later")
    after = otto.post("/bulk/next", {"of": of}).headers["location"]
    assert f"0 replayed. Letter {waits.letter} was refused" in shown(otto.get(after))
    assert "'adam' has asked" in shown(otto.get(after))
    assert deliver_all(bank, deliveries, connection) == 0


@pytest.mark.long
def test_a_replay_without_the_edit_that_waits_takes_a_word_of_its_own(
    browser: Open, waits: Any, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    otto, path = browser("otto"), f"/letters/{waits.letter}"
    page = otto.get(path)
    assert "a replay sends the message without the edit, with the arguments that were found to be wrong" in shown(page)
    assert 'name="confirmed"' not in page.text, "nothing else of it is to be confirmed"
    (tick,) = re.findall(r'name="unedited" value="([^"]+)"', page.text)
    for said in ("", "another"):
        refused = otto.post(f"{path}/replay", {"reason": "back", "unedited": said})
        assert (refused.status_code, "'adam' has asked" in shown(refused)) == (409, True)
    assert deliver_all(bank, deliveries, connection) == 0
    assert otto.post(f"{path}/replay", {"reason": "adam was wrong", "unedited": tick}).status_code == 303
    assert deliver_all(bank, deliveries, connection) == 1
    assert waits.ran == [50_000]
