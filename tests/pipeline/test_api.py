"""The application over HTTP, on real servers: what is sent twice happens once, and the books agree."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import pytest
import requests
from sqlalchemy import text
from sqlalchemy.orm import Session

from idempotency.operate.change import Change
from idempotency.operate.people import add_operator
from sandbox import ledger
from tests.support import crashing
from tests.support.api import ORDER, PAYMENT, WAIT, Api, forget, new_key, problem, running
from tests.support.documents import ROOT
from tests.support.operations import at_once, in_background, wait_for_a_lock
from tests.support.processes import START_WITHIN, eventually
from tests.support.server import api_key, client

COUNTED = ("payments", "refunds", "orders", "returns", "idempotency.outbox")


@pytest.fixture(scope="module")
def api(servers: Any, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with running(servers, template, tmp_path_factory.mktemp("shop")) as api:
        yield api


# ---------------------------------------------------------------- bad inputs, by their numbers


@dataclass(frozen=True)
class Bad:
    """A request that is refused: its headers and its body, the status, the problem, and what the detail names."""

    status: int
    type: str
    names: str
    path: str = "/payments"
    body: Any = None
    headers: Any = ()
    key: Any = "good"


def _of(field: str, value: Any, path: str = "/payments", names: str | None = None) -> Bad:
    base = {"/payments": PAYMENT, "/orders": ORDER, "/refunds": REFUND, "/returns": RETURN}[path]
    return Bad(400, "invalid", names or field, path, {**base, field: value})


REFUND = {"payment_id": "p", "amount": 1, "reason": "r"}
RETURN = {"order_id": "o", "reason": "r"}
BAD = {
    "01-no key": Bad(400, "idempotency_key_missing", "Idempotency-Key", key=None),
    "02-empty key": Bad(400, "idempotency_key_invalid", "Idempotency-Key", key=""),
    "02-blank key": Bad(400, "idempotency_key_invalid", "Idempotency-Key", key='" "'),
    "03-long key": Bad(400, "idempotency_key_invalid", "at most 255 characters, got 256", key="k" * 256),
    "04-tab in a key": Bad(400, "idempotency_key_invalid", "position 1", key="a\tb"),
    "04-umlaut in a key": Bad(400, "idempotency_key_invalid", "position 1", key="aäb".encode()),
    "05-a list of keys": Bad(400, "idempotency_key_invalid", "comma", key="a,b"),
    "05-two keys": Bad(400, "idempotency_key_invalid", "one header", headers=[("Idempotency-Key", "other")]),
    "11-member twice": Bad(400, "body_malformed", "twice", body=b'{"amount":1,"amount":2}'),
    "11-NaN": Bad(400, "body_malformed", "NaN", body=b'{"amount":NaN}'),
    "11-infinity": Bad(400, "body_malformed", "infinity", body=b'{"amount":-Infinity}'),
    "11-1e999": Bad(400, "body_malformed", "range", body=b'{"amount":1e999}'),
    "11-half a pair": Bad(400, "body_malformed", "surrogate", body=b'{"customer_id":"\\ud800"}'),
    "11-NUL": Bad(400, "body_malformed", "U+0000", body=b'{"customer_id":"\\u0000"}'),
    "11-not UTF-8": Bad(400, "body_malformed", "UTF-8", body=b'{"customer_id":"\xff"}'),
    "11-depth 1000": Bad(400, "body_malformed", "deep", body=b"[" * 1000 + b"]" * 1000),
    "11-digits": Bad(400, "body_malformed", "digits", body=b'{"amount":' + b"9" * 5000 + b"}"),
    "11-no JSON": Bad(400, "body_malformed", "JSON", body=b'{"amount":'),
    "12-large": Bad(413, "body_too_large", "1048576", body=b" " * (1024 * 1024 + 1)),
    "12-bomb": Bad(
        413, "body_too_large", "1048576", body=gzip.compress(bytes(8 * 1024 * 1024)), headers=[("Content-Encoding", "gzip")]
    ),
    "12-coding": Bad(415, "content_encoding", "gzip", headers=[("Content-Encoding", "br")]),
    "12-form": Bad(415, "content_type", "application/json", headers=[("Content-Type", "text/plain")]),
    **{f"13-amount {value!r}": _of("amount", value) for value in (1.5, 1.0, "1", True, None, -1, 10**30, 100_000_000)},
    **{f"13-{path} of nothing": _of("amount", 0, path) for path in ("/orders", "/refunds")},
    **{f"13-currency {value!r}": _of("currency", value) for value in ("XXX", "eur", "", 978)},
    "13-dinars": Bad(400, "invalid", "multiple of 10", body={**PAYMENT, "currency": "KWD", "amount": 1001}),
    "13-customer": _of("customer_id", "a b"),
    "13-id": _of("payment_id", "ä", "/refunds"),
    "13-reason": _of("reason", "x" * 201, "/refunds"),
    "13-order": _of("order_id", "x" * 256, "/returns"),
    "13-no order": _of("order_id", None, "/returns"),
    "13-return's reason": _of("reason", "a\nb", "/returns"),
    **{f"13-reship {value!r}": _of("reship", value, "/returns") for value in (1, "true", None)},
    "13-order unknown": Bad(409, "not_returnable", "order_id: only an order that is PROCESSING", "/returns", RETURN),
    "13-another member": _of("secret-member", "4242", names="body: has a member that does not exist"),
}  # fmt: skip


@pytest.mark.few(16)
@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_by_field_and_accepts_nothing(api: Api, case: str) -> None:
    bad = BAD[case]
    body = bad.body if isinstance(bad.body, bytes) else json.dumps(bad.body or PAYMENT).encode()
    headers = [] if bad.key is None else [("Idempotency-Key", new_key() if bad.key == "good" else bad.key)]
    given = dict(bad.headers)
    headers += [("Content-Type", given.pop("Content-Type", "application/json")), *given.items()]
    before = [api.count(table) for table in COUNTED]
    answer = api.acme.post(bad.path, content=body, headers=headers)
    assert (answer.status_code, problem(answer)) == (bad.status, bad.type), answer.text
    assert bad.names in answer.json()["detail"]
    assert not any(secret in answer.text for secret in ("4242", "secret-member", str(10**30), "eur"))
    assert [api.count(table) for table in COUNTED] == before


def test_a_key_means_the_same_quoted_and_bare_and_in_any_order_of_members(api: Api) -> None:
    """Rows 6 and 10."""
    key = new_key()
    first = api.pay(key)
    assert (first.status_code, first.headers.get("idempotency-replayed")) == (202, None)
    turned = json.dumps(dict(reversed(PAYMENT.items())), indent=3)
    headers = {"Idempotency-Key": f'"{key}"', "Content-Type": "application/json"}
    again = api.acme.post("/payments", content=turned, headers=headers)
    assert (again.status_code, again.content, again.headers["idempotency-replayed"]) == (202, first.content, "true")
    assert again.headers["location"] == first.headers["location"] == f"/operations/payments.capture_payment/{key}"


def test_a_key_that_is_used_for_another_request_is_refused_and_changes_nothing(api: Api) -> None:
    """Row 7: another body, and another route."""
    key = new_key()
    first = api.pay(key)
    order = api.acme.post("/orders", json=ORDER, headers={"Idempotency-Key": key})
    for other in (api.pay(key, amount=1), order):
        assert (other.status_code, problem(other)) == (422, "idempotency_key_reused")
    assert api.pay(key).content == first.content
    assert api.count("orders", "checkout_session_id = 'cs-bad'") == 0
    refused = new_key()
    assert [api.pay(refused, amount=amount).status_code for amount in (-1, -1, 1)] == [400, 400, 422]


def test_a_request_that_is_still_carried_out_is_answered_409(api: Api) -> None:
    """Row 8: its insert waits for a transaction that holds the same id."""
    key = new_key()
    with Session(api.shop.engine) as session:
        api.shop.payments.submit_payment(session, payment_id=key, tenant="acme", **PAYMENT)
        first = in_background(lambda: until_answered(lambda: api.pay(key)))
        with api.shop.engine.connect() as connection:
            wait_for_a_lock(connection)
        again = api.pay(key)
        assert again.status_code == 409
        assert (problem(again), again.headers["retry-after"]) == ("request_in_progress", "1")
        session.rollback()
    assert first.result(40).status_code == 202


def test_an_operation_of_another_tenant_and_an_unknown_one_are_the_same_404(api: Api) -> None:
    """Rows 9 and 15."""
    key = new_key()
    ours, theirs = api.pay(key), api.pay(key, by=api.globex, amount=77)
    assert (ours.status_code, theirs.status_code) == (202, 202)
    mine = api.captured()
    asked = [
        api.globex.get(f"/operations/payments.capture_payment/{mine}"),
        api.acme.get(f"/operations/payments.capture_payment/{new_key()}"),
        api.acme.get(f"/operations/http/{mine}"),
        api.acme.get(f"/operations/no.such.task/{mine}", headers=WAIT),
        api.acme.get("/operations/nothing"),
        api.acme.get("/operations/payments.capture_payment/"),
        api.acme.get("/operations/payments.capture_payment/%00"),
        api.acme.get(f"/operations/payments.capture_payment/{'k' * 300}"),
    ]
    assert {(answer.status_code, answer.content) for answer in asked} == {(404, asked[0].content)}
    assert api.acme.get(f"/operations/payments.capture_payment/{mine}").json()["status"] == "completed"


# ---------------------------------------------------------------- who may


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "given", [None, "Bearer", "Basic abc", "Bearer nothing", "Bearer ik_a_" + "x" * 43, "revoked", "expired"]
)
def test_without_a_valid_key_every_answer_is_the_same_401(api: Api, given: str | None) -> None:
    changes = {"revoked": "revoked_at = clock_timestamp()", "expired": "expires_at = clock_timestamp()"}
    if given in changes:
        key = api_key(api.shop.engine, f"gone-{given}")
        with api.shop.engine.begin() as connection:
            gone = f"UPDATE idempotency.api_keys SET {changes[given]} WHERE tenant = :tenant"
            connection.execute(text(gone), {"tenant": f"gone-{given}"})
        given = f"Bearer {key}"
    headers = {"Idempotency-Key": new_key()} | ({} if given is None else {"Authorization": given})
    answers = [
        httpx.post(f"{api.server.url}/payments", json=PAYMENT, headers=headers),
        httpx.get(f"{api.server.url}/operations/payments.capture_payment/x", headers=headers),
    ]
    wanted = httpx.get(f"{api.server.url}/operations/x/y")
    assert {(each.status_code, each.content) for each in answers} == {(401, wanted.content)}
    assert wanted.headers["www-authenticate"] == "Bearer"


def test_a_key_without_the_scope_is_refused_and_a_revoked_one_soon(api: Api) -> None:
    with client(api.server, api_key(api.shop.engine, "acme", ["refunds:write"])) as weak:
        refused = api.pay(by=weak)
        assert (refused.status_code, problem(refused)) == (403, "not_allowed")
        assert "payments:write" in refused.json()["detail"]
    with client(api.server, api_key(api.shop.engine, "leaving")) as leaving:
        assert api.pay(by=leaving).status_code == 202
        with api.shop.engine.begin() as connection:
            connection.execute(text("UPDATE idempotency.api_keys SET revoked_at = now() WHERE tenant = 'leaving'"))
        eventually(lambda: api.pay(by=leaving).status_code == 401, timeout=10)


# ---------------------------------------------------------------- waiting for the end


def test_prefer_wait_answers_with_the_end_and_replays_stay_the_202(api: Api) -> None:
    key = new_key()
    waited = api.pay(key, headers=WAIT)
    assert (waited.status_code, waited.headers["preference-applied"]) == (200, "wait=25")
    assert waited.json() == {
        "task": "payments.capture_payment",
        "key": key,
        "status": "completed",
        "result": {"status": "captured", "charge": waited.json()["result"]["charge"]},
    }
    replayed = api.pay(key)
    assert (replayed.status_code, replayed.headers["idempotency-replayed"]) == (202, "true")
    read = api.acme.get(replayed.headers["location"], headers={"Prefer": "respond-async, wait=5"})
    assert (read.json(), read.headers["preference-applied"]) == (waited.json(), "wait=5")
    assert api.pay(key, headers=WAIT).json() == waited.json()


@pytest.mark.long
def test_what_does_not_end_in_time_is_answered_202_and_a_wish_for_nothing_is_ignored(api: Api) -> None:
    pending = new_key()  # a refund of a payment that is still pending is deferred
    with api.shop.engine.begin() as connection:
        row = "INSERT INTO payments (tenant, id, customer_id, amount, currency, status, refunded) VALUES ('acme', :id, 'c', 5, 'EUR', 'pending', 0)"
        connection.execute(text(row), {"id": pending})
    late = api.refund(pending, 5, Prefer="wait=1")
    assert (late.status_code, late.headers["preference-applied"]) == (202, "wait=1")
    waiting = api.acme.get(late.headers["location"], headers={"Prefer": "wait=0"})
    assert waiting.json()["status"] in ("accepted", "started", "released")
    for wish in ("wait=soon", "wait", "wait=-1", "respond-async"):
        ignored = api.acme.get(late.headers["location"], headers={"Prefer": wish})
        assert "preference-applied" not in ignored.headers


# ---------------------------------------------------------------- refunds and currencies


@pytest.mark.long
def test_refunds_that_may_not_be_are_refused_with_their_reason(api: Api) -> None:
    """Row 14."""
    paid, free = api.captured(300), new_key()
    assert api.pay(free, amount=0, headers=WAIT).json()["result"]["status"] == "free"
    codes = [
        api.refund(payment_id, amount).json()["code"] for payment_id, amount in ((paid, 301), ("no-such", 1), (free, 1))
    ]
    assert codes == ["exceeds_captured", "payment_unknown", "payment_free"]
    both = at_once(2, lambda _: api.refund(paid, 200).json()["status"])
    assert sorted(both) == ["completed", "failed"]
    assert api.shop.refunds_of(paid) == [200]


@pytest.mark.few(1)
@pytest.mark.parametrize(("currency", "amount"), [("JPY", 500), ("KWD", 12_340)])
def test_a_currency_has_as_many_decimals_as_it_has(api: Api, currency: str, amount: int) -> None:
    key = new_key()
    assert api.pay(key, amount=amount, currency=currency, headers=WAIT).json()["status"] == "completed"
    assert api.charges(key) == [amount]
    refunds = [
        (answer["status"], answer.get("code")) for answer in (api.refund(key, part).json() for part in (101, 110))
    ]
    assert refunds == [("failed", "minor_unit") if currency == "KWD" else ("completed", None), ("completed", None)]


def test_two_tenants_with_one_key_are_charged_each_even_if_the_provider_has_to_be_asked(api: Api) -> None:
    key = new_key()
    assert api.pay(key, headers=WAIT).status_code == 200
    body = {"next": ["error_500_before"], "only": {"purchase_id": key}}
    requests.post(f"{api.shop.provider.url}/_sandbox/faults", json=body, timeout=5).raise_for_status()
    theirs = api.pay(key, by=api.globex, amount=77, headers=WAIT)
    assert theirs.json()["status"] == "completed"
    assert (api.charges(key), api.charges(key, "globex")) == ([1000], [77])
    subject = f"payment.captured {key}"
    eventually(lambda: len(recipients(api, subject)) == 2, what="both mails")
    assert sorted(recipients(api, subject)) == [
        "customer-c1@acme.customers.example",
        "customer-c1@globex.customers.example",
    ]


def recipients(api: Api, subject: str) -> list[str]:
    return [each.recipient for each in ledger.read_mail(api.shop.data / "mail") if each.subject == subject]


# ---------------------------------------------------------------- at once


def test_fifty_clicks_make_one_order_and_one_payment(api: Api) -> None:
    """Half of them with one key, the others with one each."""
    session, shared = f"cs-{uuid4().hex[:8]}", new_key()
    body = {**PAYMENT, "checkout_session_id": session}

    def click(number: int) -> httpx.Response:
        headers = {"Idempotency-Key": shared if number % 2 else new_key()}
        return until_answered(lambda: api.acme.post("/orders", json=body, headers=headers))

    answers = at_once(50, click)
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.content for answer in answers}) == 1
    order = answers[0].json()
    assert api.acme.get(order["operation"], headers=WAIT).json()["status"] == "completed"
    assert api.count("orders", "checkout_session_id = :session", session=session) == 1
    assert (api.charges(order["id"]), api.count("payments", "id = :id", id=order["id"])) == ([1000], 1)
    other = api.acme.post("/orders", json=body | {"amount": 1}, headers={"Idempotency-Key": new_key()})
    assert (other.status_code, problem(other)) == (409, "already_used")


@pytest.mark.few(1)
@pytest.mark.parametrize(("quantity", "status", "charged"), [(2, "captured", [1000]), (3, "cancelled", [])])
def test_an_order_is_charged_if_there_are_enough_pieces(
    api: Api, quantity: int, status: str, charged: list[int]
) -> None:
    """Of an article of which there are two."""
    from tasks.warehouse import receive_stock

    sku = f"sku-{uuid4().hex[:8]}"
    with Session(api.shop.engine) as session, session.begin():
        receive_stock(session, delivery_id=f"d-{sku}", sku=sku, quantity=2, tenant="acme")
    body = ORDER | {"checkout_session_id": f"cs-{sku}", "sku": sku, "quantity": quantity}
    answer = api.acme.post("/orders", json=body, headers={"Idempotency-Key": new_key()} | WAIT)
    assert (answer.status_code, answer.json()["status"]) == (200, "completed"), answer.text
    assert answer.json()["result"]["status"] == status
    order = answer.json()["key"]
    assert api.charges(order) == charged
    final = {"captured": "PROCESSING", "cancelled": "CANCELLED"}[status]
    eventually(lambda: api.count("orders", "id = :id AND status = :final", id=order, final=final))


def test_a_click_does_not_wait_long_for_a_transaction_that_has_taken_its_checkout(api: Api) -> None:
    """Those who wait hold a thread each, which all tenants share."""
    from tasks.checkout import submit_order

    body = ORDER | {"checkout_session_id": f"cs-{new_key()}"}
    headers = {"Idempotency-Key": new_key()}
    with Session(api.shop.engine) as frozen:
        submit_order(frozen, tenant="acme", **body)
        refused = api.acme.post("/orders", json=body, headers=headers)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.elapsed.total_seconds() < 3  # its connections wait for a lock for 4 s
        frozen.rollback()
    assert api.acme.post("/orders", json=body, headers=headers).status_code == 202


def test_code_from_before_tenants_does_not_know_an_argument_of_a_tenants_task(api: Api) -> None:
    """So it leaves the message to newer code; by the id alone it would find another tenant's payment."""
    found = {}
    for tenant in ("default", "acme"):
        payment, refund = {"tenant": tenant, "payment_id": new_key()}, {"tenant": tenant, "refund_id": new_key()}
        with Session(api.shop.engine) as session:
            api.shop.payments.submit_payment(session, **payment, **PAYMENT)
            api.shop.refunds.submit_refund(session, **refund, payment_id="p", amount=1, reason="r")
            query = text("SELECT message FROM idempotency.outbox WHERE key = ANY(:keys)")
            keys = {"keys": [payment["payment_id"], refund["refund_id"]]}
            found[tenant] = ["owner" in str(message) for message in session.execute(query, keys).scalars()]
    assert found == {"default": [False] * 2, "acme": [True] * 2}


def test_one_operation_over_http_and_by_enqueue_at_once_is_one_record_and_one_charge(api: Api) -> None:
    key = new_key()

    def submit(number: int) -> str:
        if number % 2:
            return until_answered(lambda: api.pay(key)).headers["location"]
        with Session(api.shop.engine) as session, session.begin():
            handle = api.shop.payments.submit_payment(session, payment_id=key, tenant="acme", **PAYMENT)
        return f"/operations/{handle.id.task}/{handle.id.key}"

    (where,) = set(at_once(20, submit))
    with Session(api.shop.engine) as session, session.begin():  # and by its task alone, under the request's key
        api.shop.payments.capture_payment.enqueue(session, payment_id=key, idempotency_key=key, tenant="acme")
    assert api.acme.get(where, headers=WAIT).json()["status"] == "completed"
    assert api.count("idempotency.records", "key = :key AND task LIKE 'payments.%'", key=key) == 1
    assert (api.charges(key), api.count("payments", "id = :id", id=key)) == ([1000], 1)


def test_an_id_whose_task_was_called_before_there_was_a_row_is_refused(api: Api) -> None:
    """It has failed, for want of a row: accepted all the same, the payment would wait for ever."""
    key = new_key()
    refund = {"payment_id": "p", "amount": 1, "reason": "r"}
    with Session(api.shop.engine) as session, session.begin():
        api.shop.payments.capture_payment.enqueue(session, payment_id=key, tenant="acme")
        api.shop.refunds.refund_payment.enqueue(session, refund_id=f"{key}-r", tenant="acme")
    for task, id in (("payments.capture_payment", key), ("refunds.refund_payment", f"{key}-r")):
        assert api.acme.get(f"/operations/{task}/{id}", headers=WAIT).json()["status"] == "failed"
    headers = {"Idempotency-Key": f"{key}-r"}
    for refused in (api.pay(key), api.acme.post("/refunds", json=refund, headers=headers)):
        assert (refused.status_code, problem(refused)) == (409, "already_used")
    assert api.count("payments", "id = :id", id=key) == api.count("refunds", "id = :id", id=f"{key}-r") == 0


def test_what_became_of_a_payment_and_its_refund_is_known_after_their_records_were_purged(api: Api) -> None:
    paid = api.captured()
    refunded = api.refund(paid, 10)
    key = refunded.json()["key"]
    addresses = [f"/operations/payments.capture_payment/{paid}", f"/operations/refunds.refund_payment/{key}"]
    before = [api.acme.get(address).json() for address in addresses]
    forget(api, paid, key)
    assert [api.acme.get(address).json() for address in addresses] == before
    again = api.pay(paid, headers={"Prefer": "wait=30"})
    assert (again.status_code, again.json()) == (200, before[0])
    assert api.charges(paid) == [1000]


def until_answered(send: Callable[[], httpx.Response]) -> httpx.Response:
    """Send as a client does: again, with the same key, until there is an answer that says what became of it."""

    def answered() -> httpx.Response | None:
        try:
            answer = send()
        except httpx.TransportError:
            return None
        return None if answer.status_code in (409, 503) else answer

    return eventually(answered, timeout=60, what="an answer")


@pytest.mark.long
@pytest.mark.parametrize("point", ["finish.written", "finish.committed"])
def test_fifty_identical_requests_to_two_servers_of_which_one_dies_make_one_payment(api: Api, point: str) -> None:
    """One process is killed in the middle of the request that carries it out, and started again."""
    key, directory = new_key(), api.server._environment["CRASH_DIRECTORY"]
    second = api.server.start()
    crashing.plan(directory, point, crashing.KILL_CHILD)
    stop = threading.Event()

    def restart() -> int:
        restarted = 0
        while not stop.wait(0.02):
            for process in [each for each in api.server.processes if each.poll() is not None]:
                api.server.processes.remove(process)
                api.server.start()
                restarted += 1
        return restarted

    restarting = in_background(restart)
    answers = at_once(50, lambda _: until_answered(lambda: api.pay(key)))
    stop.set()
    assert restarting.result(START_WITHIN) == 1
    assert len({(answer.status_code, answer.content) for answer in answers}) == 1
    assert api.acme.get(answers[0].headers["location"], headers=WAIT).json()["status"] == "completed"
    assert (api.charges(key), api.count("payments", "id = :id", id=key)) == ([1000], 1)
    assert api.count("idempotency.outbox", "key = :key AND origin = 'enqueue'", key=key) == 1
    if second.poll() is None:
        second.terminate()
        second.wait(15)
    for process in [each for each in api.server.processes if each.poll() is not None]:
        api.server.processes.remove(process)
    if not api.server.processes:
        api.server.start()


# ---------------------------------------------------------------- the page


def test_the_lines_of_the_page_answer_as_they_are_printed(api: Api) -> None:
    with api.shop.engine.begin() as connection:
        token = add_operator(connection, Change("setup", "tests"), "ann", "operator", days=1)
    environment = {**os.environ, "API": api.server.url, "KEY": api_key(api.shop.engine, "page"), "TOKEN": token}
    page = (ROOT / "docs/api.md").read_text()
    steps = re.findall(r"^```sh\n(.*?)^```\n(?:\n^```json\n(.*?)^```$)?", page, re.MULTILINE | re.DOTALL)
    assert len(steps) == 8
    for command, expected in steps:
        done = subprocess.run(["bash", "-ec", command], env=environment, capture_output=True, check=True, timeout=60)
        answer = json.loads(done.stdout)
        if expected:
            told = json.loads(expected)
            assert _without_dots(answer, told) == _without_dots(told, told), command


def _without_dots(answer: Any, told: Any) -> Any:
    """The answer, except for what the page leaves open as `…`."""
    if isinstance(told, dict) and isinstance(answer, dict):
        return {name: _without_dots(answer[name], told.get(name)) for name in answer}
    return "…" if told == "…" else answer


# ---------------------------------------------------------------- health


@pytest.mark.long
def test_health_and_counters_are_served_without_a_key(api: Api) -> None:
    assert httpx.get(f"{api.server.url}/livez").json() == {"status": "ok"}
    ready = httpx.get(f"{api.server.url}/readyz")
    assert ready.status_code == 200
    parts = ready.json()["parts"]
    assert sorted(parts) == ["broker", "consumers", "postgres", "redis", "relay"]
    assert [name for name, part in parts.items() if part["needed"]] == ["postgres"]
    assert all(parts[name]["ok"] for name in ("postgres", "redis", "broker")), parts
    assert "idempotency_claims_total" in httpx.get(f"{api.server.url}/metrics").text
