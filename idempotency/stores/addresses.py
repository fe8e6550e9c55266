"""The address of a store: which one it is, and the client for it. Only `Store`s connect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ..setting_values import sentinels
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
    from redis import Redis, RedisCluster
    from redis.backoff import NoBackoff
    from redis.retry import Retry
    from redis.sentinel import Sentinel

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
    if scheme not in ("sentinel", "sentinels"):
        return Redis.from_url(address, **options | redis_options(address))
    hosts, login, name, database = sentinels(rest)
    if scheme == "sentinels":
        options |= {"ssl": True, **redis_options(f"rediss://{rest}")}
    user, _, password = login.partition(":")
    options |= {"username": unquote(user) or None, "password": unquote(password) or None}
    of_sentinels = {option: value for option, value in options.items() if option != "decode_responses"}
    untyped: Any = Sentinel
    return untyped(hosts, sentinel_kwargs=of_sentinels, **options).master_for(name, db=database)
