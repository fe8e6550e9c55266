"""Answers stored under idempotency keys, by Stripe's rules.

Once a POST has begun to execute, its answer is stored, errors included, and replayed for the same key and parameters for
at least 24 hours. Refused parameters, 429, and the 409 for a key in progress are not stored.
"""

import sqlite3
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import urlencode

from sandbox.payments import Answer, ApiError, invalid

RETENTION = 24 * 3600.0
MAX_KEY_LENGTH = 255


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored answer, and the id of the request that it first answered."""

    answer: Answer
    request_id: str


def check_key(idempotency_key: str) -> None:
    """Raise an error for a key that is too long."""
    if len(idempotency_key) > MAX_KEY_LENGTH:
        raise invalid(
            f"Idempotency keys can have at most {MAX_KEY_LENGTH} characters.", code="idempotency_key_too_long"
        )


def fingerprint(form: dict[str, str]) -> bytes:
    """A digest of the parameters, independent of their order."""
    return sha256(urlencode(sorted(form.items())).encode()).digest()


def find(db: sqlite3.Connection, idempotency_key: str, endpoint: str, parameters: bytes, now: float) -> Stored | None:
    """Look up a stored answer. Raises an idempotency_error if the key was used for another request."""
    row = db.execute(
        "SELECT endpoint, fingerprint, status, body, request_id, created FROM answers WHERE idempotency_key = ?",
        (idempotency_key,),
    ).fetchone()
    if row is None or row[5] <= now - RETENTION:
        return None
    if row[0] != endpoint:
        raise ApiError(
            400,
            "idempotency_error",
            "Keys for idempotent requests can only be used for the same endpoint they were first used for.",
        )
    if row[1] != parameters:
        raise ApiError(
            400,
            "idempotency_error",
            "Keys for idempotent requests can only be used with the same parameters they were first used with.",
        )
    return Stored(Answer(row[2], row[3]), row[4])


def store(
    db: sqlite3.Connection,
    idempotency_key: str,
    endpoint: str,
    parameters: bytes,
    stored: Stored,
    now: float,
) -> None:
    """Store an answer in the request's transaction, replacing one past its retention."""
    db.execute(
        "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            idempotency_key,
            endpoint,
            parameters,
            stored.answer.status,
            stored.answer.body,
            stored.request_id,
            now,
        ),
    )


def in_progress() -> ApiError:
    """The error for a key whose first request is still executing."""
    return ApiError(
        409,
        "idempotency_error",
        "There is currently another in-progress request using this idempotency key.",
        code="idempotency_key_in_use",
    )
