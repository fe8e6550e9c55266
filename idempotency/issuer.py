"""The public keys of an issuer of ID tokens, fetched from its address and kept for a while.

A token may name any key. An unknown one causes a fetch only if there was none a moment ago, so guesses cost the issuer little;
and tokens signed with a key that is kept do not wait for that fetch.
"""

from __future__ import annotations

import json
import math
import threading
import time
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import TYPE_CHECKING

from .deadlines import open_within

if TYPE_CHECKING:
    from jwt import PyJWK

# Seconds for which the whole answer is waited for, for which keys are kept, and between the end of a fetch and the next one.
PATIENCE, KEPT, PAUSE = 5.0, 300.0, 10.0
# Bytes of an answer. A set of ten keys, with certificates, has about 30,000.
LIMIT = 256 * 1024


class IssuerKeys:
    """The keys at an address; for threads, not across a fork. What it raises is PyJWT's: `PyJWKClientConnectionError` without an answer."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._fetching = threading.Lock()
        self._asked, self._has_answered = -math.inf, False
        self._found: tuple[Sequence[PyJWK], float] = ((), -math.inf)  # and until when they are kept

    def named(self, name: str) -> PyJWK | None:
        """The key of this name (`kid`); None: the issuer has none, or has had none a few seconds ago."""
        return by_name(self._kept(), name) or by_name(self._fetched(), name)

    def all(self) -> Sequence[PyJWK]:
        """All keys that sign."""
        return self._kept() or self._fetched()

    def is_kept(self, name: str | None) -> bool:
        """Whether nothing would be fetched for the key of this name, or for the only one there is."""
        kept = self._kept()
        return bool(kept) if name is None else by_name(kept, name) is not None

    def _kept(self) -> Sequence[PyJWK]:
        keys, until = self._found
        return keys if time.monotonic() < until else ()

    def _fetched(self) -> Sequence[PyJWK]:
        """What the issuer says, or has said a moment ago."""
        import jwt

        if not self._fetching.acquire(timeout=PATIENCE):
            raise jwt.PyJWKClientConnectionError
        try:
            # those who have waited here take what came for the one before them
            if time.monotonic() >= self._asked + PAUSE:
                self._has_answered = False
                try:
                    keys = _fetch(self._address)
                    self._found, self._has_answered = (keys, time.monotonic() + KEPT), True
                finally:
                    self._asked = time.monotonic()
        finally:
            self._fetching.release()
        if not self._has_answered:
            raise jwt.PyJWKClientConnectionError
        return self._found[0]


def signing(keys: Sequence[PyJWK]) -> list[PyJWK]:
    """Those that may sign."""
    return [key for key in keys if key.public_key_use in (None, "sig")]


def by_name(keys: Sequence[PyJWK], name: str) -> PyJWK | None:
    """The first key of this name (`kid`)."""
    return next((key for key in keys if key.key_id == name), None)


def _fetch(address: str) -> Sequence[PyJWK]:
    import jwt

    try:
        with open_within(urllib.request.Request(address), PATIENCE) as answer:  # noqa: S310  settings accept only http and https
            text = answer.read(LIMIT + 1)
    except (OSError, HTTPException):
        raise jwt.PyJWKClientConnectionError from None
    if len(text) > LIMIT:
        raise jwt.PyJWKClientConnectionError
    try:
        document = json.loads(text)
        if not isinstance(document, dict):
            raise jwt.PyJWKClientConnectionError
        return signing(jwt.PyJWKSet.from_dict(document).keys)
    except (ValueError, TypeError, AttributeError, RecursionError, jwt.PyJWKSetError):  # it is something else
        raise jwt.PyJWKClientConnectionError from None
