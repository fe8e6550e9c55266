"""One connection and one channel to the broker, and what the broker says about its queues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from amqp.basic_message import Message as AmqpMessage
from amqp.exceptions import AccessRefused, AMQPError, ChannelError, NotFound, PreconditionFailed, ResourceLocked
from celery import Celery
from kombu import Connection as BrokerConnection
from kombu import Message as BrokerMessage
from kombu import Queue
from kombu.exceptions import KombuError

from ..errors import BrokerUnavailable
from ..observe.logs import log
from ..observe.unreachable import reason
from ..queues import QuorumQueue, dead_letter_queues
from ..tls import amqp_options
from .silence import SilentQueues

# What a broker that is away, or refuses, raises; a socket's time-out is an OSError.
BROKER_ERRORS = (AMQPError, KombuError, OSError)
# Seconds to wait for the confirm of a message that is forwarded.
FORWARD_TIMEOUT = 5.0
# Seconds that a worker may take to say what it holds: Celery's own patience.
REPLY = 1.0


@dataclass(frozen=True, slots=True)
class InQueue:
    """What is in a queue: messages ready, and consumers. Messages that consumers hold are not counted."""

    ready: int
    consumers: int


class BrokerChannel:
    """Opened on first use, and opened again after every error.

    `timeout`: seconds after which a socket that takes or gives nothing counts as broken.
    """

    def __init__(self, app: Celery, *, timeout: float) -> None:
        self._app = app
        self._timeout = timeout
        self._broker: BrokerConnection | None = None
        self._channel: Any = None
        self._confirms = False
        # to declarations and questions
        self.silent = SilentQueues()

    def is_fifo(self) -> bool:
        """Whether queues are first in, first out: over AMQP they are. Raises `BrokerUnavailable`."""
        with self._closing_on_errors():
            self._connect()
            return self._confirms

    def in_queue(self, queue: str) -> InQueue | None:
        """What is in a queue now; None if the broker cannot say. Raises `BrokerUnavailable`, also if only the queue is silent."""
        with self._asking() as channel:
            try:
                with self.silent.noting(queue):
                    return from_leader(channel, queue) if self._confirms else _counted(channel, queue)
            except NotFound:
                return InQueue(0, 0)
            except ChannelError as error:
                log.warning("queue_not_seen", queue=queue, error=type(error).__name__)
                return None

    @property
    def may_ask_workers(self) -> bool:
        """Whether workers answer over Celery's remote control."""
        return bool(self._app.conf.worker_enable_remote_control)

    def held(self, queue: str, consumers: int, task_ids: list[str]) -> set[str] | None:
        """Which of these tasks the consumers of a queue hold, unacknowledged. None: not all of them have answered.

        Takes `REPLY` seconds. Raises `BrokerUnavailable`.
        """
        with self._closing_on_errors():
            self._connect()
            everyone = self._app.control.inspect(connection=self._broker, timeout=REPLY)
            queues = everyone.active_queues() or {}
            workers = [name for name, served in queues.items() if queue in (each["name"] for each in served)]
            if len(workers) != consumers:
                return None
            these = self._app.control.inspect(workers, connection=self._broker, timeout=REPLY, limit=len(workers))
            answers = these.query_task(*task_ids) or {}
            if not set(workers) <= set(answers):
                return None
            return {id for worker in workers for id in answers[worker]}

    def close(self) -> None:
        """Drop the channel and the connection without a handshake: a broker that hangs must not hang us."""
        broker, self._broker, self._channel = self._broker, None, None
        if broker is not None:
            broker.collect()

    @contextmanager
    def _closing_on_errors(self) -> Iterator[None]:
        """Close the connection after any error. Raises `BrokerUnavailable` for an error of the broker."""
        try:
            yield
        except BROKER_ERRORS as error:
            self.close()
            raise BrokerUnavailable(reason(error)) from error
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        """A second channel for one question: an answer of "no such queue" closes it."""
        with self._closing_on_errors():
            self._connect()
            assert self._broker is not None
            channel = self._broker.channel()
            yield channel
            channel.close()  # not after an error: to close a channel that waits for a queue takes another time-out

    def _connect(self) -> Any:
        """The channel; if there is none, connect and declare the application's queues."""
        if self._channel is not None:
            return self._channel
        self._broker = connect(self._app.connection_for_write, bounded(self._app, self._timeout), connect_timeout=5)
        self._confirms = self._broker.transport.driver_type == "amqp"
        queues = list(self._app.amqp.queues.values())
        self._channel = declare_queues(self._broker, [*dead_letter_queues(queues), *queues], self.silent)
        return self._channel


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


def declare_queues(connection: BrokerConnection, queues: Iterable[Queue], silent: SilentQueues | None = None) -> Any:
    """Declare queues on a new channel, which is returned. One that others have declared, or otherwise, stays as it is.

    Those that are left alone as `silent` are left out, as will be one that does not answer now; that one is an error.
    """
    channel, silent = connection.channel(), SilentQueues() if silent is None else silent
    named = {queue.name: queue for queue in queues}
    for name in silent.in_turn(named):
        queue = named[name]
        try:
            with silent.noting(name):
                queue(channel).declare()
        except (PreconditionFailed, AccessRefused, ResourceLocked) as error:
            # it exists, which is all that publishing and consuming need
            log.warning("queue_differs", queue=name, error=type(error).__name__)
            channel = connection.channel()
    return channel


def points_to_shared(channel: Any, queues: Iterable[Queue], silent: SilentQueues) -> bool:
    """Whether the broker has one of these queues with the shared dead-letter queue of earlier versions."""
    named = {queue.name: queue for queue in queues if isinstance(queue, QuorumQueue)}
    for name in silent.in_turn(named):
        with silent.noting(name):
            if named[name].points_to_shared(channel):
                return True
    return False


def forward(connection: BrokerConnection, message: BrokerMessage, queue: str) -> bool:
    """Publish a message to a queue as it is. Returns once the broker has confirmed it; False if there is no such queue.

    The queue is not declared here: a name in a header would make a queue for ever.
    """
    with connection.channel() as channel:
        try:
            channel.queue_declare(queue, passive=True)
        except NotFound:
            return False
        copy = AmqpMessage(message.body, **{**message.properties, "delivery_mode": 2})
        channel.basic_publish_confirm(
            copy, exchange="", routing_key=queue, mandatory=True, confirm_timeout=FORWARD_TIMEOUT
        )
    return True


def _counted(channel: Any, queue: str) -> InQueue:
    """Over a broker that counts no consumers, as Redis."""
    try:
        return InQueue(channel.queue_declare(queue, passive=True).message_count, 0)
    except ChannelError:  # kombu's own, for every queue that does not exist
        return InQueue(0, 0)


def from_leader(channel: Any, queue: str) -> InQueue:
    """What is in a queue, by its leader. Raises `ChannelError` if it is not there, and what the connection raises without a leader."""
    declared = channel.queue_declare(queue, passive=True)
    if declared.message_count:
        return InQueue(declared.message_count, declared.consumer_count)
    # "0 messages, 0 consumers" is also what RabbitMQ says about a quorum queue without a leader. A get goes to the
    # leader, or fails.
    if (message := channel.basic_get(queue, no_ack=False)) is not None:
        channel.basic_reject(message.delivery_tag, requeue=True)
        return InQueue(1, declared.consumer_count)
    return InQueue(0, channel.queue_declare(queue, passive=True).consumer_count)
