"""A Redis behind Sentinel: clients for whatever is its primary."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from .setting_values import sentinels
from .tls import redis_options, sentinel_options

if TYPE_CHECKING:
    from redis import Redis

SCHEMES = ("sentinel", "sentinels")


class Watch(NamedTuple):
    """How many Sentinels watch a primary, and how many of them are up, as one of them says; how many have to agree, its replicas;
    and how many of the address's answer, of how many."""

    sentinels: int
    up: int
    quorum: int
    replicas: int
    answer: int
    named: int


def is_sentinel(address: str) -> bool:
    """Whether an address is that of Sentinels."""
    return address.partition("://")[0] in SCHEMES


def client_of(address: str, **options: Any) -> Redis:
    """redis-py's client for an address: of one server, or of the primary that Sentinels name. Connects when it is used."""
    from redis import Redis

    if is_sentinel(address):
        return client_of_primary(address, **options)
    return Redis.from_url(address, **options | redis_options(address))


def client_of_primary(address: str, **options: Any) -> Redis:
    """redis-py's client for the primary that the Sentinels of an address name. Connects when it is used.

    User and password are those of the Sentinels, too. `options`: of every connection. A connection asks the Sentinels when it is
    opened, and again once its server refuses writes. Raises `ValueError` for what is no address.
    """
    scheme, _, rest = address.partition("://")
    hosts, login, name, database = sentinels(rest)
    if scheme == "sentinels":
        options |= {"ssl": True, **sentinel_options(rest)}
    user, _, password = login.partition(":")
    options |= {"username": unquote(user) or None, "password": unquote(password) or None}
    of_sentinels = {option: value for option, value in options.items() if option != "decode_responses"}
    client: Redis = _asked()(hosts, sentinel_kwargs=of_sentinels, **options).master_for(name, db=database)
    return client


@cache
def _asked() -> Any:
    """redis-py's `Sentinel`, which keeps no connection to those that it has asked: every process would come to have one to each."""
    from redis.sentinel import Sentinel

    class Asked(Sentinel):
        def discover_master(self, service_name: str) -> Any:
            try:
                return super().discover_master(service_name)  # type: ignore[no-untyped-call]
            finally:
                for each in self.sentinels:
                    each.connection_pool.disconnect(inuse_connections=False)

    return Asked


def watch(client: Redis) -> Watch:
    """What the first Sentinel that answers says, and how many do. `client`: of `client_of_primary`. Raises `RedisError` if none does."""
    from redis import RedisError

    pool: Any = client.connection_pool
    failed: RedisError | None = None
    said: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    named = pool.sentinel_manager.sentinels
    for each in named:
        try:
            said.append((each.sentinel_masters()[pool.service_name], each.sentinel_sentinels(pool.service_name)))
        except (RedisError, KeyError) as error:
            failed = error if isinstance(error, RedisError) else RedisError("it does not know this primary")
    if not said:
        raise failed or RedisError("no Sentinel")
    of_primary, others = said[0]
    up = sum(not other["is_sdown"] for other in others) + 1
    return Watch(len(others) + 1, up, of_primary["quorum"], of_primary["num-slaves"], len(said), len(named))


def sentinel_acl(password: str, *, name: str) -> str:
    """The users of Sentinels, as an ACL file: one that may ask for the primary, and no default user.

    Contains an unsalted hash of the password, as the file of the Redis behind them does, where user and password are the same.
    """
    secret = hashlib.sha256(password.encode()).hexdigest()
    commands = " ".join(f"+{each}" for each in ("sentinel|masters", "sentinel|sentinels", "ping"))
    return f"user {name} reset on #{secret} {commands}\nuser default off\n"
