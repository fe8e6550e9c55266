"""The application that a Django project installs."""

from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig
from django.conf import settings

from ...framework import use_framework

BACKENDS = "idempotency.contrib.django.backend"


class IdempotencyConfig(AppConfig):
    name = "idempotency.contrib.django"
    label = "idempotency"
    verbose_name = "Idempotency"

    def ready(self) -> None:
        from .integration import Django

        use_framework(Django())
        backends = getattr(settings, "TASKS", {}).values()
        if any(each.get("BACKEND", "").startswith(BACKENDS) for each in backends):
            import_module(BACKENDS)  # a worker has to know the task that runs Django's
