"""What is said to the broker about its queues: that they are to be there, what is in them, and a message for one as it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from amqp.basic_message import Message as AmqpMessage
from amqp.exceptions import AccessRefused, ChannelError, NotFound, PreconditionFailed, ResourceLocked
from kombu import Connection as BrokerConnection
from kombu import Message as BrokerMessage
from kombu import Queue

from ..observe.logs import log
from ..queues import QuorumQueue
from .silence import SilentQueues

# Seconds to wait for the confirm of a message that is forwarded.
FORWARD_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class InQueue:
    """What is in a queue: messages ready, and consumers. Messages that consumers hold are not counted."""

    ready: int
    consumers: int


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


def counted(channel: Any, queue: str) -> InQueue:
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
