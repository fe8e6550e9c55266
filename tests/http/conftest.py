"""One database and one runtime for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

import services
from idempotency.attempt.runtime import Runtime
from idempotency.settings import Settings
from tests.support.edge import Edge


@pytest.fixture(scope="module")
def edge_database(servers: services.Services, template: str) -> Iterator[str]:
    """The address of a database with the library's tables and those of the tests."""
    name = f"edge_{uuid4().hex[:12]}"
    admin = create_engine(servers.database_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY"))
    admin.dispose()
    yield make_url(servers.database_url).set(database=name).render_as_string(hide_password=False)
    servers.drop_database(name)


@pytest.fixture(scope="module")
def edge(edge_database: str) -> Iterator[Edge]:
    runtime = Runtime(Settings.read({"database_url": edge_database, "result_limit": 4096}))
    engine = create_engine(edge_database, isolation_level="AUTOCOMMIT")
    yield Edge(runtime, engine)
    runtime.close()
    engine.dispose()
