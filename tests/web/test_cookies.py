"""The session's cookie beside those of others, and as long as browsers keep one."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import httpx
import pytest
from celery import Celery

from idempotency.operate.people import Person
from idempotency.web.application import create_app
from idempotency.web.sessions import LONGEST_COOKIE
from tests.support.asgi import Client
from tests.web.conftest import PAGE, Open


def session_of(page: Any) -> str:
    """The value of the session's cookie."""
    (cookie,) = (each for each in page.client.cookies.jar if each.name == "__Host-idempotency")
    return str(cookie.value)


@pytest.mark.parametrize("theirs", ['prefs={"theme":"dark"}', "a=b c", "x[1]=2", "=;;", 'q="'])
def test_a_cookie_of_another_application_of_the_domain_changes_nothing(browser: Open, theirs: str) -> None:
    otto = browser("otto")
    mine = f"__Host-idempotency={session_of(otto)}"
    otto.client.cookies.clear()
    for cookies in (f"{theirs}; {mine}", f"{mine}; {theirs}"):
        assert otto.get("/approvals", headers={"Cookie": cookies}).status_code == 200
    assert otto.get("/approvals", headers={"Cookie": theirs}).status_code == 303


def test_a_login_whose_session_no_browser_would_keep_says_so(browser: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser drops a cookie that is too long and says nothing: the login would go round in circles."""
    page = browser(None)
    login = page.client.app.state.desk.login
    many = Person("5f2c", "operator", "https://login.example", tenants=frozenset(str(uuid4()) for _ in range(150)))
    monkeypatch.setattr(login, "end", lambda kept, answered: many)
    arrived = page.log_in("otto")
    assert (arrived.status_code, "with 150 tenants is too long for a browser" in arrived.text) == (403, True)
    assert "__Host-idempotency" not in str(arrived.headers.get_list("set-cookie"))


def test_what_a_login_keeps_of_a_long_address_fits_into_a_cookie(browser: Open) -> None:
    page = browser(None)
    for length in (100, 2_800, 3_199, 5_000):
        to_login = page.get("/bulk?of=" + "x" * (length - 9))
        left = page.get(to_login.headers["location"])
        cookie = next(each for each in left.headers.get_list("set-cookie") if each.startswith("idempotency-login="))
        assert len(cookie.split(";")[0]) <= LONGEST_COOKIE


def test_the_pages_of_two_applications_on_one_machine_keep_their_own_sessions(bank: Celery) -> None:
    """A cookie has no port."""
    shop, other = create_app(bank, port=8500), create_app(bank, port=8501)
    with Client(shop, "http://127.0.0.1:8500") as one, Client(other, "http://127.0.0.1:8501") as two:
        one.get("/approvals")
        (name,) = one.cookies
        begun = two.get("/approvals", headers={"Cookie": f"{name}={one.cookies[name]}"}).headers["set-cookie"]
        assert not begun.startswith(f"{name}=")
    shop.state.desk.close()
    other.state.desk.close()


def test_a_path_with_a_slash_at_its_end_leads_nowhere(browser: Open) -> None:
    """Behind a proxy the server sees http: a redirect by it would leave TLS."""
    otto = browser("otto")

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(otto.client.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=PAGE.replace("https", "http")) as client:
            return await client.get("/letters/", headers={"Cookie": f"__Host-idempotency={session_of(otto)}"})

    assert asyncio.run(ask()).status_code == 404
