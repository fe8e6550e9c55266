"""The address of a store: which one it is, and the client for it. Only `Store`s connect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..sentinel import client_of
from ..tls import redis_options

if TYPE_CHECKING:
    from .store import Store


def open_store(address: str, *, service: str, timeout: float) -> Store:
    """The store at an address that `setting_values.store_address` accepts. Does not connect. Raises `MissingExtra`."""
    if address.startswith("dynamodb://"):
        from .dynamodb import DynamoDBStore

        parts = urlsplit(address)
        return DynamoDBStore(parts.netloc, parts.path.strip("/"), service=service, timeout=timeout)
    from .redis import RedisStore

    return RedisStore(address, service=service, timeout=timeout)


def redis_client(address: str, timeout: float) -> Any:
    """redis-py's client for an address. One of a cluster connects here."""
    from redis import RedisCluster
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    scheme, _, rest = address.partition("://")
    options: dict[str, Any] = {
        "decode_responses": True,
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        # Once more, for an idle connection that a restart has closed: the scripts find what they have done themselves.
        "retry": Retry(NoBackoff(), 1),
    }
    if scheme.endswith("+cluster"):
        plain = f"{scheme.removesuffix('+cluster')}://{rest}"
        # its own retries follow slots that have moved
        return RedisCluster.from_url(plain, **options | redis_options(plain) | {"retry": Retry(NoBackoff(), 3)})
    return client_of(address, **options)
