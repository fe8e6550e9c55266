"""The project's Celery application as `idempotency.contrib.django.project:app`, for `idempotency -A`."""

from __future__ import annotations

from typing import Any

from .integration import celery_app


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return celery_app()
