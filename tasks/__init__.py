"""The application: payments and refunds as idempotent tasks, whose events notifications and support consume."""

from celery import Celery

app = Celery(
    "tasks",
    config_source="celeryconfig",
    include=["tasks.payments", "tasks.refunds", "tasks.notifications", "tasks.support", "tasks.maintenance"],
)
