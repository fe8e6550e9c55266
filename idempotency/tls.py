"""Options with which client libraries verify a server over TLS: its certificate, and that this is for the host's name.

redis-py before version 6 and py-amqp accept a certificate for any host unless they are told to compare. What an application
has configured is left alone.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit


def redis_options(url: str) -> dict[str, Any]:
    """What redis-py is given beside an address. It prefers what the address says."""
    parts = urlsplit(url)
    # redis-py 5 cannot compare names where certificates are not verified
    is_verified = parts.scheme == "rediss" and parse_qs(parts.query).get("ssl_cert_reqs") != ["none"]
    return {"ssl_check_hostname": True} if is_verified else {}


def sentinel_options(address: str) -> dict[str, Any]:
    """What redis-py is given to reach Sentinels, and the primary that they name, over TLS.

    `address`: what follows sentinels://. Its options are those of rediss://: ssl_ca_certs, and others that begin so.
    """
    from redis import connection

    untyped: Any = connection
    url = f"rediss://localhost/0?{address.partition('/')[2].partition('?')[2]}"
    return redis_options(url) | {
        name: value for name, value in untyped.parse_url(url).items() if name.startswith("ssl_")
    }


def amqp_options(given: Any) -> Any:
    """What py-amqp is given as `ssl`, from what the application gives it; false means plain text."""
    if not given:
        return given
    options = {**given} if isinstance(given, Mapping) else {}
    if options.get("context"):
        options["context"] = {"check_hostname": True, **options["context"]}
    elif options.get("cert_reqs") not in (None, ssl.CERT_REQUIRED):
        return options
    options.setdefault("server_hostname", None)  # kombu puts the name of the address there, into this copy
    return options
