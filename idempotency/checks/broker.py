"""Checks of the broker: its address, publisher confirms, RabbitMQ's version."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

from amqp.exceptions import ChannelError
from celery import Celery
from kombu import Connection

from ..broker.connections import BROKER_ERRORS, brokers, connect
from ..broker.queues import from_leader
from ..errors import SettingsError
from ..hosts import is_loopback
from ..queues import dead_letter_queues
from ..setting_values import NOT_AN_ADDRESS, SEVERAL_VIRTUAL_HOSTS
from ..settings import Settings
from .findings import Finding, ok, refusal, warning
from .queues import check_real_queues
from .tls import alternatives, broker_addresses
from .unreachable import TIMEOUT

# at-least-once dead-lettering of quorum queues
OLDEST_RABBITMQ = (3, 10)


def require_broker_address(app: Celery) -> None:
    """Raise `SettingsError` for an invalid broker address: kombu's own error would show parts of it."""
    try:
        _speaks_amqp(app)
        apart = _led_apart(app)
    except ValueError:
        raise SettingsError(f"broker_url: {NOT_AN_ADDRESS}") from None
    for setting in apart:
        raise SettingsError(f"{setting}: {SEVERAL_VIRTUAL_HOSTS}")


def check_broker_settings(app: Celery) -> tuple[bool, list[Finding]]:
    """Whether the broker is RabbitMQ, by its address, and what is wrong with its settings. Does not connect."""
    try:
        if not _speaks_amqp(app):
            found = "not RabbitMQ: no delivery limit, no dead-letter queue and no confirms"
            late = "a killed worker's messages come back only after the visibility time-out"
            return False, [warning("broker", found, f"good enough for trying things out; {late}")]
        findings = [refusal(setting, SEVERAL_VIRTUAL_HOSTS, "correct it") for setting in _led_apart(app)]
        findings += _read_elsewhere(app)
    except ValueError:
        return False, [refusal("broker_url", NOT_AN_ADDRESS, "correct it")]
    if not (app.conf.broker_transport_options or {}).get("confirm_publish"):
        advice = "a message that the broker does not accept would be lost silently"
        findings.append(refusal("broker_transport_options", "confirm_publish off, need True", advice))
    return True, findings


def check_signatures(app: Celery, given: Settings) -> list[Finding]:
    """Whether messages are signed, so that workers run only what the application has published."""
    number, until = len(given.message_secrets), given.unsigned_until
    if not number:
        found = "are not signed"
        if _is_on_loopback(app):
            return [ok("messages", f"{found}; the broker listens on loopback")]
        advice = "anyone who may publish to the broker can call any task under any key; set idempotency_message_secrets"
        return [warning("messages", found, advice)]
    found = f"are signed, and {number} secret{'s are' if number > 1 else ' is'} accepted"
    if until is None:
        return [ok("messages", found)]
    if datetime.now(UTC) < until:
        return [
            warning("messages", f"{found}; those without a signature, too, until {until.isoformat()}", "not for long")
        ]
    return [ok("messages", f"{found}; idempotency_unsigned_until is over and can be removed")]


def check_remote_control(app: Celery, given: Settings) -> list[Finding]:
    """Whether Celery's remote control is on where others may publish: no signature protects it."""
    if not app.conf.worker_enable_remote_control:
        return [ok("remote control", "is off")]
    if _is_on_loopback(app) and not given.message_secrets:
        return [ok("remote control", "is on; the broker listens on loopback")]
    found = "is on" + (", and unlike messages it is not signed" if given.message_secrets else "")
    advice = "anyone who may publish to the broker can stop workers and revoke tasks; set worker_enable_remote_control = False"
    return [warning("remote control", found, advice)]


def _is_on_loopback(app: Celery) -> bool:
    """Whether only this machine reaches the broker, by every address that may be tried."""
    try:
        brokers = [each for url in broker_addresses(app).values() for each in alternatives(app, url)]
        return all(is_loopback(each.hostname or "localhost") for each in brokers)
    except (ValueError, KeyError):
        return False


def _speaks_amqp(app: Celery) -> bool:
    """Whether the broker speaks AMQP. Does not connect; raises `ValueError` for an invalid address."""
    try:
        return bool(app.connection_for_write().transport.driver_type == "amqp")
    except KeyError:  # kombu's, for a value of ssl_cert_reqs
        raise ValueError(NOT_AN_ADDRESS) from None


def _led_apart(app: Celery) -> list[str]:
    """The settings whose addresses lead to several virtual hosts: after a failover, a worker would be at other queues.

    Does not connect; raises `ValueError` for an invalid address.
    """
    return [setting for setting, found in _virtual_hosts(app).items() if len(found) > 1]


def _virtual_hosts(app: Celery) -> dict[str, set[str]]:
    """The virtual hosts of RabbitMQ to which each setting's addresses lead. Raises `ValueError` for an invalid address."""
    try:
        return {
            setting: {
                each.virtual_host or "/" for each in alternatives(app, url) if each.transport.driver_type == "amqp"
            }
            for setting, url in broker_addresses(app).items()
        }
    except KeyError:  # kombu's, for a value of ssl_cert_reqs
        raise ValueError(NOT_AN_ADDRESS) from None


def _read_elsewhere(app: Celery) -> list[Finding]:
    """Whether workers read where nothing is published."""
    read, *written = _virtual_hosts(app).values()
    if not written or written[0] == read:
        return []
    advice = "no worker gets what is published, unless you have it forwarded, by a federation or a shovel"
    return [warning("broker_read_url", "another virtual host than that of broker_write_url", advice)]


def check_broker(app: Celery) -> list[Finding]:
    """Check RabbitMQ's version and the queues it has. Raises the connection's errors if it does not answer."""
    with connect(app.connection_for_write, connect_timeout=TIMEOUT) as connection:
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
        found = check_real_queues(connection, app.amqp.queues.values())
    return [*findings, *found, *_leaders(app), *_every_broker(app)]


def _leaders(app: Celery) -> list[Finding]:
    """The queues whose leaders do not answer: nothing is published to them or delivered from them.

    Each is asked over a connection of its own, because RabbitMQ closes one on which it cannot answer.
    """
    findings = []
    queues = list(app.amqp.queues.values())
    for queue in [*queues, *dead_letter_queues(queues)]:
        connection = connect(app.connection_for_write, _impatient, connect_timeout=TIMEOUT)
        try:
            from_leader(connection.channel(), queue.name)
        except ChannelError:
            pass  # it is not there, or this user may not ask
        except BROKER_ERRORS:
            advice = "nothing is published to a queue or delivered from it while most of its members are away: rabbitmq-queues quorum_status"
            findings.append(refusal(f"queue {queue.name}", "its leader does not answer", advice))
        finally:
            connection.collect()  # without a handshake, which such a broker may not answer either
    return findings


def _impatient(connection: Connection) -> None:
    connection.transport_options = {
        **connection.transport_options,
        "read_timeout": TIMEOUT,
        "write_timeout": TIMEOUT,
        "confirm_publish": False,
    }


def _every_broker(app: Celery) -> list[Finding]:
    """Whether each of several brokers answers, and whether they say that they are one cluster.

    Nodes to which nobody has given a cluster name say their own, so that different names prove nothing.
    """
    addresses = brokers(app.connection_for_write)
    if len(addresses) == 1:
        return []
    clusters = []
    for address in addresses:
        with suppress(*BROKER_ERRORS), connect(partial(_alone, app, address), connect_timeout=TIMEOUT) as connection:
            clusters.append(connection.connection.server_properties.get("cluster_name"))
    findings = []
    if len(clusters) < len(addresses):
        advice = "where a majority is missing, quorum queues take nothing; check them"
        findings.append(warning("brokers", f"{len(clusters)} of {len(addresses)} answer", advice))
    if len(set(clusters)) > 1:
        advice = "of different clusters, workers at one never see what is published to another; of one, give it a name: rabbitmqctl set_cluster_name"
        findings.append(warning("brokers", f"they have {len(set(clusters))} cluster names", advice))
    seen = "how many of them have a queue, `rabbitmq-queues quorum_status` says (docs/cluster.md)"
    return findings or [ok("brokers", f"{len(clusters)} answer, of one cluster; {seen}")]


def _alone(app: Celery, address: str, url: None = None, **options: Any) -> Connection:
    """One of the brokers, as `connection_for_write` makes a connection to all of them."""
    return app.connection_for_write(address, **options)
