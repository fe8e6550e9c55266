"""The pytest plugin: fixtures for testing an application's own tasks (docs/testing.md).

Outside the package, so that pytest does not import the library, Celery and SQLAlchemy unless a fixture is used: a
conftest may have to configure or patch them first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from celery import Celery
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from idempotency.testing import AssertIdempotent, Outbox, RecordingServer


@pytest.fixture
def recording_server() -> Iterator[RecordingServer]:
    """An HTTP server that stands in for the provider: records every call, acts once per `Idempotency-Key`.

    Pass its `url` to the code under test. Set `answer` to a function that returns the answer to a call.
    """
    from idempotency.testing import RecordingServer

    server = RecordingServer()
    yield server
    server.close()


@pytest.fixture
def assert_idempotent(recording_server: RecordingServer) -> AssertIdempotent:
    """Crash, duplicate and overtake a task at every point; fail on the first difference from an undisturbed run."""
    from idempotency.testing import AssertIdempotent

    return AssertIdempotent(recording_server)


@pytest.fixture(scope="session")
def idempotency_app() -> Celery:
    """Your Celery application: define this fixture in your conftest.py. The others use its test database."""
    raise pytest.UsageError("define a fixture idempotency_app, of scope session, that returns your Celery application")


@pytest.fixture(scope="session")
def idempotency_database(request: pytest.FixtureRequest, idempotency_app: Celery) -> Iterator[None]:
    """The library's tables in the application's test database, migrated to this version."""
    from idempotency.application import close_runtime
    from idempotency.framework import framework
    from idempotency.testing import prepare

    if request.config.pluginmanager.hasplugin("django") and framework().database_url() is not None:
        request.getfixturevalue("django_db_setup")  # pytest-django's: from then on DATABASES has the test database
    prepare(idempotency_app)
    yield
    close_runtime(idempotency_app)


@pytest.fixture
def idempotency_connection(idempotency_app: Celery, idempotency_database: None) -> Iterator[Connection]:
    """A connection whose transaction is rolled back at the end; the application's tasks run in it, too."""
    from idempotency.testing import rolled_back

    with rolled_back(idempotency_app) as connection:
        yield connection


@pytest.fixture
def idempotency_session(idempotency_connection: Connection) -> Iterator[Session]:
    """A session in that transaction. `commit()` ends a savepoint, and nothing else."""
    from sqlalchemy.orm import Session

    with Session(idempotency_connection, join_transaction_mode="create_savepoint") as session:
        yield session


@pytest.fixture
def idempotency_outbox(
    request: pytest.FixtureRequest, idempotency_app: Celery, idempotency_database: None
) -> Iterator[Outbox]:
    """The outbox, empty, with every key new: `run()` runs here what the test has enqueued."""
    from idempotency.testing import Outbox

    if "idempotency_connection" in request.fixturenames:
        request.getfixturevalue("idempotency_connection")  # first, so that the rollback brings back what is emptied
    outbox = Outbox(idempotency_app)
    outbox.reset()
    yield outbox
    outbox.reset()
