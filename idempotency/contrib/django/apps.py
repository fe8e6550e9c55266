"""The application that a Django project installs."""

from __future__ import annotations

from django.apps import AppConfig

from ...framework import use_framework


class IdempotencyConfig(AppConfig):
    name = "idempotency.contrib.django"
    label = "idempotency"
    verbose_name = "Idempotency"

    def ready(self) -> None:
        from .integration import Django

        use_framework(Django())
