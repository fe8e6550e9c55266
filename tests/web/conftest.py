"""The page over real Postgres and the company's login, with people and work of two tenants."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine

from idempotency.operate.people import Person
from idempotency.web.application import create_app
from tests.support import company as companies
from tests.support.asgi import Client
from tests.support.company import Company
from tests.support.deliveries import Deliveries

PAGE = "https://ops.test"
HIDDEN = re.compile(r'name="(\w+)" value="([^"]*)"')


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    """Each statement commits."""
    with engine.connect() as connection:
        yield connection


@pytest.fixture(scope="session")
def company() -> Iterator[Company]:
    with companies.running() as running:
        yield running


class Browser:
    """One person's browser."""

    def __init__(self, client: Client, company: Company) -> None:
        self.client, self._company = client, company

    def log_in(self, who: str) -> Any:
        """By the company; returns the page that the person arrives at."""
        begun = self.client.get("/login")
        assert begun.status_code == 303, begun.text
        back = self._company.authorize(begun.headers["location"], who)
        return self.client.get(back.removeprefix(PAGE))

    def get(self, path: str, **options: Any) -> Any:
        return self.client.get(path, **options)

    def csrf(self, path: str = "/approvals") -> str:
        """The text that this session's forms have."""
        found = re.search(r'name="csrf" value="([^"]+)"', self.client.get(path).text)
        assert found is not None
        return found[1]

    def post(self, path: str, fields: dict[str, Any], *, origin: str | None = PAGE, csrf: str | None = None) -> Any:
        """Send a form of the page."""
        headers = {} if origin is None else {"Origin": origin}
        data = {"csrf": self.csrf() if csrf is None else csrf} | fields
        return self.client.post(path, data=data, headers=headers)


Open = Callable[..., Browser]


def tick(page: Any) -> str:
    """What the page has in its tick for having read its warnings."""
    found = re.search(r'name="confirmed" value="([^"]+)"', page.text)
    assert found is not None
    return found[1]


@pytest.fixture
def browser(bank: Celery, configure: Callable[..., None], company: Company) -> Iterator[Open]:
    """Opens the page for a person with a session, which `by_company` a real login begins; for None, without one."""
    configure(**company.settings(PAGE))
    with ExitStack() as stack:
        app = create_app(bank)
        stack.callback(app.state.desk.close)

        def opened(who: str | None, *, by_company: bool = False) -> Browser:
            client = Client(app, PAGE)
            stack.callback(client.close)
            found = Browser(client, company)
            if who is not None and by_company:
                assert found.log_in(who).status_code == 200
            elif who is not None:  # the session that the login would begin
                role, tenants = companies.PEOPLE[who]
                assert role is not None
                scope = None if "*" in tenants else frozenset(tenants)
                person = Person(who, role, bank.conf["idempotency_oidc_issuer"], tenants=scope)
                client.cookies.set("__Host-idempotency", app.state.desk.sessions.begin(person), domain="ops.test")
            return found

        yield opened


@pytest.fixture
def deliveries(bank: Celery) -> Deliveries:
    return Deliveries(bank)
