"""One payment on its whole way, every hop doubled: from HTTP to the provider, back by webhook, on to the customer and the mail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from celery import Celery
from sqlalchemy import text
from standardwebhooks import Webhook

import services
from idempotency.application import close_runtime, runtime_of
from idempotency.operate.webhooks import add_endpoint, enable_endpoint
from sandbox import ledger
from tests.support import receiver as receivers
from tests.support import shop as shops
from tests.support.operators import ANN
from tests.support.processes import PYTHONPATH, eventually
from tests.support.receiver import Answer, Request, accept
from tests.support.server import Server, api_key, client
from tests.support.shop import Shop

SECRET = "whsec_of_the_provider"
CUT_SHORT = (
    "UPDATE idempotency.records SET available_at = clock_timestamp() WHERE status = 'released' AND task = 'webhooks.deliver'",
    "UPDATE idempotency.outbox SET available_at = clock_timestamp() WHERE status = 'pending' AND task = 'webhooks.deliver'",
)
STANDS = (
    "SELECT id, task, key, status, attempts, available_at - now(), settled_at FROM idempotency.outbox ORDER BY id",
    "SELECT task, key, status, attempts, duplicates, available_at - now(), locked_until - now(), error FROM idempotency.records",
    "SELECT task, key, reason, status FROM idempotency.dead_letters",
    "SELECT begun_at - now(), ended_at - begun_at, status, error, milliseconds FROM idempotency.webhook_attempts",
    "SELECT id, status, charge_id FROM payments",
    "SELECT event_id, object, state, is_applied FROM payment_events",
)
UNDECIDED = ("--faults", "undecided=1,decision_ms=300", "--webhook-secret", SECRET)


@pytest.mark.long
@pytest.mark.timeout(360)
def test_every_hop_is_doubled_and_everything_happens_once(
    servers: services.Services, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = receivers.start(receivers.certificate(tmp_path))
    once: list[Request] = []

    def refuse_once(request: Request) -> Answer:
        """The customer's server fails at first."""
        if request.document["type"] == "webhook.challenge" or once:
            return accept(request)
        once.append(request)
        return 503, {"retry-after": "1"}, b""

    receiver.answer = refuse_once
    added = {
        "STRIPE_WEBHOOK_SECRETS": SECRET,
        "STRIPE_FIRST_POLL": "3600",
        "IDEMPOTENCY_MESSAGE_SECRETS": "0123456789abcdef0123456789abcdef",
        "IDEMPOTENCY_WEBHOOK_ALLOWED_HOSTS": "127.0.0.1",
        "IDEMPOTENCY_WEBHOOK_CA_FILE": str(receiver.ca_file),
    }
    for name, value in added.items():
        monkeypatch.setenv(name, value)
    server = Server({}, factory="api.application:create_app")
    of_provider = (*UNDECIDED, "--webhook-url", f"{server.url}/webhooks/stripe")
    try:
        # in a process in which another test has loaded the application, the relay would send unsigned messages otherwise
        before = partial(configured, environment=added)
        with shops.running(servers, template, tmp_path / "shop", of_provider=of_provider, configured=before) as shop:
            server.start(**(os.environ | {"PYTHONPATH": PYTHONPATH}))
            endpoint = add_endpoint(runtime_of(shop.app), ANN, "acme", url=receiver.url, events=["payment.*"])
            enable_endpoint(runtime_of(shop.app), ANN, endpoint.id)
            key = "whole-path"
            with client(server, api_key(shop.engine, "acme")) as acme:
                body = {"customer_id": "c1", "amount": 1000, "currency": "EUR"}
                answers = [acme.post("/payments", json=body, headers={"Idempotency-Key": key}) for _ in range(3)]
                assert {answer.status_code for answer in answers} == {202}
                double_messages(shop)
                with told(shop):
                    eventually(lambda: received(shop, receiver), timeout=150, what="the customer's webhook")
                double_messages(shop)
                eventually(lambda: ended(shop), timeout=60, what="the end of the operation")
                eventually(lambda: quiet(shop), timeout=60, what="quiet")

            charges = [each.id for each in ledger.read(shop.data / "provider").charges]
            assert len(charges) == 1
            assert rows(shop, "SELECT status, charge_id FROM payments") == [("captured", charges[0])]
            assert rows(shop, "SELECT kind, amount FROM ledger") == [("capture", 1000)]
            assert rows(shop, "SELECT count(*) > 0, bool_and(is_applied) FROM payment_events") == [(True, True)]
            # refused once, then accepted, under one id
            assert [request.id for request in receiver.webhooks] == [once[0].id] * 2
            document = Webhook(endpoint.verifier).verify(receiver.webhooks[-1].body, receiver.webhooks[-1].headers)
            assert (document["type"], document["data"]["payment_id"]) == ("payment.captured", key)
            mails = [each for each in ledger.read_mail(shop.data / "mail") if key in each.subject]
            assert len(mails) == 1
            assert rows(shop, "SELECT count(*) FROM idempotency.dead_letters") == [(0,)]
            configured(shop.app, {})
    finally:
        server.stop()
        receiver.close()


def configured(app: Celery, environment: dict[str, str]) -> None:
    """What the environment says, in a process that may have read it before."""
    close_runtime(app)
    for name in ("message_secrets", "webhook_allowed_hosts", "webhook_ca_file"):
        given = environment.get(f"IDEMPOTENCY_{name.upper()}")
        app.conf.update({f"idempotency_{name}": given or (None if name == "webhook_ca_file" else "")})


@contextmanager
def told(shop: Shop) -> Iterator[None]:
    """Say where everything stands if what the block waits for does not come."""
    try:
        yield
    except AssertionError as late:
        for query in STANDS:
            late.add_note("\n".join([query, *(f"    {row}" for row in rows(shop, query))]))
        raise


def double_messages(shop: Shop) -> None:
    """Have the relay send every message again that is on its way or has arrived."""
    with shop.engine.begin() as connection:
        connection.execute(text("UPDATE idempotency.outbox SET status = 'pending' WHERE status = 'published'"))


def received(shop: Shop, receiver: receivers.Receiver) -> bool:
    """Whether the webhook was refused, and then accepted. The pause in between is cut short.

    It is five minutes after a second attempt that came to nothing, as when a process stood still for a whole lease.
    """
    if len(receiver.webhooks) == 1:
        with shop.engine.begin() as connection:
            for statement in CUT_SHORT:
                connection.execute(text(statement))
    return len(receiver.webhooks) >= 2


def ended(shop: Shop) -> bool:
    return rows(shop, "SELECT status FROM idempotency.records WHERE task = 'payments.capture_payment'") == [
        ("completed",)
    ]


def quiet(shop: Shop) -> bool:
    """Whether every message was sent, and every operation has ended."""
    unsent = "SELECT count(*) FROM idempotency.outbox WHERE status = 'pending'"
    open_ones = "SELECT count(*) FROM idempotency.records WHERE status NOT IN ('completed', 'failed')"
    return rows(shop, unsent) == rows(shop, open_ones) == [(0,)]


def rows(shop: Shop, query: str) -> list[tuple[object, ...]]:
    with shop.engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(query))]
