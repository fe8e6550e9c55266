"""What librdkafka is told: the application's options, and those that positions in Postgres need."""

from __future__ import annotations

from typing import Any

from ..errors import SettingsError
from ..hosts import Allowed, is_loopback
from ..settings import Settings
from .sources import KafkaTopics

# Seconds beyond the longest time for which a lease is renewed, until the group counts a process as gone.
POLL_MARGIN = 60.0
# Fixed. `auto.offset.reset`: each partition is read from its position in Postgres, so an offset that the broker does not have
# is an error.
_SAFE = {
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    "partition.assignment.strategy": "cooperative-sticky",
    "enable.partition.eof": "false",
}
# Only of members of a group: another client warns of them.
_OF_MEMBERS = ("group.id", "max.poll.interval.ms", "session.timeout.ms", "heartbeat.interval.ms")


def configuration(source: KafkaTopics, settings: Settings, *, name: str, instance: str | None) -> dict[str, Any]:
    """What librdkafka is given. Raises `SettingsError` for an address that is missing or in plain text, and for what is fixed."""
    given = {key: value.get_secret_value() for key, value in settings.kafka_options.items()} | dict(source.options)
    if settings.kafka_servers is not None:
        given.setdefault("bootstrap.servers", settings.kafka_servers.get_secret_value())
    if not given.get("bootstrap.servers"):
        raise SettingsError("idempotency_kafka_servers: not set, and a stream of this application is of Kafka")
    if fixed := sorted(option for option in given if option in _SAFE or option in ("group.id", "group.instance.id")):
        raise SettingsError(f"idempotency_kafka_options: {fixed[0]} is fixed, because positions are in Postgres")
    _check_encrypted(given, settings)
    group = source.group or f"{_without_dots(settings.service)}.{_without_dots(name)}"
    longest = int((settings.longest_run + POLL_MARGIN) * 1000)
    fixed_options = {"group.id": group, "max.poll.interval.ms": longest}
    if instance is not None:
        fixed_options["group.instance.id"] = f"{instance}.{name}"
    session = int(given.get("session.timeout.ms", 45_000))
    return {"client.id": group} | given | {"session.timeout.ms": session} | _SAFE | fixed_options


def _without_dots(name: str) -> str:
    """So that the one dot of a group stands between the two names: no other two have the same group."""
    return name.replace("%", "%25").replace(".", "%2E")


def connection_options(source: KafkaTopics, settings: Settings, *, name: str) -> dict[str, Any]:
    """Those of them by which a client connects that is no member of the group. Raises `SettingsError`."""
    options = configuration(source, settings, name=name, instance=None)
    return {option: value for option, value in options.items() if option not in _SAFE and option not in _OF_MEMBERS}


def _check_encrypted(given: dict[str, Any], settings: Settings) -> None:
    """Raise `SettingsError` for servers on other machines that are reached in plain text, or without looking who they are."""
    allowed = Allowed.of(settings.plain_text_hosts)
    hosts = [
        each.strip().rpartition("://")[2].rpartition(":")[0].strip("[]")
        for each in given["bootstrap.servers"].split(",")
    ]
    others = [host for host in hosts if not is_loopback(host) and not allowed.has_host(host)]
    is_verified = (
        str(given.get("security.protocol", "")).lower() in ("ssl", "sasl_ssl")
        and str(given.get("enable.ssl.certificate.verification", "true")).lower() == "true"
        and str(given.get("ssl.endpoint.identification.algorithm", "https")).lower() == "https"
    )
    if others and not is_verified:
        raise SettingsError(
            "idempotency_kafka_options: security.protocol must be SSL or SASL_SSL, with certificates and names verified, or name "
            "the host in idempotency_plain_text_hosts"
        )
