"""The carrier as the tasks see it: labels made, voided and found again. Only this module decides what an answer means.

422                             StoredRefusal   no label was made under this key, and never will be
any other 4xx                   PermanentError  nothing was done by this call
unreachable, timed out,         Defer           later, under the same key, without using up an attempt
502/503/504, 429, 409 for a
key in progress, 401/403,
404 but for a label that is not
a 5xx replayed for this key     StoredFailure   calling again under this key is pointless
any other 5xx, nonsense, or     CarrierError    uses up an attempt; the outcome is unknown
an answer that is too long
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import urllib3
from typing_extensions import TypedDict

from idempotency import (
    Defer,
    DidNotHappen,
    EffectInDoubt,
    Happened,
    PermanentError,
    StillUnknown,
    StoredFailure,
    StoredRefusal,
)

from .answers import AnswerTooLong, request_limited, with_deadlines
from .circuit import Circuit, Unavailable, seconds_of
from .tenants import DEFAULT, named

IN_PROGRESS_SECONDS = 2.0
REFUSED_KEY_SECONDS = 60.0
TRY_LATER_SECONDS = 5.0


class CarrierLabel(TypedDict):
    """A label as the carrier describes it."""

    id: str
    status: str


class CarrierError(Exception):
    """The carrier failed in a way that leaves the outcome unknown. The message contains no body."""


class Carrier:
    """A carrier's HTTP API. Safe to share between threads and to create before a fork. `timeout` is in seconds."""

    def __init__(self, url: str, *, timeout: float = 10.0) -> None:
        if not 0 < timeout <= 3600:
            raise ValueError(f"timeout is {timeout}; it must be above 0 and at most 3600 seconds")
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._connect()
        os.register_at_fork(after_in_child=self._connect)

    def _connect(self) -> None:
        self._pool = with_deadlines(urllib3.PoolManager(maxsize=100, timeout=self._timeout, retries=False))
        self._circuit = Circuit("the carrier")

    def create_label(self, *, return_id: str, kind: str, idempotency_key: str, tenant: str = DEFAULT) -> dict[str, Any]:
        """Make a label, once per key."""
        wanted = {"reference": return_id, "kind": kind, **named(tenant)}
        return _label(self._call("POST", "/v1/labels", key=idempotency_key, body=wanted))

    def void_label(self, *, label_id: str, idempotency_key: str) -> dict[str, Any]:
        """Void a label; returns it as it is now: `voided`, or `collected`, which cannot be voided any more."""
        return _label(self._call("POST", f"/v1/labels/{quote(label_id, safe='')}/void", key=idempotency_key, body={}))

    def find_label(
        self, *, return_id: str, kind: str, doubt: EffectInDoubt, tenant: str = DEFAULT
    ) -> Happened | DidNotHappen | StillUnknown:
        """Find out whether a label was made under the key of a call; the arguments are those of `create_label`."""
        try:
            found = self._call("GET", f"/v1/labels?idempotency_key={quote(doubt.idempotency_key, safe='')}")
        except PermanentError as error:
            # the question was refused, which says nothing about what was made
            raise CarrierError(str(error)) from None
        if labels := found.get("labels"):
            return Happened(_label(labels[0]))
        return StillUnknown() if doubt.ended_for is None else DidNotHappen()

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        self._pool.clear()

    def _call(self, method: str, path: str, *, key: str | None = None, body: Any = None) -> dict[str, Any]:
        headers = {} if key is None else {"Idempotency-Key": key, "Content-Type": "application/json"}

        def request() -> dict[str, Any]:
            try:
                sent = None if body is None else json.dumps(body)
                answer = request_limited(self._pool, method, self._url + path, headers=headers, body=sent)
            except urllib3.exceptions.HTTPError:
                reason = "the carrier is unreachable or did not answer in time"
                raise Unavailable(TRY_LATER_SECONDS, reason) from None
            except AnswerTooLong as error:
                raise CarrierError(f"the carrier's answer is {error}") from None
            return _meaning(*answer)

        return self._circuit.call(request)


def _meaning(status: int, headers: Mapping[str, str], data: bytes) -> dict[str, Any]:
    """What an answer contains. Raises what it means for the operation."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if 200 <= status < 300 and isinstance(document, dict):
        return document
    wait = seconds_of(headers.get("retry-after", ""), otherwise=TRY_LATER_SECONDS)
    if status in (408, 425, 502, 503, 504):
        raise Unavailable(wait, f"the carrier is unavailable: {status}")
    if status == 429:
        raise Defer(wait, "the carrier's rate limit was reached")
    if status == 409:
        raise Defer(IN_PROGRESS_SECONDS, "a call under this idempotency key is in progress")
    error = document.get("error") if isinstance(document, dict) else None
    kind, code = (error.get("type"), error.get("code")) if isinstance(error, dict) else (None, None)
    if status in (401, 403) or (status == 404 and code != "not_found"):
        # our key has expired, or its address has changed: a person has to see to it
        raise Defer(REFUSED_KEY_SECONDS, f"the carrier does not let us in: {status}")
    if kind == "idempotency_error":
        # not permanent: the key's first request may have made a label
        raise CarrierError("the idempotency key was used for another label")
    if status == 422 and isinstance(code, str):
        raise StoredRefusal(f"the carrier makes no label: {code}", code)
    if 400 <= status < 500:
        raise PermanentError(f"the carrier refused the request: {status}", "carrier_refused")
    if status >= 500 and headers.get("idempotent-replayed") == "true":
        raise StoredFailure(f"the carrier replays a stored {status} for this key")
    raise CarrierError(f"the carrier failed: {status}")


def _label(document: dict[str, Any]) -> dict[str, Any]:
    label = {name: document.get(name) for name in ("id", "status")}
    if not all(isinstance(value, str) for value in label.values()):
        raise CarrierError("the carrier's answer is not a label")
    return label
