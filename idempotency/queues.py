"""Queues that lose nothing: quorum, a delivery limit as a backstop, and a dead-letter queue behind it."""

from __future__ import annotations

from collections.abc import Iterable

from kombu import Exchange, Queue

# One topic exchange for all tasks: Celery's native delayed delivery does not work with a direct one.
EXCHANGE = "tasks"
DEAD_LETTER_QUEUE = "dead_letters"
# A backstop only: attempts are counted on the record. RabbitMQ counts lost connections too, so it must not be small.
DELIVERY_LIMIT = 20
# A dead-letter queue has nothing behind it: what exceeds its limit is dropped, and RabbitMQ's own limit is 20 since 4.0.
# It spells "no limit" as -1, which 3.x refuses; this many deliveries take thirty years at one a second, and the queue
# is declared alike before and after an upgrade.
DEAD_LETTER_DELIVERY_LIMIT = 1_000_000_000


def quorum_queue(
    name: str, *, exchange: str = EXCHANGE, dead_letter_queue: str = DEAD_LETTER_QUEUE, limit: int = DELIVERY_LIMIT
) -> Queue:
    """A task queue on which an accepted message is never dropped.

    `limit` is how often the broker delivers one message before it goes to the dead-letter queue; at least 20.
    The dead-letter queue is declared by relays and workers; until it exists RabbitMQ keeps dead letters where they are.
    """
    return Queue(
        name,
        Exchange(exchange, type="topic"),
        routing_key=name,
        queue_arguments={
            "x-queue-type": "quorum",
            "x-delivery-limit": limit,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": dead_letter_queue,
            # the broker keeps a dead letter until the dead-letter queue has confirmed it; needs reject-publish
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        },
    )


def dead_letter_queues(queues: Iterable[Queue]) -> list[Queue]:
    """The dead-letter queues that these queues point to."""
    names = {(queue.queue_arguments or {}).get("x-dead-letter-routing-key") for queue in queues}
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": DEAD_LETTER_DELIVERY_LIMIT}
    return [Queue(name, routing_key=name, queue_arguments=arguments) for name in names if name]
