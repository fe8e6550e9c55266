"""`manage.py flush` empties the library's tables as well: their rows are about the rows that it deletes.

Django's `TransactionTestCase` flushes after each test, so the next one finds no key used.
"""

from __future__ import annotations

from typing import Any

from django.core.management.commands import flush
from django.db import connections

from idempotency.application import close_all_runtimes
from idempotency.contrib.django.databases import database_alias
from idempotency.store import schema


class Command(flush.Command):
    help = flush.Command.help + " Empties the tables of celery-idempotency, too, except the audit."

    def handle(self, **options: Any) -> None:
        super().handle(**options)
        if options["database"] == database_alias():
            # also the pools of a test's process: a database that is connected to cannot be dropped
            close_all_runtimes()
            with connections[options["database"]].cursor() as cursor:
                schema.empty(cursor)
