"""Pictures of the page for its documentation: `make web-pictures` writes docs/pictures/web-*.png."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from celery import Celery
from sqlalchemy import Connection

from services.server import free_port
from tests.support import operations as op
from tests.support import page as pages
from tests.support.company import Company
from tests.support.deliveries import Deliveries

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
        pictures = {"flow": "/", "doubts": "/doubts", "operation": f"/operation?{named}"}
        for name, path in pictures.items():
            page.goto(address + path)
            page.screenshot(path=PICTURES / f"web-{name}.png", full_page=True)
