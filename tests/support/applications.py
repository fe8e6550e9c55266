"""Other applications beside the bank: on its broker, and on its database or on another one."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from celery import Celery
from sqlalchemy.orm import Session

from idempotency import IdempotentTask
from idempotency.application import runtime_of
from idempotency.queues import quorum_queue
from tests.support import bank as b

_SAME = (
    "broker_url",
    "broker_transport_options",
    "task_acks_on_failure",
    "task_acks_on_timeout",
    "task_serializer",
    "accept_content",
    "task_ignore_result",
    "idempotency_database_url",
    "idempotency_redis_url",
    "idempotency_retry_base",
    "idempotency_unknown_task_grace",
)


def application(name: str, **settings: Any) -> Celery:
    """An application with a queue and a task of its own. Like every one in this process, it has the bank's tasks, too."""
    queue = f"{name}-{uuid4().hex[:8]}"
    app = Celery(name, set_as_current=False)
    app.conf.update({each: b.app.conf[each] for each in _SAME})
    app.conf.update(
        task_queues=[quorum_queue(queue, exchange=queue, dead_letter_queue=f"{queue}-dead")],
        task_default_queue=queue,
        task_default_exchange=queue,
        task_default_exchange_type="topic",
        task_default_routing_key=queue,
    )
    app.conf.update(settings)

    @app.task(base=IdempotentTask, bind=True, name=f"{name}.place", key="{order}", shared=False)
    def place(self: IdempotentTask, order: str) -> str:
        self.session.execute(b.INSERT, {"account": f"{name}/{order}", "amount": 1})
        return name

    app.finalize()
    return app


def enqueue(app: Celery, task: str, *arguments: Any, **options: Any) -> None:
    """Accept an operation of this application's task."""
    with Session(runtime_of(app).engine) as session, session.begin():
        app.tasks[task].enqueue(session, *arguments, **options)


def delete_queues(app: Celery) -> None:
    """Delete the application's queues and their dead-letter queues from the broker."""
    with app.connection_for_write() as broker:
        for queue in app.amqp.queues.values():
            for name in (queue.name, queue.queue_arguments["x-dead-letter-routing-key"]):
                broker.default_channel.queue_delete(name)
