"""The application: payments, refunds, orders and returns as idempotent tasks, whose events other services consume (`flow.py`)."""

from celery import Celery

app = Celery(
    "tasks",
    config_source="celeryconfig",
    include=[
        f"tasks.{module}"
        for module in (
            "payments",
            "refunds",
            "settlement",
            "checkout",
            "orders",
            "warehouse",
            "shipping",
            "returns",
            "observer",
            "notifications",
            "webhooks",
            "support",
            "reconciliation",
            "maintenance",
        )
    ],
)
