"""A private Postgres for thousands of schedules: it forgets at a power cut, which no schedule here is about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock
from uuid import uuid4

import services
from services import local
from services.postgres import Postgres


class Forgetful(Postgres):
    def _command(self) -> Sequence[str | Path]:
        settings = ("fsync=off", "full_page_writes=off", "deadlock_timeout=20ms")
        return [*super()._command(), *(part for setting in settings for part in ("-c", setting))]


@contextmanager
def databases(count: int = 1) -> Iterator[list[str]]:
    """The addresses of so many empty databases on a private server."""
    with mock.patch.object(local, "Postgres", Forgetful), services.running(needs=("postgres",)) as servers:
        names = [f"search_{uuid4().hex[:8]}" for _ in range(count)]
        for name in names:
            servers.create_database(name)
        yield [servers.postgres.nearest_url(name) for name in names]
