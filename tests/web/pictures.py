"""Pictures of the page for its documentation: `make web-pictures` writes docs/pictures/web-*.png."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from celery import Celery
from sqlalchemy import Connection

from tests.support import operations as op
from tests.support import page as pages
from tests.support.company import Company
from tests.support.deliveries import Deliveries
from tests.support.page_address import free_port

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


def test_pictures_are_taken(
    bank: Celery, configure: Callable[..., None], company: Company, deliveries: Deliveries, connection: Connection
) -> None:
    port = free_port()
    configure(**company.settings(f"http://127.0.0.1:{port}"), environment="production", code_version="2026.11.28-1")
    pages.morning(bank, deliveries, connection)
    letters = op.dead_letters(connection)
    doubt = next(each for each in letters if each.reason == "effect_unknown")
    with pages.served(bank, port) as address, pages.chromium(viewport={"width": 1280, "height": 800}) as context:
        page = context.pages[0]
        pages.log_in(page, address, company, "otto")
        named = f"tenant=acme&task=payments.capture&key={doubt.key}"
        for name, path in {
            "flow": "/",
            "failures": "/failures",
            "letters": "/letters",
            "letter": f"/letters/{letters[0].id}",
            "doubts": "/doubts",
            "resolve": f"/doubts/resolve?{named}&effect=capture",
            "operation": f"/operation?{named}",
            "saga": "/saga?tenant=acme&task=orders.place&key=o-17",
            "approvals": "/approvals",
            "operations": "/operations",
            "tenants": "/tenants",
            "runbook": "/runbooks/effect_unknown",
        }.items():
            page.goto(address + path)
            page.screenshot(path=PICTURES / f"web-{name}.png", full_page=name != "runbook")
        page.emulate_media(color_scheme="dark")
        page.goto(f"{address}/doubts")
        page.screenshot(path=PICTURES / "web-dark.png")
