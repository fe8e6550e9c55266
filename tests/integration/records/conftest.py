"""One database for all tests of a module: their operations are separate."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.pool import NullPool

import services


@pytest.fixture(scope="module")
def database_url(servers: services.Services, template: str) -> Iterator[str]:
    """One database for the module: every test works on its own keys."""
    name = f"records_{uuid4().hex[:8]}"
    admin = create_engine(servers.database_url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY"))
    yield str(admin.url.set(database=name).render_as_string(hide_password=False))
    servers.drop_database(name)


@pytest.fixture(scope="module")
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(
        database_url,
        isolation_level="AUTOCOMMIT",
        poolclass=NullPool,
        # a statement that waits for a lock it should have skipped fails instead of hanging
        connect_args={"options": "-c lock_timeout=10s"},
    )
    yield engine
    engine.dispose()
