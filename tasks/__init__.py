"""The application: payments and refunds as idempotent tasks; notifications and support follow their events."""

import gc
from typing import Any

from celery import Celery
from celery.signals import worker_process_init

app = Celery(
    "tasks",
    config_source="celeryconfig",
    include=["tasks.payments", "tasks.refunds", "tasks.notifications", "tasks.support", "tasks.maintenance"],
)


@worker_process_init.connect
def spare_the_collector(**_: Any) -> None:
    """What was imported before the fork is never garbage, and looking through it copies its pages into every child."""
    gc.freeze()
