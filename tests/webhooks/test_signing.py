"""Signatures, as receivers check them."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from standardwebhooks import Webhook, WebhookVerificationError

from idempotency.webhooks.signing import Scheme, new_secret, signed, verifier_of

BODY = '{"type":"payment.captured","data":{"name":"Zoë"}}'


def check_ed25519(public: str, body: str, headers: dict[str, str]) -> None:
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public.removeprefix("whpk_")))
    (signature,) = [each[4:] for each in headers["webhook-signature"].split(" ") if each.startswith("v1a,")]
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.{body}"
    key.verify(base64.b64decode(signature), content.encode())


def test_the_signature_is_that_of_the_specification() -> None:
    """The example of its own libraries."""
    secret, at = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", datetime.fromtimestamp(1614265330, UTC)
    headers = signed("msg_p5jXN8AQM9LWM0D4loKWxJek", '{"test": 2432232314}', [secret], at)
    assert headers["webhook-timestamp"] == "1614265330"
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_receiver_with_either_secret_accepts_it_during_a_rotation() -> None:
    old, new, other = (new_secret(Scheme.SHARED) for _ in range(3))
    headers = signed("msg_1", BODY, [new, old], datetime.now(UTC))
    for secret in (old, new):
        assert Webhook(verifier_of(secret)).verify(BODY, headers)["data"] == {"name": "Zoë"}
    for secret, body in ((other, BODY), (new, BODY + " ")):
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(body, headers)
    late = signed("msg_1", BODY, [new], datetime.now(UTC) - timedelta(minutes=6))
    with pytest.raises(WebhookVerificationError, match="too old"):
        Webhook(new).verify(BODY, late)


@pytest.mark.long
def test_a_key_pair_signs_beside_a_shared_secret_and_only_its_public_part_is_given() -> None:
    shared, private = new_secret(Scheme.SHARED), new_secret(Scheme.ED25519)
    public = verifier_of(private)
    assert (private[:5], public[:5], len(base64.b64decode(private[5:])), len(base64.b64decode(public[5:]))) == (
        "whsk_",
        "whpk_",
        64,
        32,
    )
    headers = signed("msg_1", BODY, [private, shared], datetime.now(UTC))
    check_ed25519(public, BODY, headers)
    Webhook(shared).verify(BODY, headers)
    with pytest.raises(InvalidSignature):
        check_ed25519(verifier_of(new_secret(Scheme.ED25519)), BODY, headers)
