"""The official SDK against the sandbox: payments, refunds, and what the ledger has of them."""

from __future__ import annotations

import uuid
from typing import Any

import stripe

from sandbox import ledger
from sandbox.process import Sandbox

KEY = "sk_test_sandbox"


def client(sandbox: Sandbox, *, key: str = KEY, timeout: float = 30) -> stripe.StripeClient:
    return stripe.StripeClient(
        key,
        base_addresses={"api": sandbox.url},
        max_network_retries=0,
        http_client=stripe.RequestsClient(timeout=timeout),
    )


def params(purchase: str, amount: int = 1250, **more: Any) -> Any:
    return {
        "amount": amount,
        "currency": "eur",
        "confirm": True,
        "payment_method": "pm_card_visa",
        "automatic_payment_methods": {"enabled": True, "allow_redirects": "never"},
        "metadata": {"purchase_id": purchase},
    } | more


def pay(
    sandbox: Sandbox, purchase: str, key: str | None = None, *, timeout: float = 30, **more: Any
) -> stripe.PaymentIntent:
    intents = client(sandbox, timeout=timeout).v1.payment_intents
    return intents.create(params(purchase, **more), {"idempotency_key": key or purchase})


def refund(sandbox: Sandbox, intent: str, amount: int, key: str | None = None) -> stripe.Refund:
    return client(sandbox).v1.refunds.create(
        {"payment_intent": intent, "amount": amount, "metadata": {"refund_id": "r"}},
        {"idempotency_key": key or uuid.uuid4().hex},
    )


def charges(sandbox: Sandbox, purchase: str) -> list[ledger.Charge]:
    return [charge for charge in ledger.read(sandbox.data).charges if charge.metadata.get("purchase_id") == purchase]


def response(thing: stripe.PaymentIntent) -> Any:
    return thing.last_response


def replayed(error: stripe.StripeError) -> bool:
    return (error.headers or {}).get("Idempotent-Replayed") == "true"
