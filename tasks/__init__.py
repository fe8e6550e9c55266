"""The application: payments, refunds and notifications as idempotent tasks."""

from celery import Celery

app = Celery(
    "tasks",
    config_source="celeryconfig",
    include=["tasks.payments", "tasks.refunds", "tasks.notifications", "tasks.maintenance"],
)
