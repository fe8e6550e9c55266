"""Connections to the application's brokers: the first one that takes one, verified, and bounded where nobody waits for long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amqp.exceptions import AMQPError
from celery import Celery
from kombu import Connection as BrokerConnection
from kombu.exceptions import KombuError

from ..observe.logs import log
from ..tls import amqp_options

# What a broker that is away, or refuses, raises; a socket's time-out is an OSError.
BROKER_ERRORS = (AMQPError, KombuError, OSError)


def brokers(make: Callable[..., BrokerConnection]) -> list[Any]:
    """The addresses that an application gives, one for each broker; None: its only one.

    `make`: the application's `connection_for_read` or `connection_for_write`. Raises `ValueError` for what is no address.
    """
    with make() as whole:
        return list(dict.fromkeys(whole.alt)) or [None]


def bounded(app: Celery, timeout: float) -> Callable[[BrokerConnection], None]:
    """What prepares a connection whose socket counts as broken once it has taken or given nothing for so many seconds."""

    def prepare(broker: BrokerConnection) -> None:
        options = {**app.conf.broker_transport_options}
        if broker.transport.driver_type == "amqp":
            # and we count confirms ourselves
            options |= {"confirm_publish": False, "read_timeout": timeout, "write_timeout": timeout}
        broker.transport_options = options

    return prepare


def connect(
    make: Callable[..., BrokerConnection],
    prepare: Callable[[BrokerConnection], object] = lambda connection: None,
    **options: Any,
) -> BrokerConnection:
    """A new connection to the first of an application's brokers that takes one, in the order of its address.

    kombu's own way tries two of several, and after the first has forgotten how this connection verifies. `make`: as for
    `brokers`; it gets the `options`. `prepare` gets the connection before it connects. A broker that answers nothing takes
    `connect_timeout` seconds. Raises what the last one said.
    """
    addresses = brokers(make)
    for number, address in enumerate(addresses, 1):
        connection = verifying(make(address, **options))
        prepare(connection)
        try:
            connection.ensure_connection(
                max_retries=1 if len(addresses) == 1 else 0,
                interval_start=0,
                reraise_as_library_errors=False,
            )
        except BaseException as error:
            connection.collect()
            if number == len(addresses) or not isinstance(error, Exception):
                raise
            log.warning("broker_passed_over", number=number, error=type(error).__name__)
        else:
            return connection
    raise AssertionError("an application has at least one broker")


def verifying(connection: BrokerConnection) -> BrokerConnection:
    """The same connection, which over TLS compares the certificate's name with the host's unless it is told otherwise."""
    if connection.transport.driver_type == "amqp":
        connection.ssl = amqp_options(connection.ssl)
    return connection
