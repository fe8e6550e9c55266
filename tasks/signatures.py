"""Who has sent a webhook: its signature over the raw bytes, under any of our secrets, and not older or newer than 5 minutes.

Several secrets are for rotation: the provider signs with the new one while the old one is still accepted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import stripe
from standardwebhooks import Webhook

# Seconds, as Stripe and Standard Webhooks have it.
TOLERANCE = 300
# Digits. Zeros in front of a time do not change it, for the SDK, too.
LONGEST_TIME = 19


class NotSigned(Exception):
    """The signature is missing, malformed, by another secret, or of another time. The message tells nothing of the body."""


def check_stripe(body: bytes, headers: Mapping[str, str], secrets: Sequence[str]) -> None:
    """Check the header Stripe-Signature by Stripe's SDK, and that its time has come, which the SDK does not. Raises `NotSigned`."""
    header = headers.get("stripe-signature", "")
    for secret in secrets:
        try:
            stripe.WebhookSignature.verify_header(body, header, secret, TOLERANCE)
        except (stripe.SignatureVerificationError, ValueError, TypeError):  # also of a body that is no text
            continue
        # the SDK takes what follows a second "=" for nothing
        times = [item.removeprefix("t=") for item in header.split(",") if item.startswith("t=")]
        if times and times[0].isdigit() and len(times[0]) <= LONGEST_TIME and int(times[0]) <= time.time() + TOLERANCE:
            return
    raise NotSigned("Stripe-Signature: missing, malformed, or not of this time by one of our secrets")


def check_standard(body: bytes, headers: Mapping[str, str], secrets: Sequence[str]) -> None:
    """Check webhook-id, webhook-timestamp and webhook-signature as Standard Webhooks has them. Raises `NotSigned`."""
    for secret in secrets:
        try:
            Webhook(secret).verify(body, dict(headers), json_parse=False)
        except Exception:  # noqa: S112  # the library raises whatever a malformed header leads to
            continue
        return
    raise NotSigned("webhook-signature: missing, malformed, or not of this time by one of our secrets")
