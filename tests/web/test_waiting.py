"""What is answered while servers are silent: each waits for one of them once, and the rest of the page does not."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text

from idempotency.web import desk as desks
from tests.web.conftest import PAGE, Open
from tests.web.test_cookies import session_of


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements of pages that are opened from here on end sooner."""
    monkeypatch.setattr(desks, "STATEMENT", 1_500)


@pytest.fixture
def blocked(engine: Engine) -> Iterator[Any]:
    """The database answers no question about the outbox until this is called."""
    blocker = engine.connect().execution_options(isolation_level="READ COMMITTED")
    began = blocker.begin()
    blocker.execute(text("LOCK TABLE idempotency.outbox IN ACCESS EXCLUSIVE MODE"))
    yield began.rollback
    if began.is_active:
        began.rollback()
    blocker.close()


def client_of(app: Any, cookie: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=PAGE, timeout=120, cookies={"__Host-idempotency": cookie})


@pytest.mark.long
def test_all_who_wait_for_one_look_are_told_at_once_that_it_has_failed(
    impatient: None, browser: Open, blocked: Any
) -> None:
    otto = browser("otto")
    app = otto.client.app

    async def ask() -> tuple[list[int], float]:
        async with client_of(app, session_of(otto)) as client:
            since = time.monotonic()
            answers = await asyncio.gather(*(client.get("/") for _ in range(6)))
            return [answer.status_code for answer in answers], time.monotonic() - since

    statuses, took = asyncio.run(ask())
    assert statuses == [503] * 6
    assert took < 2.5 * desks.STATEMENT / 1000


@pytest.mark.long
def test_health_and_static_files_are_answered_while_pages_wait(browser: Open, blocked: Any) -> None:
    otto = browser("otto")
    app = otto.client.app

    async def ask() -> list[int]:
        async with client_of(app, session_of(otto)) as client:
            waiting = [asyncio.create_task(client.get("/")) for _ in range(45)]
            await asyncio.sleep(1)
            answers = [await asyncio.wait_for(client.get(path), 3) for path in ("/health", "/static/page.js")]
            assert not waiting[0].done()
            await asyncio.get_running_loop().run_in_executor(None, blocked)
            await asyncio.gather(*waiting)
            return [answer.status_code for answer in answers]

    assert asyncio.run(ask()) == [200, 200]


@pytest.mark.long
def test_an_issuer_that_is_silent_keeps_the_page_from_nobody_who_has_logged_in(browser: Open) -> None:
    otto = browser("otto")
    app = otto.client.app
    login = app.state.desk.login
    with socket.create_server(("127.0.0.1", 0), backlog=200) as silent:
        issuer = f"http://127.0.0.1:{silent.getsockname()[1]}"
        login._settings = login._settings.model_copy(update={"oidc_issuer": issuer})

        async def ask() -> tuple[int, list[int], float]:
            async with client_of(app, session_of(otto)) as client:
                since = time.monotonic()
                strangers = [asyncio.create_task(client.get("/login")) for _ in range(45)]
                await asyncio.sleep(0.5)
                mine = await asyncio.wait_for(client.get("/approvals"), 4)
                answers = await asyncio.gather(*strangers)
                return mine.status_code, [each.status_code for each in answers], time.monotonic() - since

        mine, theirs, took = asyncio.run(ask())
    assert (mine, {*theirs}) == (200, {403})
    assert took < 12, "none waits after another"
