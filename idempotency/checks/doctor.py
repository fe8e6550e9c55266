"""`idempotency doctor`: finds what in the set-up would lose work or do it twice.

Checks the configuration, then each server. Not checked: RabbitMQ policies, which can lower a queue's limits below its
arguments, and the settings of an application's own database sessions.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import redis
from amqp.exceptions import AccessRefused, AMQPError, NotFound, PreconditionFailed
from celery import Celery
from kombu import Connection as BrokerConnection
from kombu import Queue
from kombu.exceptions import OperationalError as BrokerError
from pydantic import SecretStr
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.pool import NullPool

from ..errors import SettingsError
from ..queues import dead_letter_queues
from ..settings import Settings
from ..store import schema
from ..store.connections import make_attempts_engine
from ..store.overview import monitoring_connection
from ..upkeep import alarms, overview
from . import configuration
from .findings import Finding, Level, ok, refusal, warning

__all__ = ["Finding", "Level", "check_database", "doctor"]

# gen_random_uuid() without an extension
OLDEST_POSTGRES = 13
# SET … KEEPTTL
OLDEST_REDIS = 6
# at-least-once dead-lettering of quorum queues
OLDEST_RABBITMQ = (3, 10)
# Seconds.
TIMEOUT = 5
# Seconds. All comparisons use the database's clock, so a difference only costs latency and confuses logs.
CLOCK_TOLERANCE = 1.0

# Servers' error messages are never shown, because some repeat the address. These are worth distinguishing.
_PASSWORD, _NO_PASSWORD, _NAME = "wrong password", "the address has no password", "no such database or user"
_REASONS = (
    (r"no password supplied", _NO_PASSWORD),
    (
        r"password authentication failed|access_refused|wrongpass|invalid username-password|noauth|authentication",
        _PASSWORD,
    ),
    (r"refused", "connection refused"),
    (r"resolve|name or service|nodename|getaddrinfo|errno -[235]\b", "no such host"),
    (r"timed? ?out", "no answer in time"),
    (r"does not exist", _NAME),
)
# Those that do not go away by waiting.
WRONG_ADDRESS = (_PASSWORD, _NO_PASSWORD, _NAME)

_DATABASE = text("""
SELECT current_setting('server_version_num')::int / 10000 AS version,
       current_setting('fsync') AS fsync,
       current_setting('full_page_writes') AS full_page_writes,
       current_setting('synchronous_commit') AS synchronous_commit,
       current_setting('synchronous_standby_names') AS synchronous_standby_names,
       current_setting('default_transaction_isolation') AS isolation,
       current_setting('transaction_read_only') = 'on' OR pg_is_in_recovery() AS read_only,
       (SELECT count(*) FROM pg_stat_replication) AS standbys,
       extract(epoch FROM clock_timestamp())::float8 AS now
""")


_OURS = text("""
SELECT pg_backend_pid() AS backend, current_setting('lock_timeout') AS lock_timeout,
       current_setting('statement_timeout') AS statement_timeout
""")
# A pooler that rotates its backends returns to the same one after a few connections.
POOLER_TRIES = 5


def doctor(app: Celery) -> list[Finding]:
    """Check the application and its servers; returns findings, the worst first. Changes nothing; may take seconds.

    An unreachable server is a finding, not an exception.
    """
    app.loader.import_default_modules()  # registers the tasks
    settings, findings = configuration.read_settings(app)
    findings += configuration.check(app, settings)
    if settings is not None:
        findings += _check_server("database", "idempotency_database_url", lambda: check_database(settings))
        if settings.redis_url is None:
            findings.append(warning("redis", "not set", "every claim and duplicate goes to Postgres"))
        else:
            url = settings.redis_url
            # only a warning: without Redis, everything still works, with more round trips
            findings += _check_server("redis", "idempotency_redis_url", lambda: _redis(url), Level.WARNING)
        if not any(f.level is Level.REFUSAL and f.subject.startswith("database") for f in findings):
            findings += _check_server(
                "database", "idempotency_database_url", lambda: _processes(app, settings), Level.WARNING
            )
    findings += _check_server("broker", "broker_url", lambda: _broker(app))
    order = list(reversed(Level))
    return sorted(findings, key=lambda finding: order.index(finding.level))


def check_database(given: Settings) -> list[Finding]:
    """Check the database's settings, tables and rights, and any pooler. Raises SQLAlchemy's errors if it does not answer."""
    # No options on this connection: an application's sessions get the server's defaults.
    engine = create_engine(
        given.database_url.get_secret_value(),
        poolclass=NullPool,
        hide_parameters=True,
        connect_args={"connect_timeout": TIMEOUT},
    )
    with engine.connect() as connection:
        findings = [*_database(connection), *_tables(connection)]
    if any(finding.subject == "database default_transaction_isolation" for finding in findings):
        return findings  # our own connections would be refused
    return [*findings, *_our_connections(given)]


def _database(connection: Connection) -> list[Finding]:
    asked = time.time()
    row = connection.execute(_DATABASE).one()
    findings = [ok("database", f"Postgres {row.version}")]
    if row.version < OLDEST_POSTGRES:
        findings = [refusal("database", f"Postgres {row.version}, need at least {OLDEST_POSTGRES}", "upgrade it")]
    for name in ("fsync", "full_page_writes"):
        if (value := getattr(row, name)) != "on":
            findings.append(refusal(f"database {name}", f"{value}, need on", "a power cut can lose committed data"))
    if row.synchronous_commit in ("off", "local"):
        advice = "a server crash may lose what your own sessions enqueue; the library's connections set it to on"
        findings.append(warning("database synchronous_commit", f"{row.synchronous_commit}, need on", advice))
    if row.standbys and not row.synchronous_standby_names:
        advice = "a failover can lose committed data; set synchronous_standby_names"
        findings.append(warning("database", f"{row.standbys} standbys, none synchronous", advice))
    if row.isolation != "read committed":
        advice = "under a higher level, an attempt cannot finish after a duplicate was counted"
        found = f"{row.isolation}, need read committed"
        findings.append(refusal("database default_transaction_isolation", found, advice))
    if row.read_only:
        findings.append(
            refusal("database", "read-only, need the writable primary", "check the address or the failover")
        )
    findings.append(_clock("database clock", row.now - (asked + time.time()) / 2, "this host"))
    return findings


def _tables(connection: Connection) -> list[Finding]:
    """Whether the tables are of this version, and whether this role may use them."""
    rights = [
        warning(f"database rights on {row.name}", f"no {row.missing}", "only operators' commands need it")
        if row.for_people
        else refusal(
            f"database rights on {row.name}", f"no {row.missing}", "every delivery would wait for it; grant it"
        )
        for row in schema.missing_rights(connection)
    ]
    if any(schema.VERSION_TABLE in finding.subject or "schema " in finding.subject for finding in rights):
        return rights  # the version cannot be read
    try:
        schema.require_compatible(connection)
    except SettingsError as error:
        subject, _, found = str(error).partition(": ")
        found, _, advice = found.partition("; ")
        return [refusal(subject, found, advice), *rights]
    return [ok("database schema", "compatible with this code"), *rights]


def _our_connections(given: Settings) -> list[Finding]:
    """Whether our connection options take effect, and whether a pooler is in transaction mode."""
    engine = make_attempts_engine(given, poolclass=NullPool)
    try:
        first = engine.connect()
    except OperationalError as error:
        if "unsupported startup parameter" not in str(error.orig):
            raise
        advice = "for PgBouncer: ignore_startup_parameters = options"
        return [refusal("database pooler", "refuses our connection options", advice)]
    with first:
        driver: Any = first.connection.driver_connection
        shown = first.execute(_OURS).one()
        first.rollback()  # a pooler may take the backend away between transactions
        findings = [
            warning(f"database {name}", "0 on our connections, although we set it", "a statement may wait forever")
            for name in ("lock_timeout", "statement_timeout")
            if getattr(shown, name) == "0"
        ]
        if not _tcp_user_timeout(driver.pgconn.socket):
            findings.append(
                warning("database TCP_USER_TIMEOUT", "0 on our connections", "a vanished server is noticed late")
            )
        if shown.backend == driver.info.backend_pid:
            return findings
        # The first connection is still open: if another one gets the same backend, the pooler shares it.
        for _ in range(POOLER_TRIES):
            with engine.connect() as other:
                if other.execute(_OURS).one().backend == shown.backend:
                    advice = (
                        "slower: no prepared statements, and our time-outs have no effect; connect to Postgres directly"
                    )
                    return [
                        *findings,
                        warning("database pooler", "in transaction mode, better in session mode", advice),
                    ]
    return [*findings, ok("database pooler", "none in transaction mode detected")]


def _tcp_user_timeout(descriptor: int) -> bool:
    """Whether the kernel gives up a connection whose peer does not acknowledge; true for a Unix socket."""
    with socket.socket(fileno=os.dup(descriptor)) as asked:
        if asked.family == socket.AF_UNIX:
            return True
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        return option is not None and asked.getsockopt(socket.IPPROTO_TCP, option) > 0


def _redis(url: SecretStr) -> list[Finding]:
    with redis.Redis.from_url(
        url.get_secret_value(), socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT, decode_responses=True
    ) as client:
        info = client.info()
        asked = time.time()
        seconds, microseconds = client.time()
        now = (asked + time.time()) / 2
    findings = []
    version, role, policy = info["redis_version"], info["role"], info.get("maxmemory_policy", "unknown")
    if int(version.partition(".")[0]) < OLDEST_REDIS:
        findings.append(
            warning("redis", f"version {version}, need at least {OLDEST_REDIS}", "hints need SET … KEEPTTL")
        )
    if role != "master":
        findings.append(warning("redis", f"role {role}, need master", "it refuses all hints; use the primary"))
    if policy != "noeviction":
        advice = "evicted hints mean more claims in Postgres"
        findings.append(warning("redis maxmemory-policy", f"{policy}, need noeviction", advice))
    findings = findings or [ok("redis", f"version {version}, {role}, {policy}")]
    return [*findings, _clock("redis clock", seconds + microseconds / 1e6 - now, "this host")]


def _broker(app: Celery) -> list[Finding]:
    with app.connection_for_write(connect_timeout=TIMEOUT) as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=TIMEOUT)
        if connection.transport.driver_type != "amqp":
            return []
        properties = connection.connection.server_properties
        version = str(properties.get("version", ""))
        product = f"{properties.get('product', 'AMQP')} {version}"
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
        findings = [ok("broker", product)]
        if numbers < OLDEST_RABBITMQ:
            needed = ".".join(map(str, OLDEST_RABBITMQ))
            findings = [
                warning(
                    "broker",
                    f"{product}, need at least {needed}",
                    "messages may be lost on their way to the dead-letter queue",
                )
            ]
        declared = app.amqp.queues.values()
        for queue in [*declared, *dead_letter_queues(declared)]:
            findings += _real_queue(connection, queue)
        return findings


def _real_queue(connection: BrokerConnection, queue: Queue) -> list[Finding]:
    """Whether the existing queue has the arguments declared here. Creates nothing."""
    subject = f"queue {queue.name}"
    for passive in (True, False):  # a full declaration only if it exists; each refusal closes the channel
        channel = connection.channel()
        try:
            queue(channel).queue_declare(passive=passive)
        except NotFound:
            return [warning(subject, "not there yet", "a worker or the relay declares it")]
        except AccessRefused:
            return [warning(subject, "this user may not declare it", "compare its arguments manually")]
        except PreconditionFailed as error:
            return [
                refusal(
                    subject,
                    _inequivalent(error),
                    "delete the queue once it is empty, or declare it with its actual arguments",
                )
            ]
        finally:
            if channel.is_open:
                channel.close()
    return []


def _inequivalent(error: PreconditionFailed) -> str:
    """RabbitMQ's message, which names the argument and both values."""
    found = re.search(r"inequivalent arg .*", str(error.reply_text))
    return found.group() if found else "declared with different arguments than it has"


def _processes(app: Celery, given: Settings) -> list[Finding]:
    """Whether processes are missing or silent."""
    with monitoring_connection(given) as connection:
        found = overview.look(connection, app, given)
    wrong = [warning(alarm.subject, alarm.found, alarm.advice) for alarm in alarms.lasting(found, given)]
    return wrong or [ok("processes", f"{len(found.processes)} seen, none silent; no work without consumers")]


def _clock(subject: str, ahead: float, of: str) -> Finding:
    found = f"{abs(ahead):.3f} s {'ahead of' if ahead >= 0 else 'behind'} {of}"
    if abs(ahead) > CLOCK_TOLERANCE:
        return warning(
            subject, f"{found}, at most {CLOCK_TOLERANCE:g} s", "costs latency and confuses logs; loses nothing"
        )
    return ok(subject, found)


def _check_server(
    subject: str, setting: str, ask: Callable[[], list[Finding]], level: Level = Level.REFUSAL
) -> list[Finding]:
    try:
        return ask()
    except (DBAPIError, redis.RedisError, BrokerError, AMQPError, OSError) as error:
        return [Finding(level, subject, f"unreachable: {reason(error)}", f"check {setting} and the server")]
    except (ArgumentError, ValueError, KeyError):
        return [Finding(level, setting, "not an address", "correct it")]


def reason(error: BaseException) -> str:
    """Why a server could not be reached, without its own message, which may repeat the address."""
    said = str(getattr(error, "orig", None) or error).lower()
    return next((words for pattern, words in _REASONS if re.search(pattern, said)), type(error).__name__)
