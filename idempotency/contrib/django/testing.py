"""Inside Django's `TestCase`: an eager task runs on the test's own connection, and is rolled back with the test.

`TestCase` keeps a transaction open around each test, so a second connection would see nothing of the test's rows, and
what it commits would stay. Here every transaction of the library is a savepoint in the test's. One thread, one
connection: no heartbeat, no hints, and no other process that could hold a claim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from celery import Celery
from django.db.backends.base.base import BaseDatabaseWrapper
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool

from ...application import settings_of
from ...attempt.runtime import Runtime
from ...attempt.session import use_sessions
from ...settings import Settings
from ...store.answers import Claimed, Renewal
from ...store.driver import OneStatementCursor, invalidate_after_refused_commit
from .orm import Face

# Set LOCAL by our finishing statements, for their own transaction; a test's goes on.
_RESET = b"RESET idle_in_transaction_session_timeout"


class SavepointConnection(Face):
    """A face of the test's connection for SQLAlchemy, whose transactions are savepoints."""

    def __init__(self, owner: psycopg.Connection[Any]) -> None:
        super().__init__(owner)
        self.cursor_factory = OneStatementCursor
        self._is_open = False

    def begin(self) -> None:
        self._is_open = True
        self._run(b"SAVEPOINT idempotency")

    def commit(self) -> None:
        if self.owner is not None:
            self.owner.check_commit()
        if self._is_open:
            self._is_open = False
            self._run(b"RELEASE SAVEPOINT idempotency", _RESET)

    def rollback(self) -> None:
        if self._is_open:
            self._is_open = False
            self._run(b"ROLLBACK TO SAVEPOINT idempotency", b"RELEASE SAVEPOINT idempotency")

    def close(self) -> None:
        self.rollback()

    def _run(self, *statements: bytes) -> None:
        for statement in statements:
            result = self.pgconn.exec_(statement)
            if result.status != psycopg.pq.ExecStatus.COMMAND_OK:
                raise psycopg.OperationalError(result.get_error_message())


class TestRuntime(Runtime):
    """A runtime whose connections are all the test's."""

    __test__ = False  # not a test for pytest

    def __init__(self, settings: Settings, owner: psycopg.Connection[Any]) -> None:
        super().__init__(settings.model_copy(update={"redis_url": None}))
        self.owner = owner
        self.engine = _engine(settings, owner)
        use_sessions(self.engine, settings.session)

    @contextmanager
    def autocommit(self, *_: str) -> Iterator[Connection]:
        with self.engine.begin() as connection:
            yield connection

    def _renew(self, claims: Sequence[Claimed]) -> dict[str, Renewal]:
        return {claim.token: Renewal.HELD for claim in claims}


def _engine(settings: Settings, owner: psycopg.Connection[Any]) -> Engine:
    engine = create_engine(
        settings.database_url.get_secret_value(),
        creator=lambda: SavepointConnection(owner),
        poolclass=NullPool,
        hide_parameters=True,
    )

    @event.listens_for(engine, "begin")
    def _(connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        driver.begin()

    invalidate_after_refused_commit(engine)
    return engine


_runtimes: WeakKeyDictionary[Celery, TestRuntime] = WeakKeyDictionary()


def is_in_test_case(wrapper: BaseDatabaseWrapper) -> bool:
    """Whether this connection is inside the transaction that Django's `TestCase` keeps around a test."""
    # Django's own mark, by which it allows durable blocks in a test
    return bool(wrapper.atomic_blocks) and wrapper.atomic_blocks[0]._from_testcase


def test_runtime(app: Celery, wrapper: BaseDatabaseWrapper) -> Runtime:
    """The runtime of an application inside a `TestCase`."""
    wrapper.ensure_connection()
    runtime = _runtimes.get(app)
    if runtime is None or runtime.owner is not wrapper.connection:
        runtime = _runtimes[app] = TestRuntime(settings_of(app), wrapper.connection)
    return runtime
