"""Signatures of Standard Webhooks (standardwebhooks.com): HMAC-SHA-256 by a shared secret, or ed25519 by a key pair.

What is signed is the id, the time of the attempt and the body. While a secret is being replaced, there is a signature for each.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum

from ..extras import extra

with extra("webhooks"):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from standardwebhooks import Webhook

# Of a shared secret. The specification wants 24 to 64.
SECRET_BYTES = 32
# Of an ed25519 key; its serialization has the public one behind it, as libsodium has.
SEED_BYTES = 32


class Scheme(StrEnum):
    """How an endpoint's webhooks are signed: by a secret that both know, or by a key of which the receiver has the public part."""

    SHARED = "v1"
    ED25519 = "v1a"


def new_secret(scheme: Scheme) -> str:
    """A random secret: `whsec_…`, or `whsk_…` for ed25519."""
    if scheme is Scheme.SHARED:
        return "whsec_" + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
    key = Ed25519PrivateKey.generate()
    return "whsk_" + base64.b64encode(key.private_bytes_raw() + key.public_key().public_bytes_raw()).decode()


def verifier_of(secret: str) -> str:
    """What the receiver is given: the shared secret itself, or the public key, `whpk_…`."""
    if not secret.startswith("whsk_"):
        return secret
    return "whpk_" + base64.b64encode(_private_key(secret).public_key().public_bytes_raw()).decode()


def signed(message_id: str, body: str, given: Sequence[str], at: datetime) -> dict[str, str]:
    """The headers of one attempt: its id, its time, and a signature by each of these secrets. `at` has a time zone."""
    at = at.astimezone(UTC).replace(microsecond=0)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": " ".join(_signature(secret, message_id, at, body) for secret in given),
    }


def _signature(secret: str, message_id: str, at: datetime, body: str) -> str:
    if not secret.startswith("whsk_"):
        return Webhook(secret).sign(message_id, at, body)
    signature = _private_key(secret).sign(f"{message_id}.{int(at.timestamp())}.{body}".encode())
    return f"{Scheme.ED25519},{base64.b64encode(signature).decode()}"


def _private_key(secret: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(base64.b64decode(secret.removeprefix("whsk_"))[:SEED_BYTES])
