"""The bank's workers that send webhooks, to a receiver on this machine."""

from __future__ import annotations

import os

from idempotency.webhooks import send_webhooks
from tests.support.bank import app as app

EVENTS = "bank.paid"

app.conf.update(
    idempotency_webhook_allowed_hosts=("127.0.0.1",),
    idempotency_webhook_ca_file=os.environ["WEBHOOK_CA_FILE"],
    idempotency_webhook_timeout=2.0,
)
send_webhooks(EVENTS, app=app)
