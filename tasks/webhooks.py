"""Webhooks: payments and orders, to the URLs that the shops (our tenants) have registered for them."""

from __future__ import annotations

from idempotency.webhooks import send_webhooks

from . import app

deliver = send_webhooks("payment.captured", "payment.refunded", "order.paid", "order.cancelled", app=app)
