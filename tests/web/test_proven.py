"""Each asserts the bad outcome: it passes while the fault is there."""

from __future__ import annotations

import html
import re
import threading
import time
from typing import Any

import httpx
import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency import IdempotentTask, PermanentError
from idempotency.web import desk as desks
from idempotency.wire.keys import OperationId
from tests.support import bank as b
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.operations import make_due
from tests.support.tasks import Provider, lost, make_task
from tests.web.conftest import PAGE, Open
from tests.web.test_changes import audited, deliver_all, letters, shown

HIDDEN = re.compile(r'<input type="hidden" name="([^"]+)" value="([^"]*)"')


def declining(bank: Celery, codes: dict[str, str] | None = None, **options: Any) -> Any:
    def body(self: Any, n: int) -> str:
        if n in state:
            raise PermanentError("no", state[n])
        return "ok"

    state: dict[int, str] = {}
    task = make_task(bank, body, **options)
    task.declined = state
    return task


# ---------------------------------------------------------------- bulk


def test_a_bulk_confirms_warnings_that_nobody_has_read(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """What is confirmed is what matches when the second form comes, not what the first page has shown."""
    task = declining(bank)
    task.declined[1] = "card_declined"
    deliveries.deliver(task, n=1, key="k1")
    otto = browser("otto")
    first = otto.post("/bulk/begin", {"only_reason": "card_declined", "reason": "again"})
    assert first.status_code == 200
    assert "k1" in first.text and "k2" not in first.text
    assert "Of 1 letters" in first.text
    form = {html.unescape(n): html.unescape(v) for n, v in HIDDEN.findall(first.text.split('action="/bulk/begin"')[1])}
    # meanwhile a second one is declined
    task.declined[2] = "card_declined"
    deliveries.deliver(task, n=2, key="k2")
    begun = otto.client.post("/bulk/begin", data=form, headers={"Origin": PAGE})
    assert begun.status_code == 303
    page = otto.get(begun.headers["location"])
    assert "0 of 2 completed" in shown(page)
    task.declined.clear()
    of = dict(HIDDEN.findall(page.text.split('action="/bulk/next"')[1]))["of"]
    otto.post("/bulk/next", {"of": of})
    deliver_all(bank, deliveries, connection)
    otto.post("/bulk/next", {"of": of})
    deliver_all(bank, deliveries, connection)
    # k2's warning was never on any screen, and it was replayed
    assert [row.key for row in audited(connection, "replay")] == ["k1", "k2"]


def test_a_bulk_of_many_confirms_all_but_shows_twenty(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = declining(bank)
    for n in range(30):
        task.declined[n] = "card_declined"
        deliveries.deliver(task, n=n, key=f"key-{n:03}")
    otto = browser("otto")
    first = otto.post("/bulk/begin", {"only_reason": "card_declined", "reason": "again"})
    assert "key-019" in first.text
    assert "key-029" not in first.text
    begun = otto.post("/bulk/begin", {"only_reason": "card_declined", "reason": "again", "confirmed": "1"})
    assert begun.status_code == 303


def test_a_bulk_never_ends_once_what_has_completed_is_purged(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """A record is purged after its retention; the letter stays longer: "1 running", and no next stage, for ever."""
    task = declining(bank)
    for n in range(2):
        task.declined[n] = "gone"
        deliveries.deliver(task, n=n, key=f"k{n}")
    task.declined.clear()
    otto = browser("otto")
    begun = otto.post("/bulk/begin", {"only_reason": "gone", "reason": "again", "confirmed": "1"})
    page = otto.get(begun.headers["location"])
    of = dict(HIDDEN.findall(page.text.split('action="/bulk/next"')[1]))["of"]
    otto.post("/bulk/next", {"of": of})
    deliver_all(bank, deliveries, connection)
    assert "1 of 2 completed" in shown(otto.get(begun.headers["location"]))
    connection.execute(text("DELETE FROM idempotency.records WHERE key = 'k0'"))
    after = re.sub(r"\s+", " ", shown(otto.get(begun.headers["location"])))
    assert "0 of 2 completed · 1 running" in after
    assert "those before have not ended yet" in shown(otto.post("/bulk/next", {"of": of}))


def test_a_bulk_says_that_one_failed_again_which_has_completed(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """An older letter of the operation about something else is open, and has a higher number: "1 failed again"."""
    task = declining(bank)
    task.declined[1] = "gone"
    deliveries.deliver(task, n=1, key="k")
    (first,) = letters(connection)
    # the same key was used with other arguments meanwhile: rejected, a letter of its own
    deliveries.deliver(task, n=2, key="k")
    reasons = [(row.reason, row.status) for row in letters(connection)]
    assert ("fingerprint_mismatch", "open") in reasons, reasons
    task.declined.clear()
    otto = browser("otto")
    begun = otto.post("/bulk/begin", {"only_reason": "gone", "reason": "again", "confirmed": "1"})
    page = otto.get(begun.headers["location"])
    of = dict(HIDDEN.findall(page.text.split('action="/bulk/next"')[1]))["of"]
    otto.post("/bulk/next", {"of": of})
    at_once = shown(otto.get(begun.headers["location"]))
    deliver_all(bank, deliveries, connection)
    status = connection.execute(text("SELECT status FROM idempotency.records WHERE key = 'k'")).scalar_one()
    assert status == "completed"
    after = re.sub(r"\s+", " ", shown(otto.get(begun.headers["location"])))
    assert "0 of 1 completed · 1 failed" in after, after
    assert "1 failed again" in after
    assert "failed again" in at_once, "even before it has run"


def test_a_bulk_of_500_has_an_address_that_a_proxy_refuses(
    browser: Open, connection: Connection, bank: Celery
) -> None:
    """nginx: large_client_header_buffers 4 8k (request line), proxy_buffer_size 4k|8k (Location)."""
    from idempotency.web.bulk import Bulk  # noqa: F401
    from tests.support.asgi import Client  # noqa: F401

    otto = browser("otto")
    sessions = otto.client.app.state.desk.sessions
    import hashlib

    ids = list(range(10_345_000, 10_345_000 + 7 * 500, 7))
    read = {str(i): hashlib.sha256(str(i).encode()).hexdigest()[:16] for i in ids}
    signed = sessions.sign("bulk", ["f" * 32, ids, "otto", "again", read, True])
    assert len(f"/bulk?of={signed}") > 8 * 1024


# ---------------------------------------------------------------- sessions


def test_a_cookie_of_another_application_takes_the_session(browser: Open) -> None:
    """SimpleCookie stops at what it does not like: a JSON cookie of the parent domain, and nobody can log in."""
    otto = browser("otto")
    (cookie,) = (each for each in otto.client.cookies.jar if each.name == "__Host-idempotency")
    mine = f"__Host-idempotency={cookie.value}"
    otto.client.cookies.clear()
    assert otto.get("/", headers={"Cookie": mine}).status_code == 200
    for theirs in ('prefs={"theme":"dark"}', "a=b c", "x[1]=2"):
        answer = otto.get("/", headers={"Cookie": f"{theirs}; {mine}"})
        print(theirs, answer.status_code)
    answer = otto.get("/", headers={"Cookie": f'prefs={{"theme":"dark"}}; {mine}'})
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=%2F")


# ---------------------------------------------------------------- reveal


def test_a_reveal_sent_again_says_that_the_database_did_not_answer(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    (letter,) = letters(connection)
    otto = browser("otto")
    form = {"reason": "ticket 7", "request_id": "r1"}
    assert otto.post(f"/letters/{letter.id}/reveal", form).status_code == 200
    again = otto.post(f"/letters/{letter.id}/reveal", form)  # reload
    assert (again.status_code, "the database did not answer in time" in again.text) == (503, True)


def test_a_reason_with_nul(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    (letter,) = letters(connection)
    otto = browser("otto")
    found = {
        path: otto.post(f"/letters/{letter.id}/{path}", {"reason": "a\0b", "confirmed": "1"}).status_code
        for path in ("reveal", "discard", "replay")
    }
    assert 503 in found.values() or 500 in found.values(), found


def test_a_result_with_half_a_surrogate_pair_cannot_be_revealed(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = make_task(bank, lambda self, n: {"name": "Zo\ud83d"})
    deliveries.deliver(task, n=1, key="k")
    row = connection.execute(text("SELECT * FROM idempotency.records")).one()
    print(row.status, row.result, row.error)
    otto = browser("otto")
    answer = otto.post("/operation/reveal", {"tenant": row.tenant, "task": row.task, "key": row.key, "reason": "x"})
    assert answer.status_code == 500, answer.text


# ---------------------------------------------------------------- what the page does not find, and does not say


def test_a_key_is_not_found_where_there_are_many_tenants(browser: Open, connection: Connection) -> None:
    """2,000 pairs of tenant and task are skipped through, of all applications and tenants; then the page says that there is none."""
    held = op.failed(connection, OperationId("zeta", "tests.support.bank.deposit", "the-key"))
    assert browser("otto").get("/operations?key=the-key").status_code == 303
    connection.execute(
        text(
            "INSERT INTO idempotency.records SELECT (jsonb_populate_record(r, jsonb_build_object('tenant', 't' || n, 'key', 'other'))).*"
            " FROM idempotency.records r, generate_series(1, 2000) n WHERE r.key = 'the-key'"
        )
    )
    said = shown(browser("otto").get("/operations?key=the-key"))
    assert "No operation that you may see has the key the-key" in re.sub(r"\s+", " ", said)
    assert held is not None


def test_a_call_in_doubt_that_still_tries_is_hidden_by_500_that_wait(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, engine: Engine
) -> None:
    task = make_task(bank, lambda self: self.effect("charge", Provider(lost(), lost())), max_attempts=5)
    deliveries.deliver(task, key="k")
    otto = browser("otto")
    assert "Not ended: the next attempt asks" in otto.get("/doubts").text
    connection.execute(text("UPDATE idempotency.records SET queue = 'payments' WHERE key = 'k'"))
    early = op.early(connection, queue="mails")
    connection.execute(
        text(
            "INSERT INTO idempotency.records SELECT (jsonb_populate_record(r, jsonb_build_object('key', 'w' || n))).*"
            " FROM idempotency.records r, generate_series(1, 500) n WHERE r.key = :key"
        ),
        {"key": early.id.key},
    )
    page = otto.get("/doubts").text
    assert "Not ended" not in page
    assert "no call is in doubt" in page


def test_a_call_whose_worker_has_died_is_not_in_doubt(browser: Open, bank: Celery, connection: Connection) -> None:
    """Held, its lease over, with a call that was begun: neither list has it until somebody recovers it."""
    held = op.expired(connection)
    connection.execute(
        text(
            "UPDATE idempotency.records SET effects = jsonb_build_object('charge', jsonb_build_object('kind', 'effect', 'state', 'begun',"
            " 'key', 'pk', 'number', 0, 'position', 0, 'begun_at', 1700000000)) WHERE key = :key"
        ),
        {"key": held.id.key},
    )
    page = browser("otto").get("/doubts").text
    assert "no call is in doubt" in page
    assert "Not ended" not in page


# ---------------------------------------------------------------- tenants


def test_a_person_of_one_tenant_sees_queues_and_processes_of_others(browser: Open, connection: Connection) -> None:
    op.started(connection, OperationId("globex", "x", "k"), queue="globex-payments")
    op.early(connection, OperationId("globex", "x", "k2"), queue="globex-mails")
    connection.execute(
        text(
            "INSERT INTO idempotency.outbox (tenant, task, key, fingerprint, queue, message, service, status) VALUES"
            " ('globex', 'x', 'k3', 'v1:x', 'globex-orders', '{}', 'bank', 'pending')"
        )
    ) if False else None
    page = browser("tina").get("/").text
    print([name for name in ("globex-payments", "globex-mails", "globex-orders") if name in page])
    assert "globex" in page


# ---------------------------------------------------------------- a database that is slow


def test_pages_queue_up_behind_a_slow_database_one_after_the_other(
    browser: Open, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that failed is kept by nobody: each waiter tries again, after the one before, for `STATEMENT` each."""
    import asyncio

    otto = browser("otto")
    (cookie,) = (each for each in otto.client.cookies.jar if each.name == "__Host-idempotency")
    app = otto.client.app
    assert otto.get("/").status_code == 200
    app.state.desk.forget()
    blocker = engine.connect().execution_options(isolation_level="READ COMMITTED")
    began = blocker.begin()
    blocker.execute(text("LOCK TABLE idempotency.outbox IN ACCESS EXCLUSIVE MODE"))
    took: list[float] = []

    async def ask() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url=PAGE, timeout=120, cookies={"__Host-idempotency": cookie.value or ""}
        ) as client:

            async def one() -> None:
                since = time.monotonic()
                answer = await client.get("/")
                took.append(time.monotonic() - since)
                print(answer.status_code, round(took[-1], 1))

            await asyncio.gather(*(one() for _ in range(6)))

    try:
        asyncio.run(ask())
    finally:
        began.rollback()
        blocker.close()
    assert max(took) > 4 * desks.STATEMENT / 1000


def test_health_and_static_do_not_answer_while_40_pages_wait(browser: Open, engine: Engine) -> None:
    """40 threads: as many open pages, and neither /health nor a page that asks nothing of the database is answered."""
    import asyncio

    otto = browser("otto")
    (cookie,) = (each for each in otto.client.cookies.jar if each.name == "__Host-idempotency")
    app = otto.client.app
    app.state.desk.forget()
    blocker = engine.connect().execution_options(isolation_level="READ COMMITTED")
    began = blocker.begin()
    blocker.execute(text("LOCK TABLE idempotency.outbox IN ACCESS EXCLUSIVE MODE"))
    took: list[float] = []

    async def ask() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url=PAGE, timeout=300, cookies={"__Host-idempotency": cookie.value or ""}
        ) as client:
            waiting = [asyncio.create_task(client.get("/")) for _ in range(45)]
            await asyncio.sleep(2)
            since = time.monotonic()
            health = asyncio.create_task(client.get("/health"))
            done, _ = await asyncio.wait([health], timeout=12)
            took.append(time.monotonic() - since)
            print("health answered", bool(done), took)
            await asyncio.get_running_loop().run_in_executor(None, began.rollback)
            await asyncio.gather(*waiting, health)

    try:
        asyncio.run(ask())
    finally:
        blocker.close()
    assert took[0] > 4.5


# ---------------------------------------------------------------- second batch


def test_a_session_of_many_tenants_is_longer_than_browsers_keep(browser: Open) -> None:
    """Over 4,096 bytes a browser drops the cookie and says nothing: the login goes round in circles."""
    from uuid import uuid4

    from idempotency.operate.people import Person

    sessions = browser("otto").client.app.state.desk.sessions
    issuer = "https://login.company.example/realms/staff"
    person = Person("5f2c", "operator", issuer, tenants=frozenset(str(uuid4()) for _ in range(150)))
    assert len("__Host-idempotency=" + sessions.begin(person)) > 4096


def test_a_session_that_ends_in_the_middle_of_a_bulk_cannot_be_begun_again(browser: Open) -> None:
    """The cookie that the login leaves has the whole address of the bulk in it, and is dropped by browsers over 4,096 bytes."""
    import hashlib
    from urllib.parse import urlencode

    sessions = browser("otto").client.app.state.desk.sessions
    ids = list(range(345_000, 345_000 + 3 * 250, 3))
    read = {str(i): hashlib.sha256(str(i).encode()).hexdigest()[:16] for i in ids}
    signed = sessions.sign("bulk", ["0123456789abcdef" * 2, ids, "otto", "card scheme was down", read, False])
    other = browser(None)
    to_login = other.get(f"/bulk?{urlencode({'of': signed})}")
    assert to_login.status_code == 303
    left = other.get(to_login.headers["location"])
    cookie = next(each for each in left.headers.get_list("set-cookie") if each.startswith("idempotency-login="))
    assert len(cookie.split(";")[0]) > 4096


def test_a_bulk_that_goes_on_goes_on_after_a_refusal(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """Docs: it goes no further when one is refused. The page sends the next form by itself, each second, for ever."""
    task = declining(bank)
    for n in range(2):
        task.declined[n] = "gone"
        deliveries.deliver(task, n=n, key=f"k{n}")
    task.declined.clear()
    otto = browser("otto")
    begun = otto.post("/bulk/begin", {"only_reason": "gone", "reason": "again", "confirmed": "1", "goes_on": "1"})
    page = otto.get(begun.headers["location"])
    of = dict(HIDDEN.findall(page.text.split('action="/bulk/next"')[1]))["of"]
    otto.post("/bulk/next", {"of": of})
    deliver_all(bank, deliveries, connection)
    connection.execute(text("UPDATE idempotency.dead_letters SET reason = 'beyond_limit' WHERE key = 'k1'"))
    refused = otto.post("/bulk/next", {"of": of})
    after = otto.get(refused.headers["location"])
    assert "was refused" in after.text
    assert "data-submit" in after.text
    assert "Stopped:" not in after.text


def test_the_preview_of_an_older_letter_says_that_it_runs_and_it_is_refused(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = declining(bank)
    task.declined[1] = "gone"
    deliveries.deliver(task, n=1, key="k")
    (letter,) = letters(connection)
    connection.execute(text("UPDATE idempotency.records SET generation = 2 WHERE key = 'k'"))
    otto = browser("otto")
    assert "Its body runs again, as generation 3" in shown(otto.get(f"/letters/{letter.id}"))
    sent = otto.post(f"/letters/{letter.id}/replay", {"reason": "x", "confirmed": "1"})
    assert sent.status_code == 409, sent.text


def test_the_preview_of_a_completed_operation_says_that_its_declined_call_is_called(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = declining(bank)
    task.declined[1] = "gone"
    deliveries.deliver(task, n=1, key="k")
    (letter,) = letters(connection)
    connection.execute(
        text(
            "UPDATE idempotency.records SET status = 'completed', error = NULL, error_code = NULL, result = '1', effects ="
            " jsonb_build_object('charge', jsonb_build_object('kind', 'effect', 'state', 'begun', 'key', 'pk', 'number', 0, 'position', 0,"
            " 'begun_at', 1700000000)) WHERE key = 'k'"
        )
    )
    said = shown(browser("otto").get(f"/letters/{letter.id}"))
    assert "Its operation is completed; a replay only delivers its message again" in said
    assert "else it is called again under this key" in said


def test_what_only_has_a_letter_cannot_be_revealed(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    row = connection.execute(text("SELECT * FROM idempotency.records")).one()
    connection.execute(text("DELETE FROM idempotency.records"))
    otto = browser("otto")
    named = {"tenant": row.tenant, "task": row.task, "key": row.key}
    shown_ = otto.get("/operation", params=named)
    assert shown_.status_code == 200
    assert 'action="/operation/cancel"' in shown_.text
    assert otto.post("/operation/reveal", named | {"reason": "x"}).status_code == 404


def test_the_page_of_an_unfinished_operation_cannot_do_what_its_runbook_says(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """unfinished.md: give the money back by hand, then `effects resolve KEY EFFECT --not-happened --end`."""
    from idempotency.web import runbooks

    def body(self: Any, n: int) -> None:
        self.effect("charge", lambda *, idempotency_key: {"charge": "ch_1"})
        raise PermanentError("no", "gone")

    task = make_task(bank, body)
    deliveries.deliver(task, n=1, key="k")
    (letter,) = letters(connection)
    row = connection.execute(text("SELECT * FROM idempotency.records")).one()
    print(letter.reason, row.error_code, row.effects)
    otto = browser("otto")
    answer = otto.post(
        "/doubts/resolve",
        {"tenant": row.tenant, "task": row.task, "key": "k", "effect": "charge", "status": row.status, "fence": str(row.fence),
         "outcome": "not_happened", "end": "1", "reason": "given back"},
    )  # fmt: skip
    print(answer.status_code, shown(answer)[-300:] if answer.status_code != 303 else "")
    assert "--not-happened --end" in str(runbooks.html("unfinished"))
    assert letter.reason == "unfinished"
    assert answer.status_code == 409


# ---------------------------------------------------------------- third batch


def test_a_person_of_one_tenant_sees_how_many_letters_others_have_in_a_bulk(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """And reads "0 of 2 completed … It is over." of a replay that waits for globex's letter."""
    task = declining(bank)
    for n, tenant in enumerate(("acme", "globex")):
        task.declined[n] = "gone"
        deliveries.deliver(task, n=n, key=f"k{n}", tenant=tenant)
    task.declined.clear()
    otto = browser("otto")
    begun = otto.post("/bulk/begin", {"only_reason": "gone", "reason": "globex is furious", "confirmed": "1"})
    page = otto.get(begun.headers["location"])
    of = dict(HIDDEN.findall(page.text.split('action="/bulk/next"')[1]))["of"]
    otto.post("/bulk/next", {"of": of})
    deliver_all(bank, deliveries, connection)
    said = re.sub(r"\s+", " ", shown(browser("tina").get(begun.headers["location"])))
    assert "1 of 2 completed" in said
    assert "It is over." in said
    assert "globex is furious" in said
    assert "1 of 2 completed · 1 waiting" in re.sub(r"\s+", " ", shown(otto.get(begun.headers["location"])))


def test_a_bulk_is_over_when_its_letters_are_gone(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = declining(bank)
    task.declined[1] = "gone"
    deliveries.deliver(task, n=1, key="k1")
    task.declined.clear()
    otto = browser("otto")
    begun = otto.post("/bulk/begin", {"only_reason": "gone", "reason": "again", "confirmed": "1"})
    page = otto.get(begun.headers["location"])
    of = dict(HIDDEN.findall(page.text.split('action="/bulk/next"')[1]))["of"]
    otto.post("/bulk/next", {"of": of})
    deliver_all(bank, deliveries, connection)
    connection.execute(text("DELETE FROM idempotency.dead_letters"))
    said = re.sub(r"\s+", " ", shown(otto.get(begun.headers["location"])))
    assert "0 of 1 completed" in said
    assert "It is over." in said


def test_a_tick_for_one_warning_confirms_another(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """What a person has read is not in the form: what is confirmed is what it is when the form comes."""
    task = declining(bank)
    task.declined[1] = "gone"
    deliveries.deliver(task, n=1, key="k")
    (letter,) = letters(connection)
    connection.execute(text("UPDATE idempotency.records SET error_code = 'cancelled' WHERE key = 'k'"))
    connection.execute(
        text(
            "UPDATE idempotency.records SET error = jsonb_set(error::jsonb, '{code}', '\"cancelled\"')::text WHERE key = 'k'"
        )
    )
    otto = browser("otto")
    before = shown(otto.get(f"/letters/{letter.id}"))
    print(re.findall(r"was [^.]*", before))
    connection.execute(
        text(
            "UPDATE idempotency.records SET error_code = 'card_declined', error = jsonb_set(error::jsonb, '{code}',"
            " '\"card_declined\"')::text WHERE key = 'k'"
        )
    )
    sent = otto.post(f"/letters/{letter.id}/replay", {"reason": "x", "confirmed": "1"})
    after = shown(otto.get(f"/letters/{letter.id}"))
    print(re.findall(r"was [^.]*", after))
    assert "was cancelled by a person" in before
    assert sent.status_code == 303


def test_an_issuer_that_is_silent_keeps_the_page_from_all(
    browser: Open, bank: Celery, configure: Any
) -> None:
    """/login needs no session; it waits for the issuer with a lock, 5 s each, on the threads that answer everybody."""
    import asyncio
    import socket

    from idempotency.web.application import create_app

    otto = browser("otto")
    (cookie,) = (each for each in otto.client.cookies.jar if each.name == "__Host-idempotency")
    silent = socket.create_server(("127.0.0.1", 0), backlog=200)
    # with the same issuer name the sessions stay good; only its address is asked elsewhere
    app = otto.client.app
    login = app.state.desk.login
    login._settings = login._settings.model_copy(
        update={"oidc_issuer": f"http://127.0.0.1:{silent.getsockname()[1]}"}
    )
    took: list[tuple[bool, float]] = []

    async def ask() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=PAGE, timeout=300) as client:
            strangers = [asyncio.create_task(client.get("/login")) for _ in range(45)]
            await asyncio.sleep(1)
            since = time.monotonic()
            mine = asyncio.create_task(
                client.get("/doubts", headers={"Cookie": f"__Host-idempotency={cookie.value}"})
            )
            done, _ = await asyncio.wait([mine], timeout=15)
            took.append((bool(done), time.monotonic() - since))
            for each in [*strangers, mine]:
                each.cancel()
            silent.close()
            login._settings = login._settings.model_copy(update={"oidc_issuer": "http://127.0.0.1:1"})
            await asyncio.gather(*strangers, mine, return_exceptions=True)

    asyncio.run(ask())
    print(took)
    assert took[0][0] is False


@pytest.mark.parametrize("why", [PermanentError("the provider is closed", "closed"), RuntimeError("no connection")])
def test_the_preview_of_a_stopped_saga_does_not_say_that_a_refund_is_called(
    why: Exception, browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, engine: Engine
) -> None:
    """A replay of its letter replays its failed undos: the preview says that its body runs, and names no call."""
    from idempotency.sagas import saga
    from tests.sagas.conftest import Stage

    stage = Stage(bank, engine, deliveries)
    refunded: list[str] = []
    state = {"fails": True}

    def refund(self: Any, *args: Any, **kwargs: Any) -> None:
        def call(*, idempotency_key: str) -> str:
            refunded.append(idempotency_key)
            return "re_1"

        if state["fails"]:
            raise why
        self.effect("refund", call)

    def give_back(self: Any, id: str, result: Any = None) -> None:
        refund(self)

    refunds = bank.task(name="web.refund", base=IdempotentTask, bind=True, key="{id}", shared=False, max_attempts=1)(give_back)

    @saga("web.order", key="{id}", entity="id", app=bank)
    def order(saga: Any, id: str) -> None:
        saga.step("charge", lambda session, id: id, id, undo=refunds)
        raise PermanentError("sold out", "sold_out")

    stage.enqueue(order, "o1")
    stage.run()
    found = [(row.task, row.reason, row.status) for row in letters(connection)]
    print(found)
    letter = next(row for row in letters(connection) if row.task == "web.order")
    page = browser("otto").get(f"/letters/{letter.id}")
    said = re.sub(r"\s+", " ", shown(page))
    print(said[said.index("What a replay would do") : said.index("What a replay would do") + 500])
    state["fails"] = False
    sent = browser("otto").post(f"/letters/{letter.id}/replay", {"reason": "open again", "confirmed": "1"})
    assert sent.status_code == 303
    stage.run()
    assert len(refunded) == 1, "the replay has called outside"
    if isinstance(why, RuntimeError):
        assert "I have read what it does" not in page.text, "nor is anything else said before it"
    assert "none is recorded" in said
    assert "refund" not in said.split("What a replay would do")[1].split("The customer has heard")[0]


# ---------------------------------------------------------------- fourth batch


def test_calls_that_still_try_are_cut_off_at_100_and_nothing_says_so(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = make_task(bank, lambda self: self.effect("charge", Provider(lost(), lost())), max_attempts=5)
    deliveries.deliver(task, key="k")
    connection.execute(
        text(
            "INSERT INTO idempotency.records SELECT (jsonb_populate_record(r, jsonb_build_object('key', 'w' || n))).*"
            " FROM idempotency.records r, generate_series(1, 149) n WHERE r.key = 'k'"
        )
    )
    page = browser("otto").get("/doubts").text
    part = page[page.index('id="tried"') :]
    assert part.count('<th scope="row">charge<br>') == 100
    said = shown(browser("otto").get("/doubts"))
    for word in ("150", "first 100", "The first", " more", "Older"):
        assert word not in said.split("Not ended: the next attempt asks")[1].split("replays the operation")[0], word


def test_failures_stop_counting_and_nothing_says_so(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 200,000, of which ones is not said either: there is no order. Here at 3 of 5."""
    task = declining(bank)
    for n in range(5):
        task.declined[n] = "gone"
        deliveries.deliver(task, n=n, key=f"k{n}")
    monkeypatch.setattr("idempotency.store.letter_pages.BOUND", 3)
    said = re.sub(r"\s+", " ", shown(browser("otto").get("/failures")))
    assert f"gone {task.name} - 3 " in said
    assert "3+" not in said


def test_sagas_of_one_moment_are_on_no_page(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """The next page begins before the time of the last one: those of the same time are skipped."""
    from idempotency.sagas import saga

    @saga("web.trip2", key="{name}", entity="name", events={"picked": "{name}"}, app=bank)
    def trip(saga: Any, name: str) -> None:
        saga.wait_for("picked", match=name, timeout=3600.0)

    deliveries.deliver(trip, "s")
    connection.execute(
        text(
            "INSERT INTO idempotency.sagas SELECT (jsonb_populate_record(g, jsonb_build_object('id', gen_random_uuid(), 'key', 'trip-' || n))).*"
            " FROM idempotency.sagas g, generate_series(1, 59) n WHERE g.key = 's'"
        )
    )
    otto, seen, at = browser("otto"), set(), "/sagas"
    for _ in range(4):
        page = otto.get(at).text
        seen |= set(re.findall(r'title="([^"]+)"', page))
        following = re.search(r'rel="next" href="([^"]+)"', page)
        if following is None:
            break
        at = html.unescape(following[1])
    assert len(seen) == 50, "of 60"


# ---------------------------------------------------------------- figures of the flow


def many(connection: Connection, key: str, count: int) -> None:
    """More records like that of this key."""
    connection.execute(
        text(
            "INSERT INTO idempotency.records SELECT (jsonb_populate_record(r, jsonb_build_object('key', r.key || n))).*"
            " FROM idempotency.records r, generate_series(1, :count) n WHERE r.key = :key"
        ),
        {"key": key, "count": count},
    )


def figures(answer: Any, queue: str) -> str:
    row = answer.text[answer.text.index(f'<th scope="row" class="mono">{queue}</th>') :]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", row[: row.index("</tr>")])).strip()


def test_the_flow_says_0_for_a_tenant_behind_others_and_no_plus(browser: Open, connection: Connection) -> None:
    """10,000 of globex are looked at, acme's 50 come after them: `0`, and not `0+` or `?`."""
    first = op.early(connection, OperationId("globex", "x", "g"), queue="payments")
    op.age(connection, first.id, available_at=60)
    many(connection, "g", 10_000)
    mine = op.early(connection, OperationId("acme", "x", "a"), queue="payments")
    op.age(connection, mine.id, available_at=600)
    many(connection, "a", 49)
    said = figures(browser("tina").get("/"), "payments")
    print(said)
    assert said == "payments 0 0 ? ? 0 0 0 0 –"


def test_the_flow_says_10000_run_where_more_do_and_no_plus(browser: Open, connection: Connection) -> None:
    op.started(connection, OperationId("acme", "x", "a"), queue="payments", token="t")
    connection.execute(
        text(
            "INSERT INTO idempotency.records SELECT (jsonb_populate_record(r, jsonb_build_object('key', r.key || n, 'token', 't' || n))).*"
            " FROM idempotency.records r, generate_series(1, 10100) n WHERE r.key = 'a'"
        )
    )
    said = figures(browser("otto").get("/"), "payments")
    print(said)
    assert "10 000" in said
    assert "+" not in said


def test_the_flow_counts_what_a_tenant_has_ended_without_a_plus(browser: Open, connection: Connection) -> None:
    """acme: one that ended just now, and 50 half an hour ago; between them 10,000 of globex: `1`."""
    op.completed(connection, OperationId("acme", "x", "a"), queue="payments")
    many(connection, "a", 50)
    connection.execute(text("UPDATE idempotency.records SET completed_at = clock_timestamp() - interval '30 minutes'"))
    op.completed(connection, OperationId("globex", "x", "g"), queue="payments")
    many(connection, "g", 10_000)
    op.completed(connection, OperationId("acme", "x", "new"), queue="payments")
    said = figures(browser("tina").get("/"), "payments")
    print(said)
    assert re.search(r"\b1 0 \d+ s$", said), said
    assert "+" not in said


def test_a_process_that_an_observer_has_noted_is_listed_and_its_page_is_not_there(
    browser: Open, bank: Celery, connection: Connection
) -> None:
    from idempotency.application import runtime_of
    from idempotency.sagas import observe

    with runtime_of(bank).engine.begin() as own:
        observe(own, "placement", "order-7", "requested", None, status="RUNNING", app=bank)
    otto = browser("otto")
    page = otto.get("/sagas").text
    assert "order-7" in page
    path = html.unescape(re.search(r'href="(/saga\?[^"]+)"', page)[1])  # type: ignore[index]
    assert otto.get(path).status_code == 404


def test_the_tenants_of_another_application_are_listed(browser: Open, connection: Connection) -> None:
    op.completed(connection, OperationId("secret-customer-of-shop", "shop.pay", "k"))
    connection.execute(text("UPDATE idempotency.records SET service = 'shop'"))
    otto = browser("otto")
    assert "secret-customer-of-shop" in otto.get("/tenants").text
    assert "secret-customer-of-shop" not in otto.get("/operations").text


def test_a_path_with_a_slash_at_its_end_leads_to_plain_http(browser: Open) -> None:
    """Behind a proxy the server sees http: its redirect leaves TLS."""
    import asyncio

    otto = browser("otto")
    (cookie,) = (each for each in otto.client.cookies.jar if each.name == "__Host-idempotency")

    async def ask() -> Any:
        transport = httpx.ASGITransport(otto.client.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://ops.test") as client:  # as uvicorn sees it
            return await client.get("/letters/", headers={"Cookie": f"__Host-idempotency={cookie.value}"})

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.headers["location"]) == (307, "http://ops.test/letters")


# ---------------------------------------------------------------- several processes, restarts, links


def test_the_pages_of_two_applications_on_one_machine_take_each_others_sessions(bank: Celery) -> None:
    """A cookie has no port: with the page of a second application open, each form of the first is refused."""
    from idempotency.web.application import create_app
    from tests.support.asgi import Client

    shop, other = create_app(bank, port=8500), create_app(bank, port=8501)
    with Client(shop, "http://127.0.0.1:8500") as one, Client(other, "http://127.0.0.1:8501") as two:
        one.get("/")
        csrf = re.search(r'name="csrf" value="([^"]+)"', one.get("/doubts").text)
        mine = one.cookies["idempotency"]
        visitor = shop.state.desk.sessions.visitor(mine)
        # the browser sends it to the other port as well, which makes a new one in its place
        two.cookies.set("idempotency", mine, domain="127.0.0.1")
        two.cookies.clear()
        two.get("/", headers={"Cookie": f"idempotency={mine}"})
        theirs = two.cookies["idempotency"]
        assert theirs != mine
        one.cookies.clear()
        sent = one.post(
            "/letters/1/replay",
            data={"csrf": visitor.csrf, "reason": "x"},
            headers={"Origin": "http://127.0.0.1:8500", "Cookie": f"idempotency={theirs}"},
        )
        assert (sent.status_code, "the form is of another session" in sent.text) == (403, True)
        assert csrf is None or csrf
    shop.state.desk.close()
    other.state.desk.close()


def test_a_bulk_of_a_page_with_a_token_is_lost_when_its_process_begins_again(
    bank: Celery, connection: Connection, deliveries: Deliveries
) -> None:
    """Docs: "the page's address has the signed list, so it can be looked at from any process, later". Its secret is the process's."""
    from idempotency.operate.change import Change
    from idempotency.operate.people import add_operator
    from idempotency.web.application import create_app
    from tests.support.asgi import Client

    task = declining(bank)
    for n in range(2):
        task.declined[n] = "gone"
        deliveries.deliver(task, n=n, key=f"k{n}")
    token = add_operator(connection, Change("setup", "tests"), "ann", "operator", days=1)
    app = create_app(bank, token=token)
    with Client(app, "http://localhost:8500") as client:
        client.get("/")
        csrf = app.state.desk.sessions.visitor(client.cookies["idempotency"]).csrf
        form = {"csrf": csrf, "reason": "again", "confirmed": "1", "only_reason": "gone"}
        at = client.post("/bulk/begin", data=form, headers={"Origin": "http://localhost:8500"}).headers["location"]
        assert "0 of 2 completed" in shown(client.get(at))
    app.state.desk.close()
    again = create_app(bank, token=token)
    with Client(again, "http://localhost:8500") as client:
        answer = client.get(at)
        assert (answer.status_code, "no bulk replay of this page" in answer.text) == (409, True)
    again.state.desk.close()


def test_opening_a_link_sends_the_next_stage(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """For a week: a tab that a browser restores, or a link in a chat, replays the rest one second after it is opened."""
    task = declining(bank)
    for n in range(20):
        task.declined[n] = "gone"
        deliveries.deliver(task, n=n, key=f"k{n:02}")
    task.declined.clear()
    otto = browser("otto")
    begun = otto.post(
        "/bulk/begin", {"only_reason": "gone", "reason": "again", "confirmed": "1", "goes_on": "1"}
    ).headers["location"]
    of = dict(HIDDEN.findall(otto.get(begun).text.split('action="/bulk/next"')[1]))["of"]
    otto.post("/bulk/next", {"of": of})
    deliver_all(bank, deliveries, connection)
    next_morning = browser("otto").get(begun).text
    assert '<form method="post" action="/bulk/next" data-submit="1">' in next_morning
    assert "Replay the next 10" in next_morning


def test_two_tabs_that_send_a_stage_at_once(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """Sound? Each letter is to be replayed once, whatever is said."""
    task = declining(bank)
    for n in range(12):
        task.declined[n] = "gone"
        deliveries.deliver(task, n=n, key=f"k{n:02}")
    task.declined.clear()
    one, two = browser("otto"), browser("otto")
    begun = one.post("/bulk/begin", {"only_reason": "gone", "reason": "again", "confirmed": "1"}).headers["location"]
    of = dict(HIDDEN.findall(one.get(begun).text.split('action="/bulk/next"')[1]))["of"]
    one.post("/bulk/next", {"of": of})
    deliver_all(bank, deliveries, connection)
    forms = [(each, each.csrf()) for each in (one, two)]
    said: list[str] = []

    def send(page: Any, csrf: str) -> None:
        answer = page.post("/bulk/next", {"of": of}, csrf=csrf)
        said.append(f"{answer.status_code} " + (re.sub(r"\s+", " ", shown(page.get(answer.headers["location"])))[200:420] if answer.status_code == 303 else ""))

    threads = [threading.Thread(target=send, args=each) for each in forms]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    print(said)
    replayed = [row.key for row in audited(connection, "replay")]
    assert sorted(replayed) == [f"k{n:02}" for n in range(11)]


# ---------------------------------------------------------------- a bad deploy


def test_a_bulk_of_what_no_worker_knew_never_goes_beyond_its_first_letter(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """`unknown_task`, the letters of a bad deploy: they name no operation, and are not told of it when they are replayed."""
    from idempotency.letters.consumer import DeadLetterConsumer
    from tests.support.dead_messages import body_of, headers, publish

    consumer = DeadLetterConsumer(bank)
    try:
        consumer.run_once()
        dead = f"{bank.conf.task_default_queue}-dead"
        death = {"x-death": [{"queue": bank.conf.task_default_queue, "reason": "rejected"}]}
        for account in ("u1", "u2"):
            publish(bank, body_of(account), queue=dead, headers=headers(task="web.soon") | death)
        for _ in range(100):
            consumer.run_once()
            if len(letters(connection)) == 2:
                break
            time.sleep(0.1)
    finally:
        consumer.close()
    print([(row.reason, row.tenant, row.task, row.header_task, row.key) for row in letters(connection)])

    @bank.task(base=IdempotentTask, bind=True, name="web.soon", key="{account}", shared=False)
    def soon(self: Any, account: str) -> str:
        return "ok"

    try:
        otto = browser("otto")
        begun = otto.post(
            "/bulk/begin", {"only_reason": "unknown_task", "reason": "deployed", "confirmed": "1"}
        ).headers["location"]
        of = dict(HIDDEN.findall(otto.get(begun).text.split('action="/bulk/next"')[1]))["of"]
        print(re.sub(r"\s+", " ", shown(otto.get(otto.post("/bulk/next", {"of": of}).headers["location"])))[150:420])
        assert deliver_all(bank, deliveries, connection) == 1
        assert connection.execute(text("SELECT status FROM idempotency.records WHERE task = 'web.soon'")).scalars().all() == ["completed"]
        said = re.sub(r"\s+", " ", shown(otto.get(begun)))
        assert "0 of 2 completed · 1 running · 1 waiting" in said
        assert "those before have not ended yet" in shown(otto.post("/bulk/next", {"of": of}))
    finally:
        bank.tasks.pop("web.soon", None)


# ---------------------------------------------------------------- fifth batch


def test_what_a_tenant_has_accepted_is_on_no_page_behind_5000_of_others(
    browser: Open, bank: Celery, connection: Connection
) -> None:
    """A list of what has ended says "Go on"; that of what is accepted just ends."""
    b.enqueue_deposit()
    copy = (
        "INSERT INTO idempotency.outbox OVERRIDING SYSTEM VALUE SELECT (jsonb_populate_record(o, jsonb_build_object('id', o.id + n, 'key', cast(:key AS text) || n, 'tenant',"
        " cast(:tenant AS text), 'message_id', gen_random_uuid()::text))).* FROM idempotency.outbox o,"
        " generate_series(cast(:first AS int), cast(:last AS int)) n WHERE o.id = (SELECT min(id) FROM idempotency.outbox)"
    )
    connection.execute(text(copy), {"key": "g", "tenant": "globex", "first": 1, "last": 5001})
    connection.execute(text(copy), {"key": "mine", "tenant": "acme", "first": 6000, "last": 6000})
    page = browser("tina").get("/operations?stage=accepted")
    assert "none among those that were looked at" in page.text
    assert "Go on" not in page.text
    # nor does one who sees all find it with a filter
    filtered = browser("otto").get("/operations?stage=accepted&tenant=acme")
    assert "mine6000" not in filtered.text
    assert "Go on" not in filtered.text


def test_a_relay_that_was_killed_hours_ago_counts_as_running(browser: Open, connection: Connection) -> None:
    insert = (
        "INSERT INTO idempotency.processes (kind, name, host, pid, service, version, queues, started_at, seen_at)"
        " VALUES ('relay', 'r@h', 'h', 7, 'bank', '1.2.3', '{}', now() - interval '9 hours', now() - interval '3 hours')"
    )
    assert "No relay is running" in shown(browser("otto").get("/"))
    connection.execute(text(insert))
    browser("otto").client.app.state.desk.forget()
    said = shown(browser("otto").get("/"))
    assert re.search(r"3 h\s+silent", said)
    assert "No relay is running" not in said


def test_a_reason_reads_backwards_to_the_one_who_approves(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """Elsewhere what a terminal would obey is escaped; in the approvals, and beside the letter, it is not."""
    deliveries.deliver(b.failing, "a1", "permanent")
    (letter,) = letters(connection)
    assert browser("otto").post(f"/letters/{letter.id}/discard", {"reason": "ok \u202egnp.tcepsus\u2066"}).status_code == 303
    assert "\u202e" in browser("anna").get("/approvals").text
    assert "\u202e" in browser("anna").get(f"/letters/{letter.id}").text


def test_ask_the_provider_repeats_the_call_of_a_task_that_cannot_ask(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, engine: Engine
) -> None:
    """One click, without a question or a reason of one's own: the button says "Ask the provider now" and the customer's card is called again."""
    provider = Provider(lost(), lost())
    task = make_task(bank, lambda self: self.effect("charge", provider), max_attempts=2)
    for _ in range(3):
        deliveries.deliver(task, key="k")
        make_due(engine, "k")
    called = len(provider.keys)
    otto = browser("otto")
    page = otto.get("/doubts").text
    form = {html.unescape(n): html.unescape(v) for n, v in HIDDEN.findall(page.split('action="/doubts/ask"')[1].split("</form>")[0])}
    assert "Ask the provider now</button>" in page
    assert otto.client.post("/doubts/ask", data=form, headers={"Origin": PAGE}).status_code == 303
    deliver_all(bank, deliveries, connection)
    assert len(provider.keys) == called + 1, "called, not asked"
    assert [row.reason for row in audited(connection, "replay")] == ["ask the provider"]
    # the process knows the task, and could know
    assert task.name in bank.tasks


def test_the_preview_says_that_it_runs_though_its_message_cannot_be_read(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = declining(bank)
    task.declined[1] = "gone"
    deliveries.deliver(task, n=1, key="k")
    (letter,) = letters(connection)
    connection.execute(text("UPDATE idempotency.dead_letters SET payload = 'no message'"))
    connection.execute(text("UPDATE idempotency.records SET message = ''"))
    otto = browser("otto")
    said = shown(otto.get(f"/letters/{letter.id}"))
    sent = otto.post(f"/letters/{letter.id}/replay", {"reason": "x", "confirmed": "1"})
    print(sent.status_code, shown(sent)[-300:])
    assert "Its body runs again" in said
    assert sent.status_code == 409


def test_a_flow_that_gets_nothing_is_shown_as_fresh(bank: Celery, engine: Engine) -> None:
    """Each new stream begins with `retry:`, which is enough for the page to take "stale" away; then nothing comes, and it ends."""
    from tests.support.page_address import free_port

    import uvicorn

    from idempotency.web.application import create_app
    from tests.support.processes import eventually

    port = free_port()
    app = create_app(bank, port=port)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started, what="the page")
    blocker = engine.connect().execution_options(isolation_level="READ COMMITTED")
    began = blocker.begin()
    blocker.execute(text("LOCK TABLE idempotency.outbox IN ACCESS EXCLUSIVE MODE"))
    lines: list[tuple[float, str]] = []
    since = time.monotonic()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            with client.stream("GET", "/live") as live:
                status = live.status_code
                try:
                    for line in live.iter_lines():
                        lines.append((round(time.monotonic() - since, 1), line))
                except httpx.HTTPError as error:
                    lines.append((round(time.monotonic() - since, 1), type(error).__name__))
    finally:
        began.rollback()
        blocker.close()
        server.should_exit = True
        thread.join(10)
    print(status, lines)
    assert status == 200
    assert lines[0][1].startswith("retry:") and lines[0][0] < 2
    assert not [line for _, line in lines if line.startswith("data:")]
    assert lines[-1][0] > 4
    script = (app.routes and __import__("pathlib").Path("idempotency/web/static/page.js").read_text())
    assert 'source.onopen = () => part.classList.remove("stale")' in script


def test_a_person_with_fewer_tenants_than_when_it_began_goes_on_past_what_failed(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """The failures of letters that a person may not see any more do not stop the stages."""
    from idempotency.operate.people import Person

    task = declining(bank)
    for n in range(3):
        task.declined[n] = "gone"
        deliveries.deliver(task, n=n, key=f"k{n}", tenant="globex" if n == 0 else "acme")
    otto = browser("otto")
    begun = otto.post("/bulk/begin", {"only_reason": "gone", "reason": "again", "confirmed": "1"}).headers["location"]
    of = dict(HIDDEN.findall(otto.get(begun).text.split('action="/bulk/next"')[1]))["of"]
    otto.post("/bulk/next", {"of": of})
    deliver_all(bank, deliveries, connection)  # globex's fails again
    assert "1 failed again" in shown(otto.get(begun))
    narrower = Person("otto", "operator", bank.conf["idempotency_oidc_issuer"], tenants=frozenset({"acme"}))
    otto.client.cookies.clear()
    otto.client.cookies.set("__Host-idempotency", otto.client.app.state.desk.sessions.begin(narrower), domain="ops.test")
    sent = otto.post("/bulk/next", {"of": of})
    assert sent.status_code == 303
    assert "2 replayed." in shown(otto.get(sent.headers["location"]))


def test_purged_letters_let_a_bulk_go_on_past_what_failed(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """What is gone counts as nothing: neither as failed nor as not ended."""
    task = declining(bank)
    for n in range(3):
        task.declined[n] = "gone"
        deliveries.deliver(task, n=n, key=f"k{n}")
    otto = browser("otto")
    begun = otto.post("/bulk/begin", {"only_reason": "gone", "reason": "again", "confirmed": "1"}).headers["location"]
    of = dict(HIDDEN.findall(otto.get(begun).text.split('action="/bulk/next"')[1]))["of"]
    otto.post("/bulk/next", {"of": of})
    deliver_all(bank, deliveries, connection)
    assert "1 failed again" in shown(otto.get(begun))
    connection.execute(text("DELETE FROM idempotency.dead_letters WHERE key = 'k0'"))
    sent = otto.post("/bulk/next", {"of": of})
    assert sent.status_code == 303
    assert "2 replayed." in shown(otto.get(sent.headers["location"]))


def test_a_result_of_another_type_is_recorded_as_it_was_typed(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, engine: Engine
) -> None:
    """The check lets "1250" pass for a number (pydantic's lax mode), and what is recorded is the text: the body gets that."""
    from pydantic import BaseModel

    class Charge(BaseModel):
        charge: str
        cents: int

    seen: list[Any] = []

    def body(self: Any) -> Any:
        answer = self.effect("charge", Provider(lost(), lost(), lost()))
        seen.append(answer["cents"] * 2)
        return answer

    task = make_task(bank, body, max_attempts=2, effect_types={"charge": Charge})
    for _ in range(3):
        deliveries.deliver(task, key="k")
        make_due(engine, "k")
    row = connection.execute(text("SELECT * FROM idempotency.records")).one()
    (letter,) = letters(connection)
    otto = browser("otto")
    form = {"tenant": row.tenant, "task": row.task, "key": "k", "effect": "charge", "status": row.status, "fence": str(row.fence),
            "outcome": "happened", "result": '{"charge": "ch_1", "cents": "1250"}', "reason": "found"}  # fmt: skip
    assert otto.post("/doubts/resolve", form).status_code == 303
    assert otto.post(f"/letters/{letter.id}/replay", {"reason": "goes on"}).status_code == 303
    deliver_all(bank, deliveries, connection)
    assert seen == ["12501250"]


def test_health_says_ok_without_a_database(browser: Open, engine: Engine) -> None:
    otto = browser("otto")
    blocker = engine.connect().execution_options(isolation_level="READ COMMITTED")
    began = blocker.begin()
    blocker.execute(text("LOCK TABLE idempotency.records IN ACCESS EXCLUSIVE MODE"))
    try:
        assert otto.get("/operations").status_code == 503
        assert (otto.get("/health").status_code, otto.get("/health").text) == (200, "ok\n")
    finally:
        began.rollback()
        blocker.close()
