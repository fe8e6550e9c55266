"""Who gets in, as whom, and what of it a request must have: login, roles, CSRF, headers, hosts, tenants."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text

from idempotency.application import runtime_of
from idempotency.errors import NotAllowed, NotAuthenticated, SettingsError
from idempotency.operate.change import Change
from idempotency.operate.people import add_operator
from idempotency.operate.replay import replay
from idempotency.operate.reveal import reveal, reveal_letter
from idempotency.web import gate
from idempotency.web.application import create_app
from idempotency.wire.keys import OperationId
from tests.support import bank as b
from tests.support import operations as op
from tests.support.asgi import Client
from tests.support.deliveries import Deliveries
from tests.web.conftest import PAGE, Open, tick

PAGES = ("/", "/failures", "/letters", "/doubts", "/approvals", "/operations", "/sagas", "/tenants")


def letters(connection: Connection) -> list[Any]:
    return list(op.dead_letters(connection))


def actions(connection: Connection) -> list[tuple[str, str]]:
    rows = connection.execute(text("SELECT actor, action FROM idempotency.audit ORDER BY id"))
    return [(row.actor, row.action) for row in rows]


# ---------------------------------------------------------------- login


def test_a_person_logs_in_by_the_company_and_out_again(browser: Open) -> None:
    page = browser(None)
    for path in PAGES:
        answer = page.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, f"/login?next=%2F{path[1:]}")
    arrived = page.log_in("otto")
    assert "otto, operator" in arrived.text
    cookie = next(each for each in arrived.headers.get_list("set-cookie") if each.startswith("__Host-idempotency="))
    assert {"Secure", "HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert "Domain" not in cookie
    for path in PAGES:
        answer = page.get(path)
        assert (answer.status_code, "otto · operator" in answer.text) == (200, True), path
    assert page.post("/logout", {}).status_code == 200
    assert page.get("/").status_code == 303


def test_who_has_no_role_is_refused_and_noted(browser: Open, connection: Connection) -> None:
    page = browser(None)
    refused = page.log_in("eve")
    assert (refused.status_code, "is in none of the groups" in refused.text) == (403, True)
    assert page.get("/").status_code == 303
    assert actions(connection) == [("unknown", "refused")]


def test_a_login_that_another_browser_has_begun_is_refused(browser: Open, company: Any) -> None:
    """An attacker who sends somebody the end of their own login would act as them."""
    one, other = browser(None), browser(None)
    back = company.authorize(one.get("/login").headers["location"], "otto").removeprefix(PAGE)
    assert other.get(back).status_code == 403
    other.get("/login")
    assert other.get(back).status_code == 403
    assert other.get("/").status_code == 303
    assert one.get(back).status_code == 200
    assert one.get(back).status_code == 403, "a code is taken once"


@pytest.mark.long
def test_a_login_leads_to_this_page_and_no_other(browser: Open, company: Any) -> None:
    page = browser(None)
    for wanted, leads in (
        ("/letters?reason=x", "/letters?reason=x"),
        ("//evil.example", "/"),
        ("https://evil.example", "/"),
    ):
        begun = page.get("/login", params={"next": wanted})
        arrived = page.get(company.authorize(begun.headers["location"], "otto").removeprefix(PAGE))
        assert f'content="0; url={leads}"' in arrived.text.replace("&amp;", "&")


def test_a_session_is_over_in_time_and_no_other_text_is_one(
    browser: Open, bank: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = browser("otto")
    (cookie,) = (each for each in page.client.cookies.jar if each.name == "__Host-idempotency")
    later = time.time() + runtime_of(bank).settings.web_session + 1
    monkeypatch.setattr("idempotency.web.access.time.time", lambda: later)
    assert page.get("/").status_code == 303
    monkeypatch.undo()
    assert page.get("/").status_code == 200
    name, value = cookie.name, cookie.value
    assert value is not None
    for forged in (value[:-2] + "xx", "x", value.swapcase(), ""):
        page.client.cookies.clear()
        page.client.cookies.set(name, forged)
        assert page.get("/").status_code == 303


def test_where_others_reach_it_people_have_to_log_in(
    bank: Celery, configure: Callable[..., None], company: Any
) -> None:
    with pytest.raises(SettingsError, match=r"--host 0\.0\.0\.0: .*idempotency_web_secret"):
        create_app(bank, host="0.0.0.0")
    configure(**company.settings("http://127.0.0.1:8500"))
    with pytest.raises(SettingsError, match="idempotency_web_url has to begin with https://"):
        create_app(bank, host="0.0.0.0")
    configure(web_url=PAGE)
    create_app(bank, host="0.0.0.0").state.desk.close()


# ---------------------------------------------------------------- this machine alone


def test_without_a_login_everyone_is_a_reader(bank: Celery, deliveries: Deliveries, connection: Connection) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    (letter,) = letters(connection)
    app = create_app(bank, port=8500)
    with Client(app, "http://127.0.0.1:8500") as client:
        assert "reader · reader" in client.get("/").text
        csrf = app.state.desk.sessions.visitor(client.cookies["idempotency-8500"]).csrf
        for path in ("replay", "discard", "reveal"):
            sent = client.post(
                f"/letters/{letter.id}/{path}",
                data={"csrf": csrf, "reason": "x"},
                headers={"Origin": "http://127.0.0.1:8500"},
            )
            assert (sent.status_code, "needs the role operator" in sent.text) == (403, True)
    assert actions(connection) == []


def test_with_a_token_the_page_is_its_owners(bank: Celery, connection: Connection, deliveries: Deliveries) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    (letter,) = letters(connection)
    token = add_operator(connection, Change("setup", "tests"), "ann", "operator", days=1)
    with pytest.raises(NotAuthenticated):
        create_app(bank, token="another")
    app = create_app(bank, token=token)
    with Client(app, "http://localhost:8500") as client:
        assert "ann · operator" in client.get("/").text
        csrf = app.state.desk.sessions.visitor(client.cookies["idempotency-8500"]).csrf
        form = {"csrf": csrf, "reason": "again", "confirmed": tick(client.get(f"/letters/{letter.id}"))}
        sent = client.post(f"/letters/{letter.id}/replay", data=form, headers={"Origin": "http://localhost:8500"})
        assert sent.status_code == 303
    assert ("ann", "replay") in actions(connection)


def test_no_name_that_others_point_at_this_machine_is_answered(bank: Celery) -> None:
    app = create_app(bank)
    with Client(app, "http://127.0.0.1:8500") as client:
        assert client.get("/health").status_code == 200
        for host in ("evil.example", "127.0.0.1.evil.example:8500", "127.0.0.1", "127.0.0.1:8501"):
            assert client.get("/health", headers={"Host": host}).status_code == 421


# ---------------------------------------------------------------- what every request and answer has


@pytest.mark.long
def test_every_answer_has_the_headers_and_no_script_or_style_of_its_own(browser: Open) -> None:
    page = browser("otto")
    for path in (
        *PAGES,
        "/runbooks/README",
        "/nothing",
        "/letters/999999",
        "/letters?before=x",
        "/static/page.js",
        "/health",
    ):
        answer = page.get(path)
        for name, value in gate.HEADERS.items():
            if name != "cache-control":
                assert answer.headers[name] == value, path
        assert answer.headers["strict-transport-security"].startswith("max-age=")
        assert "unsafe" not in answer.headers["content-security-policy"]
        lower = answer.text.lower()
        assert "<style" not in lower
        assert " style=" not in lower
        assert " onclick=" not in lower
        assert lower.count("<script") == lower.count('<script src="/static/')
        assert answer.headers["cache-control"] == ("no-cache" if path.startswith("/static/") else "no-store")


@pytest.mark.long
def test_a_form_of_another_page_or_session_changes_nothing(
    browser: Open, deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    (letter,) = letters(connection)
    page = browser("otto")
    form = {"reason": "x", "confirmed": tick(page.get(f"/letters/{letter.id}"))}
    own, other = page.csrf(), browser("olga").csrf()
    wrong: list[dict[str, Any]] = [{"csrf": each} for each in ("wrong", "", other)]
    wrong += [{"csrf": own, "origin": each} for each in ("https://evil.example", "null", None)]
    for options in wrong:
        assert page.post(f"/letters/{letter.id}/replay", form, **options).status_code == 403, options
    assert [each.status for each in letters(connection)] == ["open"]
    assert page.post(f"/letters/{letter.id}/replay", form, csrf=own).status_code == 303


def test_only_bounded_forms_are_read(browser: Open) -> None:
    page = browser("otto")
    headers = {"Origin": PAGE}
    assert page.client.post("/logout", json={}, headers=headers).status_code == 415
    assert page.client.post(
        "/logout", content=b"%ff=1", headers=headers | {"Content-Type": "application/x-www-form-urlencoded"}
    ).status_code in (400, 403)
    assert page.post("/logout", {"x": "y" * gate.FORM}).status_code == 413
    assert page.post("/logout", {f"f{n}": "1" for n in range(gate.FIELDS)}).status_code == 400
    assert page.client.request("PUT", "/letters").status_code == 405
    assert page.client.post("/letters/1/replay", headers={"Origin": PAGE}).status_code == 415


# ---------------------------------------------------------------- tenants


@pytest.mark.long
def test_an_operator_of_one_tenant_neither_sees_nor_changes_another(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    for tenant in ("acme", "globex"):
        deliveries.deliver(b.failing, f"key-of-{tenant}", "permanent", tenant=tenant)
        deliveries.deliver(b.deposit, f"done-of-{tenant}", tenant=tenant)
    mine, other = sorted(letters(connection), key=lambda letter: letter.tenant)
    page = browser("tina", by_company=True)
    paths = [
        *PAGES,
        "/letters?status=all",
        "/letters?tenant=globex",
        "/operations?tenant=globex",
        "/operations?stage=accepted",
    ]
    seen = "".join(page.get(path).text for path in paths)
    assert "key-of-acme" in seen
    assert "done-of-acme" in seen
    assert "of-globex" not in seen
    assert "globex" not in seen.replace('value="globex"', "").replace("tenant=globex", "")
    task = b.failing.name
    hidden = page.get("/operation", params={"tenant": "globex", "task": task, "key": "key-of-globex"})
    absent = page.get("/operation", params={"tenant": "globex", "task": task, "key": "nothing"})
    assert (hidden.status_code, absent.status_code) == (404, 404)
    assert page.get(f"/letters/{other.id}").status_code == 404
    assert "No operation that you may see" in page.get("/operations", params={"key": "key-of-globex"}).text
    named = {"tenant": "globex", "task": task, "key": "key-of-globex", "reason": "x", "confirmed": "1"}
    before = actions(connection)
    for path, fields in [
        (f"/letters/{other.id}/replay", named),
        (f"/letters/{other.id}/discard", named),
        (f"/letters/{other.id}/reveal", named),
        ("/operation/reveal", named),
        ("/operation/cancel", named | {"status": "failed"}),
        ("/operation/release", named | {"status": "failed"}),
        ("/doubts/ask", {"letter": other.id, "reason": "x"}),
        ("/doubts/resolve", named | {"effect": "call", "outcome": "not_happened", "status": "failed"}),
        ("/saga/cancel", named),
        ("/saga/retry", named),
    ]:
        assert page.post(path, fields).status_code == 404, path
    assert page.post("/bulk/begin", {"only_tenant": "globex", "reason": "x"}).status_code == 409
    assert actions(connection) == before
    assert [each.status for each in letters(connection)] == ["open", "open"]
    confirmed = tick(page.get(f"/letters/{mine.id}"))
    assert page.post(f"/letters/{mine.id}/replay", {"reason": "mine", "confirmed": confirmed}).status_code == 303
    assert actions(connection) == [("tina", "replay")]


def test_who_has_no_tenant_sees_no_operation(browser: Open, deliveries: Deliveries) -> None:
    deliveries.deliver(b.failing, "key-1", "permanent")
    page = browser("nils")
    assert all("key-1" not in page.get(path).text for path in PAGES)


def test_the_functions_behind_the_page_refuse_another_tenant_by_themselves(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """Also where a page would have let it pass: each change asks again, in its transaction."""
    deliveries.deliver(b.failing, "a1", "permanent", tenant="globex")
    (letter,) = letters(connection)
    page = browser("tina")
    cookie = page.client.cookies["__Host-idempotency"]
    person = page.client.app.state.desk.sessions.visitor(cookie).person
    change = Change(person.name, "x", None, is_verified=True, check_person=person.check)
    id = OperationId("globex", b.failing.name, "a1")
    for attempt in (
        lambda: replay(bank, letter.id, change),
        lambda: reveal(bank, id, change),
        lambda: reveal_letter(bank, letter.id, change),
    ):
        with pytest.raises(NotAllowed, match="not change operations of this tenant"):
            attempt()
    assert [each.status for each in letters(connection)] == ["open"]
    assert actions(connection) == []
