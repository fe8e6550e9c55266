"""Stripe's SDK on urllib3 directly, instead of on requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit
from urllib.request import getproxies, proxy_bypass

import stripe
import urllib3

from tasks.answers import ANSWER_LIMIT, LIST_LIMIT, request_limited, with_deadlines

# More than a process has threads: further connections would be used for one call only.
CONNECTIONS = 100


class StripeConnections(stripe.HTTPClient):
    """Persistent connections to one address of Stripe; safe to share between threads, but not across a fork.

    `timeout` is in seconds, to connect and to read. Reads HTTPS_PROXY, HTTP_PROXY and NO_PROXY when it is created.
    """

    name = "urllib3"

    def __init__(self, url: str, *, timeout: tuple[float, float]) -> None:
        super().__init__()
        connect, read = timeout
        options: dict[str, Any] = {
            "maxsize": CONNECTIONS,
            "timeout": urllib3.Timeout(connect=connect, read=read),
            "retries": False,  # the transport cannot know whether a call may be repeated
            "cert_reqs": "CERT_REQUIRED",
            "ca_certs": stripe.ca_bundle_path,
        }
        address = urlsplit(url)
        proxy = None if proxy_bypass(address.hostname or "") else getproxies().get(address.scheme)
        self._pool = with_deadlines(urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options))

    def request(  # type: ignore[override]  # the SDK's own clients return bytes as well
        self, method: str, url: str, headers: Mapping[str, str] | None, post_data: Any = None, **_: Any
    ) -> tuple[bytes, int, Mapping[str, str]]:
        """Make one call; one with `limit` in its query asks for a list. Raises `stripe.APIConnectionError` without a complete answer,
        and `AnswerTooLong`."""
        is_list = "limit" in parse_qs(urlsplit(url).query)
        limit = LIST_LIMIT if is_list else ANSWER_LIMIT
        try:
            status, found, body = request_limited(self._pool, method, url, limit=limit, body=post_data, headers=headers)
        except urllib3.exceptions.HTTPError as error:
            unreachable = f"no answer ({type(error).__name__})"
            raise stripe.APIConnectionError(unreachable) from error  # type: ignore[no-untyped-call]
        return body, status, found

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        self._pool.clear()
