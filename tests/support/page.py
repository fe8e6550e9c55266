"""The page of `idempotency web` as a person has it: served over HTTP, in Debian's Chromium, over a morning's work."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from celery import Celery
from playwright.sync_api import BrowserContext, Page, sync_playwright
from sqlalchemy import Connection, text

from idempotency import IdempotentTask, PermanentError
from idempotency.sagas import saga
from idempotency.web.application import create_app
from tests.support import operations as op
from tests.support.company import Company
from tests.support.deliveries import Deliveries
from tests.support.processes import eventually
from tests.support.tasks import Provider, lost

CHROMIUM = shutil.which("chromium")
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def served(app: Celery, port: int) -> Iterator[str]:
    """The page on this port, until the block ends; its address."""
    page = create_app(app, port=port)
    server = uvicorn.Server(
        uvicorn.Config(
            page, host="127.0.0.1", port=port, log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive(), what="the page")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


@contextmanager
def chromium(**options: Any) -> Iterator[BrowserContext]:
    """A browser with a profile of its own."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, args=OPTIONS, headless=True, **options
        )
        try:
            yield context
        finally:
            context.close()


def log_in(page: Page, address: str, company: Company, who: str) -> None:
    """As a person does: to the page, to the company, and back."""
    page.goto(f"{address}/letters?reason=card_declined")
    page.wait_for_url(f"{company.url}/**")
    page.fill("input[name=sub]", who)
    page.click("button:has-text('Authorize')")
    page.wait_for_url(f"{address}/letters?reason=card_declined")


# ---------------------------------------------------------------- a morning's work


def morning(app: Celery, deliveries: Deliveries, connection: Connection) -> None:
    """Work that went well, work that failed, money in doubt, a saga that waits and one that was undone; some of it yesterday's."""
    answers = {"declines": True}
    lost_calls = Provider(*[lost() for _ in range(20)])

    def capture(self: Any, payment_id: str, cents: int) -> dict[str, Any]:
        if answers["declines"] and payment_id.startswith("d"):
            raise PermanentError("Your card was declined.", "card_declined")
        if payment_id.startswith("u"):
            return dict(self.effect("capture", lost_calls))
        return {"charge": f"ch_{payment_id}"}

    def mail(self: Any, order_id: str) -> None:
        if order_id.startswith("x"):
            raise ValueError("connection to the mail server refused")

    options: dict[str, Any] = {"base": IdempotentTask, "bind": True, "shared": False}
    payments = app.task(name="payments.capture", key="{payment_id}", max_attempts=1, amount="{cents} EUR", **options)(
        capture
    )
    mails = app.task(name="mails.receipt", key="{order_id}", max_attempts=1, **options)(mail)

    @saga("orders.place", key="{order_id}", entity="order_id", events={"order.picked": "{order_id}"}, app=app)
    def place(saga: Any, order_id: str) -> None:
        saga.step("reserve", lambda session, order_id: "shelf 4", order_id, undo=mails)
        saga.call(mails, f"order-{order_id}")
        saga.wait_for("order.picked", match=order_id, timeout=7200.0)

    for number in range(12):
        tenant = "acme" if number % 3 else "globex"
        deliveries.deliver(payments, payment_id=f"p-{number:04}", cents=100 * number + 999, tenant=tenant)
    for number in range(9):
        tenant = "acme" if number % 2 else "globex"
        deliveries.deliver(payments, payment_id=f"d-{number:04}", cents=1250 + number, tenant=tenant)
    for number in range(2):
        for _ in range(2):
            deliveries.deliver(payments, payment_id=f"u-{number:04}", cents=48_000, tenant="acme")
            connection.execute(
                text("UPDATE idempotency.records SET available_at = clock_timestamp() WHERE status = 'released'")
            )
    for number in range(4):
        deliveries.deliver(mails, order_id=f"x-{number:04}", tenant="acme")
    deliveries.deliver(place, "o-17", tenant="acme")
    held = op.started(connection, op.new_id("acme", "payments.capture"), queue="payments")
    op.early(connection, op.new_id("globex", "mails.receipt"), queue="mails")
    op.age(connection, held.id, opened_at=-95)
    connection.execute(
        text("UPDATE idempotency.dead_letters SET failed_at = failed_at - interval '75 minutes', code_version = '2026.11.27-4'"
             " WHERE key LIKE '%-0001' OR key LIKE '%-0002' OR key LIKE '%-0003'")
    )  # fmt: skip
    connection.execute(
        text("UPDATE idempotency.dead_letters SET code_version = '2026.11.28-1' WHERE code_version IS NULL")
    )
    connection.execute(
        text(
            "INSERT INTO idempotency.processes (kind, name, host, pid, service, version, queues, started_at, seen_at, code_version)"
            " SELECT kind, kind || n || '@shop-' || n, 'shop-' || n, 4000 + n, :service, '0.1.0', queues::text[],"
            " now() - interval '3 hours', now() - make_interval(secs => silent), code FROM (VALUES"
            " ('worker', 1, 4, '{payments,mails}', '2026.11.28-1'), ('worker', 2, 7, '{payments,mails}', '2026.11.28-1'),"
            " ('worker', 3, 340, '{payments}', '2026.11.27-4'), ('relay', 1, 2, '{}', '2026.11.28-1'),"
            " ('beat', 1, 5, '{}', '2026.11.28-1')) p(kind, n, silent, queues, code)"
        ),
        {"service": op.SERVICE},
    )
    connection.execute(
        text(
            "INSERT INTO idempotency.alarms (service, name, since) VALUES (:service, 'silent/worker/worker3@shop-3/shop-3/4003', now() - interval '5 minutes')"
        ),
        {"service": op.SERVICE},
    )
