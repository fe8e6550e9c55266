"""Fixtures of a Postgres with a synchronous standby, and databases in it: import all three."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from services import cluster
from services.cluster_postgres import PostgresPair
from services.postgres import plain_address
from tests.support import bank


@pytest.fixture(scope="module", name="pair")
def fixture_pair() -> Iterator[PostgresPair]:
    """A primary and its synchronous standby, of this module's own."""
    with cluster.running(needs=("postgres",)) as running:
        yield running.postgres


@pytest.fixture(scope="module", name="template")
def fixture_template(pair: PostgresPair) -> str:
    """A migrated database with the tables of tests/support/bank.py; each test gets a copy of it."""
    name = f"template_{uuid4().hex[:8]}"
    bank.prepare(pair.create_database(name))
    return name


@pytest.fixture(name="database")
def fixture_database(pair: PostgresPair, template: str) -> Iterator[str]:
    """The address, by both hosts, of a fresh database. The pair is whole at the end, whatever the test has done."""
    name = f"test_{uuid4().hex[:12]}"
    assert pair.is_whole
    # a commit that waits for the standby, which `execute` does not: a test may kill the primary at once
    with psycopg.connect(plain_address(pair.primary.url), autocommit=True) as connection:
        connection.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))
        )
    yield pair.url(name)
    pair.primary.start()
    pair.require_standby(True)
    if not pair.is_whole:
        pair.rebuild()


def fail_over(pair: PostgresPair) -> None:
    """The primary dies, and its standby takes over, which then waits for none itself, as Patroni has it unless it is strict."""
    pair.primary.kill()
    pair.promote()
    pair.require_standby(False)
