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
def collect_often(**_: Any) -> None:
    """Keep the memory of a pool process flat.

    Celery leaves the traceback of every failed attempt in a cycle, which only a full collection frees; and those wait
    until what is new is a quarter of all there is. Frozen, what was imported counts no more.
    """
    gc.freeze()
    gc.collect()
