"""`manage.py idempotency …`: the library's command line, for the project's Celery application."""

from __future__ import annotations

import argparse
import os
from typing import Any

from django.core.management.base import BaseCommand

from idempotency.cli import main

# Resolved by the command line like any other name of an application.
APP = "idempotency.contrib.django.project:app"


class Command(BaseCommand):
    help = "Operate celery-idempotency: relay, doctor, status, dead-letters ... (`manage.py idempotency -- --help`)."
    requires_system_checks = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="As for the command `idempotency`, without -A.")

    def handle(self, *_: Any, arguments: list[str], **__: Any) -> None:
        os.environ["CELERY_APP"] = APP  # whatever the shell names: this is the project's command
        main([argument for argument in arguments if argument != "--"])
