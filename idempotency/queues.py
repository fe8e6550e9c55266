"""Queues that lose no message: quorum queues with a delivery limit and a dead-letter queue.

A queue belongs to one application, and so does its dead-letter queue: each relay stores what it finds there in its own
database. Earlier versions gave all queues of a broker one dead-letter queue, `dead_letters`. A queue keeps the
arguments it was made with, so old queues still point there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from amqp import Channel
from amqp.exceptions import AccessRefused, NotFound, PreconditionFailed
from celery import Celery
from kombu import Exchange, Queue

# A topic exchange, because Celery's native delayed delivery does not work with a direct one.
EXCHANGE = "tasks"
# The dead-letter queue of queues that were made by an earlier version, of any application on the broker.
SHARED_DEAD_LETTERS = "dead_letters"
_DEAD_LETTER_KEY = "x-dead-letter-routing-key"
# Only a backstop: attempts are counted on the record. RabbitMQ also counts lost connections, so it must not be small.
DELIVERY_LIMIT = 20
# A dead-letter queue drops what exceeds its limit, which is 20 by default since RabbitMQ 4.0. -1 means no limit, but 3.x
# refuses it; this many deliveries take thirty years at one a second, and work the same before and after an upgrade.
DEAD_LETTER_DELIVERY_LIMIT = 1_000_000_000


def queue_of(app: Celery, name: str, given: str | None = None) -> str:
    """The queue that messages of a task go to, by its name, unless a caller chooses another. Raises what the routes raise.

    `given`: its own `queue` option.
    """
    queue = app.amqp.router.route({} if given is None else {"queue": given}, name)["queue"]
    return str(queue.name if isinstance(queue, Queue) else queue)


class QuorumQueue(Queue):
    """A quorum queue. One that an earlier version made, with the shared dead-letter queue, is used as it is.

    A user who may not declare it, as a web server's (`idempotency broker-users`), uses what workers and relays declare.
    """

    def declare(self, nowait: bool = False, channel: Any = None) -> Any:
        channel = channel or self.channel
        if not isinstance(channel, Channel) or channel.connection is None:  # not RabbitMQ, or closed
            return super().declare(nowait=nowait, channel=channel)
        try:
            with channel.connection.channel() as declaring:  # a refusal closes the channel
                return super().declare(nowait=nowait, channel=declaring)
        except AccessRefused:
            with channel.connection.channel() as asking:
                asking.queue_declare(queue=self.name, passive=True)
        return self.name

    def queue_declare(self, nowait: bool = False, passive: bool = False, channel: Any = None) -> Any:
        channel = channel or self.channel
        if not passive and self.points_to_shared(channel):
            dead_letter_queue(SHARED_DEAD_LETTERS)(channel).queue_declare()
            passive = True
        return super().queue_declare(nowait=nowait, passive=passive, channel=channel)

    def points_to_shared(self, channel: Any) -> bool:
        """Whether the broker has this queue with the shared dead-letter queue instead of its own."""
        arguments = self.queue_arguments or {}
        if arguments.get(_DEAD_LETTER_KEY) != own_dead_letter_queue(self.name) or not isinstance(channel, Channel):
            return False
        shared = arguments | {_DEAD_LETTER_KEY: SHARED_DEAD_LETTERS}
        return (
            _accepts(channel, self.name, passive=True)
            and not _accepts(channel, self.name, arguments=arguments)
            and _accepts(channel, self.name, arguments=shared)
        )


def _accepts(channel: Channel, name: str, **options: Any) -> bool:
    """Whether the broker accepts this declaration. On another channel, since a refusal closes it."""
    asking = channel.connection.channel()
    try:
        asking.queue_declare(queue=name, durable=True, auto_delete=False, **options)
        accepts = True
    except (AccessRefused, NotFound, PreconditionFailed):
        accepts = False
    asking.close()  # not after a time-out: a channel that waits for a queue does not close either
    return accepts


def quorum_queue(
    name: str, *, exchange: str = EXCHANGE, dead_letter_queue: str | None = None, limit: int = DELIVERY_LIMIT
) -> Queue:
    """Declare a task queue that never drops an accepted message.

    After `limit` deliveries, at least 20, the broker moves a message to the dead-letter queue, by default
    `<name>.dead_letters`; several queues of one application may share one. Relays and workers declare that queue; until
    it exists, RabbitMQ keeps such messages in this one.
    """
    return QuorumQueue(
        name,
        Exchange(exchange, type="topic"),
        routing_key=name,
        queue_arguments={
            "x-queue-type": "quorum",
            "x-delivery-limit": limit,
            "x-dead-letter-exchange": "",
            _DEAD_LETTER_KEY: dead_letter_queue or own_dead_letter_queue(name),
            # the message is kept until the dead-letter queue confirms it; requires reject-publish
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        },
    )


def dead_letter_queues(queues: Iterable[Queue]) -> list[Queue]:
    """The dead-letter queues of these queues."""
    names = {(queue.queue_arguments or {}).get(_DEAD_LETTER_KEY) for queue in queues}
    return [dead_letter_queue(name) for name in sorted(filter(None, names))]


def own_dead_letter_queue(queue: str) -> str:
    """The name of a queue's dead-letter queue unless another one was chosen."""
    return f"{queue}.dead_letters"


def forwarded_dead_letters(service: str) -> str:
    """The name of the queue to which other applications forward what they find of this one in a shared queue."""
    return f"dead_letters.{service}"


def dead_letter_queue(name: str) -> Queue:
    """A dead-letter queue."""
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": DEAD_LETTER_DELIVERY_LIMIT}
    return Queue(name, routing_key=name, queue_arguments=arguments)
