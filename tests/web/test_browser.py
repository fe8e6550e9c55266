"""The page in a real browser: login and session, keys alone, what axe finds, and what happens without a person."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from celery import Celery
from playwright.sync_api import BrowserContext, Page, expect
from sqlalchemy import Connection, text

from services.server import free_port
from tests.support import bank as b
from tests.support import operations as op
from tests.support import page as pages
from tests.support.company import Company
from tests.support.deliveries import Deliveries, deliver_row

pytestmark = pytest.mark.skipif(pages.CHROMIUM is None, reason="chromium is not installed")
PATHS = ("/", "/failures", "/letters", "/doubts", "/approvals", "/operations", "/sagas", "/tenants", "/runbooks/README")

# As a relay would take them.
REPLAYED = """
UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()
WHERE origin = 'replay' AND status = 'pending' RETURNING *
"""


@pytest.fixture
def address(
    bank: Celery,
    configure: Callable[..., None],
    company: Company,
    deliveries: Deliveries,
    connection: Connection,
) -> Iterator[str]:
    """The page over a morning's work, where people log in."""
    port = free_port()
    configure(**company.settings(f"http://127.0.0.1:{port}"))
    pages.morning(bank, deliveries, connection)
    with pages.served(bank, port) as served:
        yield served


@pytest.fixture
def context() -> Iterator[BrowserContext]:
    with pages.chromium(viewport={"width": 1400, "height": 900}) as context:
        context.set_default_timeout(15_000)
        yield context


def serious(page: Page) -> list[str]:
    """What axe finds of the kind that keeps people out."""
    found = Axe().run(page).response["violations"]
    return [
        f"{page.url}: {each['id']}: {each['nodes'][0]['html'][:200]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.long
def test_a_person_works_in_the_page_with_a_browser(
    address: str,
    context: BrowserContext,
    company: Company,
    connection: Connection,
    deliveries: Deliveries,
    bank: Celery,
) -> None:
    page, errors = context.pages[0], []
    # of this page: the company's looks for what it does not find here
    page.on(
        "console",
        lambda said: (
            errors.append(said.text) if said.type == "error" and said.location["url"].startswith(address) else None
        ),
    )
    page.on("pageerror", lambda error: errors.append(str(error)))
    pages.log_in(page, address, company, "otto")
    (cookie,) = (each for each in context.cookies() if each["name"].startswith("idempotency-"))
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    found: list[str] = []
    page.goto(f"{address}/letters")
    found += serious(page)
    page.fill("#search", "d-0000")
    page.keyboard.press("Enter")
    page.wait_for_url("**/operation?**")
    page.goto(f"{address}/doubts")
    page.locator("a.button:has-text('Resolve')").first.click()
    page.wait_for_url("**/doubts/resolve?**")
    found += serious(page)
    assert found == []
    # keys alone: the first leads past the navigation, and what has the focus can be seen
    page.goto(f"{address}/letters")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('main') !== null")
    assert page.evaluate("document.activeElement.matches(':focus-visible')")
    # what has happened meanwhile comes by itself
    page.goto(f"{address}/")
    queues = page.get_by_role("region", name="Queues")
    expect(queues).not_to_contain_text("arrived-later")
    op.started(connection, op.new_id("acme", b.deposit.name), queue="arrived-later")
    expect(queues).to_contain_text("arrived-later", timeout=20_000)
    assert errors == []
    page.click("text=Log out")
    page.goto(f"{address}/")
    page.wait_for_url(f"{company.url}/**")


@pytest.mark.long
def test_a_bulk_replay_goes_on_by_itself_while_its_page_is_open(
    address: str,
    context: BrowserContext,
    company: Company,
    connection: Connection,
    deliveries: Deliveries,
    bank: Celery,
) -> None:
    page = context.pages[0]
    pages.log_in(page, address, company, "otto")
    bank.tasks["mails.receipt"].run = lambda order_id: None
    page.goto(f"{address}/letters?task=mails.receipt")
    page.click("summary:has-text('Replay all')")
    page.fill("#why-bulk", "the mail server is back")
    page.check("input[name=goes_on]")
    page.click("button:has-text('Choose them')")
    page.click("button:has-text('Replay the next 1')")
    delivered = 0
    for _ in range(120):
        for row in connection.execute(text(REPLAYED)).all():
            deliver_row(deliveries, bank.tasks[row.task], row)
            delivered += 1
        if delivered == 4:
            break
        page.wait_for_timeout(500)
    expect(page.locator("main")).to_contain_text("4 of 4 completed", timeout=20_000)
    expect(page.locator("main")).to_contain_text("It is over")


@pytest.mark.long
def test_the_page_works_without_scripts(bank: Celery, address: str, company: Company, connection: Connection) -> None:
    with pages.chromium(java_script_enabled=False) as context:
        page = context.pages[0]
        pages.log_in(page, address, company, "otto")
        for path in PATHS:
            page.goto(address + path)
            assert page.locator("h1").count() == 1
        letter = op.dead_letters(connection)[0].id
        page.goto(f"{address}/letters/{letter}")
        page.fill("#why-reveal", "ticket 9")
        page.click("button:has-text('Reveal')")
        assert "payment_id" in page.content()


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_no_page_keeps_people_out(
    address: str, company: Company, connection: Connection, scheme: Any, width: int
) -> None:
    with pages.chromium(viewport={"width": width, "height": 900}, color_scheme=scheme) as context:
        page = context.pages[0]
        pages.log_in(page, address, company, "anna")
        letter = op.dead_letters(connection)[0].id
        found: list[str] = []
        for path in (*PATHS, f"/letters/{letter}", "/nothing", "/saga?tenant=acme&task=orders.place&key=o-17"):
            page.goto(address + path)
            found += serious(page)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} scrolls sideways"
        assert found == []


# Where the row's name and its last cell are, once its table was scrolled to the end.
SCROLLED = """table => {
    const box = table.closest('.scroll'), row = table.querySelector('tbody tr');
    const name = row.querySelector('th'), last = row.lastElementChild;
    box.scrollLeft = box.scrollWidth;
    const at = name.getBoundingClientRect();
    return [at.left - box.getBoundingClientRect().left, at.width, row.offsetHeight, last.getBoundingClientRect().right - innerWidth];
}"""


@pytest.mark.long
@pytest.mark.parametrize("width", [390])
def test_a_telephone_shows_every_page(address: str, company: Company, connection: Connection, width: int) -> None:
    """No page scrolls sideways. Its tables do, and their rows keep their names; what is to be touched is large enough."""
    with pages.chromium(viewport={"width": width, "height": 844}, is_mobile=True, has_touch=True) as context:
        page = context.pages[0]
        pages.log_in(page, address, company, "anna")
        doubt = next(each for each in op.dead_letters(connection) if each.reason == "effect_unknown")
        named = f"tenant=acme&task=payments.capture&key={doubt.key}"
        more = [
            f"/letters/{doubt.id}",
            f"/operation?{named}",
            f"/doubts/resolve?{named}&effect=capture",
            "/runbooks/silent",
        ]
        more += ["/nothing", "/saga?tenant=acme&task=orders.place&key=o-17", "/operations?key=nothing"]
        tables = 0
        for path in (*PATHS, *more):
            page.goto(address + path)
            assert page.evaluate("document.documentElement.scrollWidth") == width, f"{path} scrolls sideways"
            small = page.evaluate(
                "[...document.querySelectorAll('header nav a, button, .button')].filter(e => e.offsetHeight < 40).length"
            )
            assert small == 0, path
            for table in page.locator(".scroll table:has(tbody th)").all():
                name, wide, high, last = table.evaluate(SCROLLED)
                assert abs(name) < 2, f"{path}: a row has lost its name"
                assert 20 < wide < width / 2, f"{path}: the name of a row leaves no room, or has none"
                assert high < 200, f"{path}: a row is as high as a screen"
                assert last <= 1, f"{path}: the end of a row cannot be seen"
                tables += 1
        assert tables > 8
