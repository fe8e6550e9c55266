"""What an application of the suite is configured with: nothing for plain tasks, for ours what the README asks for."""

from __future__ import annotations

import os
from typing import Any

from idempotency.queues import quorum_queue


def configuration() -> dict[str, Any]:
    """The configuration of our side. The addresses come from the process' environment."""
    return {
        "task_queues": [quorum_queue("celery", exchange="celery")],
        "task_default_queue": "celery",
        "task_default_exchange": "celery",
        "task_default_exchange_type": "topic",
        "task_default_routing_key": "celery",
        "broker_transport_options": {"confirm_publish": True},
        "broker_connection_retry_on_startup": True,
        "worker_prefetch_multiplier": 1,
        "worker_enable_prefetch_count_reduction": False,
        # tests start workers of Celery objects of their own beside the suite's, on the same queue
        "idempotency_service": "celery.tests",
        "idempotency_database_url": os.environ["DATABASE_URL"],
        "idempotency_redis_url": os.environ["HINTS_URL"],
        # what the tests wait for, they wait for seconds
        "idempotency_retry_base": 0.1,
        "idempotency_unknown_task_grace": 0.0,
    }
