"""What a broker that is not RabbitMQ says about its queues."""

from __future__ import annotations

from celery import Celery
from kombu import Queue

from idempotency.broker.channel import BrokerChannel
from idempotency.broker.queues import InQueue


def test_messages_are_counted_and_a_missing_queue_is_empty() -> None:
    app = Celery("counting", broker="memory://", set_as_current=False)
    app.conf.task_queues = [Queue("counted")]
    channel = BrokerChannel(app, timeout=1.0)
    assert channel.in_queue("counted") == InQueue(ready=0, consumers=0)
    with app.connection_for_write() as connection, connection.Producer() as producer:
        producer.publish({}, routing_key="counted")
    assert channel.in_queue("counted") == InQueue(ready=1, consumers=0)
    assert channel.in_queue("missing") == InQueue(ready=0, consumers=0)
    assert channel.in_queue("counted") == InQueue(ready=1, consumers=0), "counting takes nothing"
    channel.close()
