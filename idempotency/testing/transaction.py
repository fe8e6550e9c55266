"""Everything in the test's own transaction, which is rolled back at the end.

What the library does on its own connections (claim, run, commit) happens in savepoints of the one connection. So a
task sees what the test has not committed, and the test what the task has done. What needs two connections cannot be
seen in it: concurrent attempts, a lost COMMIT, a constraint that is checked at COMMIT.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from celery import Celery
from sqlalchemy import Connection, Engine
from sqlalchemy.pool import NullPool

from ..application import runtime_replaced, settings_of
from ..attempt.runtime import Runtime
from ..attempt.session import use_sessions
from ..framework import framework
from ..settings import DAY, Settings
from ..store.connections import act_for, make_engine


@contextmanager
def rolled_back(app: Celery) -> Iterator[Connection]:
    """A new connection to the application's database, with `joined`, in a transaction that is rolled back in the end."""
    framework().check_test_transaction()
    engine = make_engine(settings_of(app), poolclass=NullPool)
    with engine.connect() as connection, connection.begin() as transaction:
        with joined(app, connection):
            yield connection
        transaction.rollback()


@contextmanager
def joined(app: Celery, connection: Connection) -> Iterator[None]:
    """Until the block ends, the application's tasks run and are enqueued in this connection's transaction.

    The caller begins the transaction and ends it. Only for this thread.
    """
    runtime = JoinedRuntime(settings_of(app), connection)
    # in a savepoint, so that every session on this connection works in its own one
    with connection.begin_nested(), runtime_replaced(app, runtime):
        yield


class JoinedRuntime(Runtime):
    """A runtime whose statements and sessions all use one connection, inside its transaction."""

    joins_transaction = True

    def __init__(self, settings: Settings, connection: Connection) -> None:
        # A hint would survive the rollback. No other connection could renew a lease, so one lasts for the whole test,
        # even if that waits in a debugger.
        kept = settings.model_copy(update={"redis_url": None, "lease": DAY, "heartbeat": DAY / 3, "max_run": None})
        super().__init__(kept)
        self._connection = connection
        # what a session is bound to; an engine would open another connection
        self.engine = cast(Engine, connection)
        use_sessions(connection, settings.session)

    @property
    def _engines(self) -> tuple[Engine, ...]:
        return ()  # never connected; the connection is the test's

    @contextmanager
    def autocommit(self, *tenants: str) -> Iterator[Connection]:
        """The connection, in a savepoint, so that a statement that fails does not end the test's transaction."""
        with self._connection.begin_nested():
            act_for(self._connection, tenants)
            yield self._connection
