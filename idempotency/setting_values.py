"""What the values of settings may be: each check raises `ValueError`, and names no value, which may have a password in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_address
from itertools import zip_longest
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ImportString, SecretStr, TypeAdapter, ValidationError
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session, sessionmaker

from . import objects
from .errors import CallRefused
from .hosts import is_loopback, libpq_parameters
from .objects import ObjectStore
from .tls import sentinel_options
from .wire.keys import check_key

NOT_AN_ADDRESS = "not an address"
SEVERAL_VIRTUAL_HOSTS = "names several virtual hosts: each address behind a ; has to name the same"
_EACH_A_PORT = (
    "hosts and ports cannot be told from each other; they go behind the name, a port for each host: "
    "/shop?host=one,two&port=5432,5432, and ::1 without brackets"
)
_NO_OPTION_OF_REDIS = "has an option that redis-py does not have, or a value that is none of it"
# Bytes. It is part of a queue's name, of at most 255.
SERVICE_LIMIT = 200
# Characters of a secret that signs messages: as many as the hash has bytes (RFC 2104, section 3).
SECRET_LENGTH = 32

# What a link to a provider's page about a call may have in it.
LINK_NAMES = frozenset({"key", "task", "effect"})
# As libpq has them: one:5432,two:5432.
_SEVERAL_HOSTS = re.compile(r":\d+,[^/]*:\d+/")

_Text = TypeVar("_Text", str, SecretStr)
_IMPORTED = TypeAdapter[Any](ImportString)


def web_address(value: _Text) -> _Text:
    try:
        address = urlsplit(value.get_secret_value() if isinstance(value, SecretStr) else value)
        host = address.hostname
    except ValueError:
        raise ValueError(NOT_AN_ADDRESS) from None
    # in plain text, others on the way could read what it carries, or answer in its place
    if address.scheme != "https" and not (address.scheme == "http" and is_loopback(host or "")):
        raise ValueError("must begin with https://, or with http:// on this machine")
    return value


WebAddress = Annotated[str, AfterValidator(web_address)]


def link(value: str) -> str:
    try:
        named = {name for _, name, _, _ in Formatter().parse(value) if name is not None}
    except ValueError:
        named = {""}
    if not named <= LINK_NAMES:  # nothing of a value but its text
        raise ValueError("must have no names in braces but {key}, {task} and {effect}")
    if "key" not in named or not value.partition("{")[0].startswith(("https://", "http://")):
        raise ValueError("must be an address that begins with https:// and has {key} in it")
    web_address(value.format_map(dict.fromkeys(LINK_NAMES, "x")))
    return value


def oidc_keys(value: str) -> str:
    if "://" in value:
        web_address(value)
    elif not Path(value).is_absolute():
        raise ValueError("must be an https address, or the absolute path of a file")
    return value


def database_address(value: SecretStr) -> SecretStr:
    try:
        driver = make_url(value.get_secret_value()).get_dialect().driver
    except (ArgumentError, ValueError):
        if _SEVERAL_HOSTS.search(value.get_secret_value()):
            raise ValueError("several hosts go behind the name: /shop?host=one:5432&host=two:5432") from None
        raise ValueError(NOT_AN_ADDRESS) from None  # the original message contains parts of the address
    if driver != "psycopg":
        raise ValueError("must be a Postgres address with the driver psycopg: postgresql+psycopg://")
    database_at(value.get_secret_value())
    return value


def database_at(address: str, *, by_itself: bool = False) -> tuple[str, list[tuple[str | None, int]]]:
    """The database of an address, and its servers with their ports, in its order, as libpq has them; None: libpq's default.

    `by_itself`: whatever the environment says.

    Raises `ValueError` where SQLAlchemy cannot say it, or takes a port for a part of a name.
    """
    url = make_url(address)
    try:
        _, given = url.get_dialect()().create_connect_args(url)
        said = {each: str(value) for each, value in given.items()} if by_itself else libpq_parameters(given)
        hosts, numbers, ports = (said.get(name, "").split(",") for name in ("host", "hostaddr", "port"))
        several = list(zip_longest(numbers, hosts, fillvalue=""))
        # libpq takes one port for all, or one for each
        each_port = [int(port or 5432) for port in (ports if len(ports) == len(several) else ports[:1] * len(several))]
    except (ArgumentError, ValueError):
        raise ValueError(_EACH_A_PORT) from None
    if any(":" in name and not name.startswith(("/", "@")) and not _is_number(name) for name in numbers + hosts):
        raise ValueError(_EACH_A_PORT)
    # a number is what is connected to; where a service leads, its file alone says
    name, service = said.get("dbname") or said.get("user") or "", said.get("service")
    servers = [(number or host or None, port) for (number, host), port in zip(several, each_port, strict=True)]
    return f"{name} of service {service}" if service else name, servers


def database_named(address: str) -> str:
    """The database as an address has it, `host:port/name`, without credentials; of several hosts, in whatever order."""
    url = make_url(address)
    name = url.query.get("dbname") or url.database or url.username
    if service := url.query.get("service"):
        name = f"{name} of service {service}"
    if isinstance(url.query.get("host"), tuple) or "," in str(url.query.get("host")):
        _, servers = database_at(address, by_itself=True)
        return f"{','.join(sorted(f'{host}:{port}' for host, port in servers))}/{name}"
    host, port = (getattr(url, each) or url.query.get(each) for each in ("host", "port"))
    return f"{host}:{port}/{name}"


def addresses_named(address: str) -> list[tuple[str | None, int, str]]:
    """Host, port and database that an address itself names: none where it leaves the database, or all of it, to something else."""
    url = make_url(address)
    _, given = url.get_dialect()().create_connect_args(url)
    if given.get("service") or not given.get("dbname"):
        return []
    name, servers = database_at(address)
    return [(host, port, name) for host, port in servers]


def _is_number(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def separated(value: Any) -> Any:
    return [part for each in value.split(",") if (part := each.strip())] if isinstance(value, str) else value


def long_enough(value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    if any(len(each.get_secret_value()) < SECRET_LENGTH for each in value):
        raise ValueError(f"each must have at least {SECRET_LENGTH} characters")
    return value


def is_shown(value: Any) -> bool:
    """Whether a value may be in an error: not what may be an address, in either of libpq's forms, with a password in it."""
    return not any(mark in repr(value) for mark in ("://", "@", "="))


def imported(value: Any) -> Any:
    """What a name such as "yourapp.db:engine" leads to; anything but a text is that itself."""
    try:
        return _IMPORTED.validate_python(value)
    except ValidationError as error:  # pydantic's own text has the value in it
        why = error.errors()[0]["msg"] if is_shown(value) else "must be a name that can be imported, not an address"
        raise ValueError(why) from None


Imported = Annotated[ImportString[Any], BeforeValidator(imported)]


def engine(value: Any) -> Any:
    if not callable(value):
        raise ValueError("must be a function that is called like SQLAlchemy's create_engine, or its name")
    return value


def traces(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    function = imported(value)
    if not callable(function):
        raise ValueError("must be true, false, or a function that sets up a tracer provider, or its name")
    return function


def session(value: Any) -> Any:
    if not isinstance(value, sessionmaker) and not (isinstance(value, type) and issubclass(value, Session)):
        raise ValueError("must be a subclass of SQLAlchemy's Session, a sessionmaker, or the name of one")
    if isinstance(value, sessionmaker) and (value.kw.get("binds") or value.kw.get("twophase")):
        raise ValueError("must have neither binds nor twophase: a body's writes and its record are one commit")
    if isinstance(value, sessionmaker) and value.kw.get("autobegin") is False:
        raise ValueError("must begin by itself: autobegin=False is the caller's promise to call begin()")
    return value


def object_store(value: Any) -> Any:
    if value is None:
        return None
    is_address = isinstance(value, str) and ("/" in value or value.startswith(("file:", "s3:")))
    store = objects.object_store(value) if is_address else imported(value)
    if isinstance(store, type) or not isinstance(store, ObjectStore):
        raise ValueError("must be file:///a/directory, s3://bucket/prefix, or an ObjectStore or the name of one")
    return store


def redis_address(value: SecretStr) -> SecretStr:
    scheme, _, rest = value.get_secret_value().partition("://")
    if scheme in ("sentinel", "sentinels"):
        _sentinels(scheme, rest)
    else:
        pool = _redis_pool(value.get_secret_value())
        _redis_connection(pool.connection_class, pool.connection_kwargs)
    return value


def _redis_pool(address: str) -> Any:
    import redis  # takes as long to import as a third of this library, and Redis is optional

    try:
        return redis.Redis.from_url(address).connection_pool  # does not connect
    except ValueError:
        raise ValueError(NOT_AN_ADDRESS) from None
    except Exception:  # redis-py has many, whose texts have the value in them
        raise ValueError(_NO_OPTION_OF_REDIS) from None


def _redis_connection(made: Any, options: Mapping[str, Any]) -> None:
    """Raise `ValueError` for what redis-py would say only as it makes a connection, or as it looks for the host."""
    try:
        made(**options)  # does not connect
        str(options.get("host", "")).encode("idna")
    except ValueError:
        raise ValueError(NOT_AN_ADDRESS) from None
    except Exception:
        raise ValueError(_NO_OPTION_OF_REDIS) from None


def sentinels(address: str, *, encrypted: bool = True) -> tuple[list[tuple[str, int]], str, str, int]:
    """Of what follows sentinel://: hosts with ports, user and password, the name of the primary, the database.

    `encrypted`: whether it is sentinels://, which alone may have options, those of TLS; they are `tls.sentinel_options`.
    """
    place, _, path = address.partition("/")
    path, _, options = path.partition("?")
    login, _, hosts = place.rpartition("@")
    name, _, database = path.partition("/")
    pairs = [each.rpartition(":") for each in hosts.split(",")]
    if not name or not all(host and port.isdecimal() for host, _, port in pairs) or not (database or "0").isdecimal():
        raise ValueError("must be sentinel://[user:password@]host:port[,host:port]/primary[/database]")
    if not all(encrypted and each.startswith("ssl_") for each in options.split("&") if each):
        raise ValueError("may have options only as sentinels://, and only those of TLS, as ?ssl_ca_certs=FILE")
    # a socket wants ::1 without its brackets
    return (
        [(host.removeprefix("[").removesuffix("]"), int(port)) for host, _, port in pairs],
        login,
        name,
        int(database or 0),
    )


def _sentinels(scheme: str, rest: str) -> None:
    from redis.connection import Connection, SSLConnection

    hosts, *_ = sentinels(rest, encrypted=scheme == "sentinels")
    made, options = (SSLConnection, sentinel_options(rest)) if scheme == "sentinels" else (Connection, {})
    for host, port in hosts:
        _redis_connection(made, {"host": host, "port": port, **options})


def store_address(value: SecretStr) -> SecretStr:
    address = value.get_secret_value()
    scheme, _, rest = address.partition("://")
    match scheme:
        case "dynamodb":
            if re.fullmatch(r"[a-z0-9-]+/[A-Za-z0-9_.-]{3,255}", rest) is None:
                raise ValueError("must be dynamodb://region/table")
        case "sentinel" | "sentinels":
            _sentinels(scheme, rest)
        case "redis" | "rediss" | "unix":
            redis_address(value)
        case "redis+cluster" | "rediss+cluster":  # which has options that a connection has not
            _redis_pool(f"{scheme.removesuffix('+cluster')}://{rest}")
        case _:
            raise ValueError(
                "must begin with redis://, rediss://, sentinel://, sentinels://, redis+cluster://, rediss+cluster:// or dynamodb://"
            )
    return value


StoreAddress = Annotated[SecretStr, AfterValidator(store_address)]


def tenant(value: str) -> str:
    try:
        return check_key(value, field="tenant")
    except CallRefused as error:
        raise ValueError(str(error)) from None


def service(value: str) -> str:
    if not value.isprintable() or not 0 < len(value.encode()) <= SERVICE_LIMIT:
        raise ValueError(f"must be 1 to {SERVICE_LIMIT} bytes of printable text: it is part of a queue's name")
    if value == "__main__":
        raise ValueError("is '__main__', as Celery(__name__) is in a script; set it, to the same in all processes")
    return value
