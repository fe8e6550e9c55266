"""Queues that lose no message: quorum queues with a delivery limit and a dead-letter queue."""

from __future__ import annotations

from collections.abc import Iterable

from kombu import Exchange, Queue

# A topic exchange, because Celery's native delayed delivery does not work with a direct one.
EXCHANGE = "tasks"
DEAD_LETTER_QUEUE = "dead_letters"
# Only a backstop: attempts are counted on the record. RabbitMQ also counts lost connections, so it must not be small.
DELIVERY_LIMIT = 20
# A dead-letter queue drops what exceeds its limit, which is 20 by default since RabbitMQ 4.0. -1 means no limit, but 3.x
# refuses it; this many deliveries take thirty years at one a second, and work the same before and after an upgrade.
DEAD_LETTER_DELIVERY_LIMIT = 1_000_000_000


def quorum_queue(
    name: str, *, exchange: str = EXCHANGE, dead_letter_queue: str = DEAD_LETTER_QUEUE, limit: int = DELIVERY_LIMIT
) -> Queue:
    """Declare a task queue that never drops an accepted message.

    After `limit` deliveries, at least 20, the broker moves a message to the dead-letter queue. Relays and workers
    declare that queue; until it exists, RabbitMQ keeps such messages in this one.
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
            # the message is kept until the dead-letter queue confirms it; requires reject-publish
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        },
    )


def dead_letter_queues(queues: Iterable[Queue]) -> list[Queue]:
    """The dead-letter queues of these queues."""
    names = {(queue.queue_arguments or {}).get("x-dead-letter-routing-key") for queue in queues}
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": DEAD_LETTER_DELIVERY_LIMIT}
    return [Queue(name, routing_key=name, queue_arguments=arguments) for name in names if name]
