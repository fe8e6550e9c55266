"""The second application as a process of its own: `celery -A tests.support.orders worker`, with the queues in ORDERS_QUEUES."""

from __future__ import annotations

import os

from celery import Celery

from idempotency.queues import quorum_queue
from tests.support.applications import application


def make(*names: str) -> Celery:
    """The application with these queues, declared as by default, in its own exchange."""
    first, exchange = names[0], f"{names[0]}-exchange"
    return application(
        "orders",
        task_queues=[quorum_queue(name, exchange=exchange) for name in names],
        task_default_queue=first,
        task_default_exchange=exchange,
        task_default_routing_key=first,
        task_create_missing_queues=True,  # Celery's default
    )


if "ORDERS_QUEUES" in os.environ:
    app = make(*os.environ["ORDERS_QUEUES"].split(","))
