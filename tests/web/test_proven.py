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


def test_a_reason_with_nul(browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection) -> None:
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


# ---------------------------------------------------------------- tenants


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


def test_an_issuer_that_is_silent_keeps_the_page_from_all(browser: Open, bank: Celery, configure: Any) -> None:
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
    login._settings = login._settings.model_copy(update={"oidc_issuer": f"http://127.0.0.1:{silent.getsockname()[1]}"})
    took: list[tuple[bool, float]] = []

    async def ask() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=PAGE, timeout=300) as client:
            strangers = [asyncio.create_task(client.get("/login")) for _ in range(45)]
            await asyncio.sleep(1)
            since = time.monotonic()
            mine = asyncio.create_task(client.get("/doubts", headers={"Cookie": f"__Host-idempotency={cookie.value}"}))
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


# ---------------------------------------------------------------- fourth batch


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
