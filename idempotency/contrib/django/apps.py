"""The application that a Django project installs."""

from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig
from django.conf import settings
from django.db.models.signals import post_migrate

from ...framework import use_framework

BACKENDS = "idempotency.contrib.django.backend"


class IdempotencyConfig(AppConfig):
    name = "idempotency.contrib.django"
    label = "idempotency"
    verbose_name = "Idempotency"

    def ready(self) -> None:
        from .integration import Django
        from .schema import migrate_unless_django_does

        use_framework(Django())
        post_migrate.connect(migrate_unless_django_does, dispatch_uid=self.name)
        backends = getattr(settings, "TASKS", {}).values()
        if any(each.get("BACKEND", "").startswith(BACKENDS) for each in backends):
            import_module(BACKENDS)  # a worker has to know the task that runs Django's
