"""Fixtures of a Postgres of a module's own, which may be killed or refuse writes: import all three (and `fixture_writes`)."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy.engine import make_url

import services
from services.postgres import Postgres, create_database, drop_database
from tests.support import bank
from tests.support.processes import eventually


def plain(url: str) -> str:
    """An address as psycopg itself reads it."""
    return url.replace("+psycopg", "")


@pytest.fixture(scope="module", name="postgres")
def fixture_postgres() -> Iterator[Postgres]:
    """A Postgres of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DATABASE_URL", raising=False)  # a test must not kill a server that was given
        with services.running(needs=("postgres",)) as running:
            yield running.postgres


@pytest.fixture(scope="module", name="template")
def fixture_template(postgres: Postgres) -> Iterator[str]:
    """A migrated database with the tables of tests/support/bank.py; each test gets a copy of it."""
    name = f"template_{uuid4().hex[:8]}"
    bank.prepare(create_database(postgres.url, name))
    yield name
    drop_database(postgres.url, name)


@pytest.fixture(name="database")
def fixture_database(postgres: Postgres, template: str) -> Iterator[str]:
    """The address of a fresh database in it. The server runs at the end, whatever the test has done."""
    name = f"test_{uuid4().hex[:12]}"
    with psycopg.connect(plain(postgres.url), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    yield make_url(postgres.url).set(database=name).render_as_string(hide_password=False)
    postgres.start()
    drop_database(postgres.url, name)


class Writes:
    """Whether Postgres takes writes: `stop` makes every transaction that begins from now on read-only."""

    def __init__(self, postgres: Postgres) -> None:
        self._url = plain(postgres.superuser_url())

    def stop(self) -> None:
        self._change("ALTER SYSTEM SET default_transaction_read_only = on", "on")

    def allow(self) -> None:
        self._change("ALTER SYSTEM RESET default_transaction_read_only", "off")

    def _change(self, statement: str, expected: str) -> None:
        options = "-c default_transaction_read_only=off"
        with psycopg.connect(self._url, autocommit=True, options=options) as connection:
            connection.execute(statement)
            connection.execute("SELECT pg_reload_conf()")
        eventually(lambda: self._shown() == expected, what=f"read-only {expected}")

    def _shown(self) -> str:
        with psycopg.connect(self._url, autocommit=True) as connection:
            row = connection.execute("SHOW default_transaction_read_only").fetchone()
            assert row is not None
            return str(row[0])


@pytest.fixture(name="writes")
def fixture_writes(postgres: Postgres) -> Iterator[Writes]:
    writes = Writes(postgres)
    yield writes
    writes.allow()
