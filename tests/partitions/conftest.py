"""A database whose records are in partitions by day."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

import services
from tests.integration.conftest import connection as connection
from tests.integration.conftest import empty as empty
from tests.integration.conftest import empty_database as empty_database
from tests.support import bank
from tests.support.partitions import put_into_partitions


@pytest.fixture(scope="session")
def template(servers: services.Services) -> Iterator[str]:
    """The database that each test here gets a copy of."""
    name = f"template_{uuid4().hex[:8]}"
    url = servers.create_database(name)
    bank.prepare(url)
    put_into_partitions(url)
    yield name
    servers.drop_database(name)


@pytest.fixture
def plain(servers: services.Services) -> Iterator[str]:
    """The address of a database with a plain table."""
    name = f"test_{uuid4().hex[:12]}"
    url = servers.create_database(name)
    bank.prepare(url)
    yield url
    servers.drop_database(name)
