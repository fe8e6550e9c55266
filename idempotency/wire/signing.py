"""Signatures of messages: with one secret in an application's processes, nobody else can make their workers run something.

HMAC-SHA-256 (RFC 2104) over the body, the time of signing, and every header that decides what becomes of the message: those
of Celery that do, and all of ours, as JSON. The header is `v1 <seconds since 1970> <hex>`. What is not covered: headers of
tracing tools, the queue that a message is in, and how often it comes. A copy, byte for byte, is as good as its original; the
record and the time of signing are there for that.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import SecretStr

from .headers import CELERYS_FIELDS, ETA_HEADER, SIGNATURE_HEADER, is_our_header

_RULE = "v1"


def sign(headers: Mapping[str, Any], body: bytes | str, secret: SecretStr, *, at: float) -> str:
    """The value of a message's signature header. `at`: the time of publication, in seconds since 1970.

    Raises `TypeError` for a header that it covers and that is not JSON.
    """
    time = f"{at:.3f}"
    return f"{_RULE} {time} {_digest(headers, body, secret, time)}"


def signed_at(headers: Mapping[str, Any], body: bytes | str, secrets: Iterable[SecretStr]) -> float | None:
    """When one of these secrets has signed a message, in seconds since 1970; None: none has, or it was altered since."""
    parts = _parts(headers)
    if parts is None:
        return None
    time, digest = parts
    try:
        valid = [hmac.compare_digest(digest, _digest(headers, body, secret, time)) for secret in secrets]
    except TypeError:  # not JSON: AMQP has more types, and its decimal 1234 is not the text that was signed
        return None
    return _seconds(time) if any(valid) else None


def claimed_at(headers: Mapping[str, Any]) -> float | None:
    """From when on a message says that it is one, for those who know already that its signature is valid.

    When it was signed; or when it is meant for, since a call for later is not a late copy.
    """
    parts = _parts(headers)
    if parts is None or (signed := _seconds(parts[0])) is None:
        return None
    return max(signed, _meant_for(headers.get("eta") or headers.get(ETA_HEADER)))


def is_covered(name: str) -> bool:
    """Whether the signature covers a header of this name."""
    return (name in CELERYS_FIELDS or is_our_header(name)) and name != SIGNATURE_HEADER


def _seconds(time: str) -> float | None:
    try:
        return float(time)
    except ValueError:
        return None


def _meant_for(iso: object) -> float:
    try:
        at = datetime.fromisoformat(iso) if isinstance(iso, str) else datetime.min.replace(tzinfo=UTC)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):  # Celery refuses it
        return 0.0


def _parts(headers: Mapping[str, Any]) -> tuple[str, str] | None:
    value = headers.get(SIGNATURE_HEADER)
    if not isinstance(value, str) or not value.isascii() or len(words := value.split(" ")) != 3 or words[0] != _RULE:
        return None
    return words[1], words[2]


def _digest(headers: Mapping[str, Any], body: bytes | str, secret: SecretStr, time: str) -> str:
    covered = {
        name: value
        for name, value in headers.items()
        # what is not there and what is None are the same to Celery, and to some brokers
        if value is not None and is_covered(name)
    }
    head = json.dumps([time, covered], sort_keys=True, separators=(",", ":"))
    raw = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body or b"")
    # the length keeps head and body apart
    signed = b"%d:%s%s" % (len(head), head.encode(), raw)
    return hmac.new(secret.get_secret_value().encode(), signed, hashlib.sha256).hexdigest()
