"""The challenge: a random text that an endpoint answers with, so that webhooks are not sent to a server whose owner did not ask for them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime

from ..errors import ChangeRefused
from .posting import Sender
from .signing import signed

CHALLENGE_BYTES = 24
EVENT_TYPE = "webhook.challenge"


def post_challenge(sender: Sender, url: str, given: Sequence[str]) -> None:
    """Post a challenge to an endpoint, signed as its webhooks. Returns if it answers with a 2xx and the challenge.

    As JSON, `{"challenge": …}`, or alone as text. Raises `ChangeRefused`, which says what came instead and not where from.
    """
    challenge, at = secrets.token_urlsafe(CHALLENGE_BYTES), datetime.now(UTC)
    body = json.dumps({"type": EVENT_TYPE, "timestamp": at.isoformat(), "data": {"challenge": challenge}})
    answer = sender.post(url, signed(f"msg_{secrets.token_hex(16)}", body, given, at), body)
    if not answer.is_accepted:
        raise ChangeRefused(f"challenge: {answer}, need 2xx with the challenge")
    if not secrets.compare_digest(_answered(answer.body), challenge.encode()):
        raise ChangeRefused("challenge: the endpoint answered with something else")


def _answered(body: bytes) -> bytes:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return body.strip()
    found = document.get("challenge") if isinstance(document, dict) else document
    return str(found).encode("utf-8", "replace")
