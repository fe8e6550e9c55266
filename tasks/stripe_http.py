"""Stripe's SDK over urllib3 itself, without the layer of requests between them that it uses by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import stripe
import urllib3

# More connections at a time than a process has threads: one beyond these would be opened for a single call.
CONNECTIONS = 100


class StripeConnections(stripe.HTTPClient):
    """Connections to one address of Stripe, kept between calls; safe to share between threads, not across a fork.

    `timeout` is in seconds, to connect and to read. Honours HTTPS_PROXY, HTTP_PROXY and NO_PROXY as they were when it
    was made.
    """

    name = "urllib3"

    def __init__(self, url: str, *, timeout: tuple[float, float]) -> None:
        super().__init__()
        connect, read = timeout
        options: dict[str, Any] = {
            "maxsize": CONNECTIONS,
            "timeout": urllib3.Timeout(connect=connect, read=read),
            "retries": False,  # whether a call may be repeated is not for the transport to say
            "cert_reqs": "CERT_REQUIRED",
            "ca_certs": stripe.ca_bundle_path,
        }
        address = urlsplit(url)
        proxy = None if proxy_bypass(address.hostname or "") else getproxies().get(address.scheme)
        self._pool = urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)

    def request(  # type: ignore[override]  # the SDK's own clients return bytes as well
        self, method: str, url: str, headers: Mapping[str, str] | None, post_data: Any = None, **_: Any
    ) -> tuple[bytes, int, Mapping[str, str]]:
        """Make one call. Raises `stripe.APIConnectionError` when there is no whole answer."""
        try:
            response = self._pool.request(method, url, body=post_data, headers=headers)
        except urllib3.exceptions.HTTPError as error:
            unreachable = f"no answer ({type(error).__name__})"
            raise stripe.APIConnectionError(unreachable) from error  # type: ignore[no-untyped-call]
        return response.data, response.status, response.headers

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        self._pool.clear()
