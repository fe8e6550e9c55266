"""Checks of the addresses: whether what leaves this machine is encrypted, and the server verified.

Connects to nothing. Each client is asked what it would do, with the options that the application gives it, since their
defaults differ: libpq and py-amqp accept a certificate for any host, Celery's Redis any certificate at all. Not checked:
result backends other than Redis and Postgres, brokers other than RabbitMQ and Redis.
"""

from __future__ import annotations

import inspect
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any
from urllib.parse import urlsplit

import redis.connection
from celery import Celery
from kombu import Connection
from pydantic import SecretStr
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from ..hosts import Allowed, is_loopback, libpq_parameters
from ..setting_values import sentinels
from ..settings import Settings
from ..store.connections import login
from ..stores.dynamodb import DynamoDBStore
from ..stores.store import TIMEOUT
from ..tls import redis_options, sentinel_options
from .findings import Finding, Level, ok, refusal, warning

PLAIN = "plain text off this machine"
ANY_CERTIFICATE = "TLS without verifying the certificate"
ANY_HOST = "TLS without comparing the certificate's name with the host's"
UNKNOWN_OPTIONS = "TLS options in the address, which py-amqp does not support"

_POSTGRES = "add sslmode=verify-full, and sslrootcert= with the authority's file"
_REDIS = (
    "use rediss:// with ssl_cert_reqs=required, ssl_check_hostname=true, and ssl_ca_certs= with the authority's file"
)
_AMQP = "use amqps:// with broker_use_ssl = {'server_hostname': None, 'ca_certs': the authority's file}"
_REDIS_BROKER = (
    "use rediss:// with broker_use_ssl = {'ssl_cert_reqs': 'required', 'ssl_check_hostname': True, 'ssl_ca_certs': the "
    "authority's file}"
)


@dataclass(frozen=True, slots=True)
class Server:
    """One that an address names: its names and numbers, none for a Unix socket, and what is wrong with the connection to it."""

    names: tuple[str, ...]
    wrong: str | None
    remedy: str


def check_tls(app: Celery, given: Settings | None) -> list[Finding]:
    """Whether each address that leaves this machine is encrypted and verified. `given`: the settings, if they are valid."""
    entries = () if given is None else given.plain_text_hosts
    allowed = Allowed.of(entries)
    findings = []
    if given is not None:
        findings.append(_finding("idempotency_database_url", _postgres(login(given)), allowed))
        if given.redis_url is not None:
            findings.append(_finding("idempotency_redis_url", _store(given.redis_url.get_secret_value()), allowed))
    for setting, url in broker_addresses(app).items():
        findings.append(_finding(setting, _broker(app, url), allowed))
    findings.append(_finding("result_backend", _results(app), allowed))
    if entries:
        found = f"{', '.join(entries)}: may be reached in plain text, or over TLS that does not verify them"
        advice = "only where the network itself encrypts and knows its servers; remove what does not need it"
        findings.append(warning("idempotency_plain_text_hosts", found, advice))
    return [finding for finding in findings if finding is not None]


def check_store_tls(subject: str, address: str, entries: Sequence[str]) -> list[Finding]:
    """Whether a store is reached encrypted and verified. `entries`: hosts that need not be. Raises `MissingExtra`."""
    found = _finding(subject, _store(address), Allowed.of(entries))
    return [] if found is None else [found]


def unverified_postgres(parameters: Mapping[str, Any]) -> str | None:
    """What is wrong with a connection that leaves this machine, and what to do; None if it is verified, or does not leave.

    `parameters`: as psycopg is given them.
    """
    away = [each for each in _postgres(parameters) if each.names and not is_loopback(each.names[0])]
    return next((f"{each.wrong}; {each.remedy}" for each in away if each.wrong), None)


def is_refused(findings: Sequence[Finding], *settings: str) -> bool:
    """Whether an address was refused: then no password is sent there, by a check either."""
    subjects = {f"{setting} TLS" for setting in settings}
    return any(finding.level is Level.REFUSAL and finding.subject in subjects for finding in findings)


def _finding(setting: str, servers: Sequence[Server] | None, allowed: Allowed) -> Finding | None:
    """About an address, whose hosts are not shown: in a mistyped one, a password may stand in their place."""
    if not servers:
        return None  # there is none, or it cannot be read, which is another finding
    away = [each for each in servers if each.names and not is_loopback(each.names[0])]
    wrong = [each for each in away if each.wrong and not any(map(allowed.has_host, each.names))]
    if wrong:
        advice = f"{wrong[0].remedy}, or name the host in idempotency_plain_text_hosts"
        return refusal(f"{setting} TLS", str(wrong[0].wrong), advice)
    if not away:
        return ok(f"{setting} TLS", "not needed, on this machine")
    if any(each.wrong for each in away):
        return ok(f"{setting} TLS", "not required, by idempotency_plain_text_hosts")
    return ok(f"{setting} TLS", "verified, with the host's name")


def _postgres(parameters: Mapping[str, Any]) -> list[Server]:
    """The servers that libpq would try."""
    said = libpq_parameters(parameters)
    modes = {"verify-full": None, "verify-ca": ANY_HOST, "require": ANY_CERTIFICATE}
    # sslrootcert=system admits no mode but verify-full
    wrong = None if said.get("sslrootcert") == "system" else modes.get(said.get("sslmode", ""), PLAIN)
    if parameters.get("service") and not said.get("hostaddr"):  # the file's would win over the address's host
        return [Server(_names("unknown", host), wrong, _POSTGRES) for host in said.get("host", "").split(",")]
    hosts = zip_longest(said.get("hostaddr", "").split(","), said.get("host", "").split(","), fillvalue="")
    return [
        # the number is what is connected to
        Server(() if not address and host[:1] in ("", "/", "@") else _names(address, host), wrong, _POSTGRES)
        for address, host in hosts
    ]


def _names(*names: str) -> tuple[str, ...]:
    return tuple(name for name in names if name)


def _hints(url: SecretStr) -> Server:
    with redis.Redis.from_url(url.get_secret_value(), **redis_options(url.get_secret_value())) as client:
        pool = client.connection_pool
        return _redis({"connection_class": pool.connection_class, **pool.connection_kwargs}, _REDIS)


def _store(address: str) -> list[Server]:
    scheme, _, rest = address.partition("://")
    if scheme == "dynamodb":
        region, _, table = rest.partition("/")
        endpoint = urlsplit(DynamoDBStore(region, table, service="", timeout=TIMEOUT).endpoint)
        wrong = None if endpoint.scheme == "https" else PLAIN  # botocore verifies certificates and names
        return [Server(_names(endpoint.hostname or "unknown"), wrong, "use an https endpoint")]
    if scheme in ("sentinel", "sentinels"):
        encrypted: dict[str, Any] = {"connection_class": redis.SSLConnection} if scheme == "sentinels" else {}
        options = encrypted | (sentinel_options(rest) if encrypted else {})
        hosts, _, _, _ = sentinels(rest)
        return [_redis({"host": host, **options}, "use sentinels://") for host, _ in hosts]
    return [_hints(SecretStr(f"{scheme.removesuffix('+cluster')}://{rest}"))]


def _redis(parameters: Mapping[str, Any], remedy: str) -> Server:
    """The server that redis-py would connect to."""
    kind = parameters.get("connection_class") or redis.Connection
    if issubclass(kind, redis.UnixDomainSocketConnection):
        return Server((), None, remedy)
    names = _names(str(parameters.get("host") or "localhost"))
    if not issubclass(kind, redis.SSLConnection):
        return Server(names, PLAIN, remedy)
    defaults = inspect.signature(redis.connection.SSLConnection.__init__).parameters
    required, compared = (
        parameters.get(name, defaults[name].default) for name in ("ssl_cert_reqs", "ssl_check_hostname")
    )
    if required not in ("required", ssl.CERT_REQUIRED):
        return Server(names, ANY_CERTIFICATE, remedy)
    return Server(names, None if compared else ANY_HOST, remedy)


def broker_addresses(app: Celery) -> dict[str, Any]:
    """The brokers' addresses by the settings that have them, each once."""
    read, write = app.conf.broker_read_url, app.conf.broker_write_url
    return {"broker_url": write} if read == write else {"broker_read_url": read, "broker_write_url": write}


def alternatives(app: Celery, url: Any) -> Iterator[Connection]:
    """The brokers that kombu would try, one after the other. Raises `ValueError` and `KeyError` for what is no address."""
    with app.connection_for_write(url) as whole:
        for each in whole.alt or [url]:
            if isinstance(each, str) and "://" not in each:  # a host alone: all else is that of the first
                connection = whole.clone()
                connection.switch(each)
                yield connection
                continue
            with app.connection_for_write(each) as connection:
                yield connection


def _broker(app: Celery, url: Any) -> list[Server]:
    """The brokers that kombu would try, if they speak AMQP or are Redis."""
    servers = []
    try:
        for connection in alternatives(app, url):
            driver = connection.transport.driver_type  # from here on, `ssl` is true for amqps://
            if driver == "amqp":
                servers.append(Server(_names(connection.hostname or "localhost"), _amqp(connection), _AMQP))
            elif driver == "redis":
                servers.append(_kombu_redis(connection))
    except (ValueError, KeyError):
        return []  # another check says that it is not an address
    return servers


def _amqp(connection: Connection) -> str | None:
    """What is wrong with TLS as py-amqp does it."""
    given: Any = (connection.transport_options or {}).get("ssl", connection.ssl)
    if not given:
        return PLAIN
    options = given if isinstance(given, Mapping) else {}
    if any(name.startswith("ssl_") and name != "ssl_version" for name in options):
        return UNKNOWN_OPTIONS
    if context := options.get("context"):
        return None if context.get("check_hostname") else ANY_HOST
    if options.get("cert_reqs") not in (None, ssl.CERT_REQUIRED):
        return ANY_CERTIFICATE
    # a name, or None for that of the address; without the option none is compared
    return None if "server_hostname" in options else ANY_HOST


def _kombu_redis(connection: Connection) -> Server:
    """Redis as the broker: kombu takes options of TLS only as a mapping, and verifies nothing without."""
    host = connection.hostname or "localhost"
    if "://" in host:
        return Server((), None, _REDIS_BROKER)  # a Unix socket
    encrypted: dict[str, Any] = {"connection_class": redis.SSLConnection}
    options = {**encrypted, **connection.ssl} if isinstance(connection.ssl, Mapping) else {}
    return _redis({"host": host, **options}, _REDIS_BROKER)


def _results(app: Celery) -> list[Server]:
    """The servers of Celery's result backend, if it is Redis or Postgres."""
    url = app.conf.result_backend
    scheme = url.partition("://")[0] if isinstance(url, str) else ""
    try:
        if scheme in ("redis", "rediss", "sentinel"):
            parameters = app.backend.connparams
            return [_redis(each, _REDIS) for each in parameters.get("hosts") or [parameters]]
        if scheme.startswith("db+postgresql"):
            address = make_url(url.removeprefix("db+"))
            _, given = address.get_dialect()().create_connect_args(address)
            extra = (app.conf.database_engine_options or {}).get("connect_args") or {}
            return _postgres({**given, **extra})
    except (ValueError, ArgumentError):
        return [Server(("unknown",), "not what Celery takes", _REDIS)]
    return []
