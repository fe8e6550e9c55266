"""What one process holds open: connections, hints, heartbeat.

Made in the process that uses it, so that a forked child never shares a socket with its parent.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import psycopg
from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool, StaticPool

from .. import objects
from ..observe import metrics, traces
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..observe.traces import OURS
from ..settings import Settings
from ..store import connections
from ..store.answers import Claimed, Renewal
from ..store.claims import renew
from ..store.home import IDENTITY, Home
from ..store.statements import TIMED_OUT, describe, is_news, sqlstate
from ..store.sweeps import is_row_error
from ..wire import results
from .heartbeat import Heartbeat
from .hints import Hints
from .liveness import process_identity
from .session import refuse_others_commits, use_sessions
from .threads import DaemonThreads

# Threads that read records for an event loop; a read takes about a millisecond, if no standby has to be waited for.
READERS = 4
# Threads that fetch large results for an event loop.
FETCHERS = 8
# Seconds until a large result is tried again whose place has not taken it, on average: one that is refused for good must not come
# just ahead of the same others each time.
OBJECTS_PAUSE = 30.0
# Seconds for which it is left alone by this process.
OBJECTS_REST = 5.0


class Runtime:
    """The settings of one process and what it holds open under them. With Celery: `application.runtime_of(app)`."""

    # Whether tasks run inside the caller's own transaction, as in the tests of an application.
    joins_transaction = False
    is_closed = False

    def __init__(self, settings: Settings) -> None:
        metrics.prepare()
        self.pid = os.getpid()
        self.settings = settings
        # None: nothing is traced
        self.traces = traces.begin(settings.traces)
        self.holder = process_identity()
        self.engine = connections.make_attempts_engine(self.settings)
        refuse_others_commits()
        use_sessions(self.engine, self.settings.session)
        # Claims and effects are statements that commit by themselves. With their own pool, no attempt pays the round
        # trips of switching a connection's mode; an attempt never holds a connection of each pool at once.
        self._autocommit_engine = connections.make_engine(
            self.settings,
            # Our statements find rows by key; planning them for each value costs more than running them. A cached plan
            # made while the tables were empty would scan them once they have grown, so sequential scans are off. A plan that
            # has to use what is off gets an enormous cost, for which Postgres would compile it first.
            session={"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "jit": "off"},
            # A claim may wait for a lock for a lease; apart from that, none of our statements takes a minute.
            patience=self.settings.lease + 60.0,
            isolation_level="AUTOCOMMIT",
            pool_reset_on_return=None,
        )
        self._kept = connections.KeptConnection(self._autocommit_engine)
        self._objects_away_until = 0.0
        self.hints = Hints(
            None if self.settings.redis_url is None else self.settings.redis_url.get_secret_value(),
            owner=self.settings.owner,
            lease=self.settings.lease,
            timeout=self.settings.redis_timeout,
            pause=self.settings.redis_pause,
        )
        # One connection, kept open: busy attempts that use up a pool must not stop the renewals, and connecting for each
        # renewal costs more than the renewals. A connection that does not answer is replaced before the lease is over.
        self._heartbeat_engine = connections.make_engine(
            self.settings,
            session={"statement_timeout": math.ceil(self.settings.heartbeat * 1000)},
            patience=self.settings.heartbeat,
            isolation_level="AUTOCOMMIT",
            poolclass=StaticPool,
            pool_reset_on_return=None,
        )
        self.home = Home(self.settings.database_url.get_secret_value(), self._identity)
        # For handles that are awaited. Not asyncio's own threads, which also resolve names: a Postgres that does not
        # answer must not use them up.
        self.readers = DaemonThreads(READERS, "idempotency-reader")
        # Separate, so that a slow place of large results delays nobody who asks for a status.
        self.fetchers = DaemonThreads(FETCHERS, "idempotency-fetcher")
        self.heartbeat = Heartbeat(
            self._renew,
            self.hints,
            lease=self.settings.lease,
            interval=self.settings.heartbeat,
            longest_run=self.settings.longest_run,
        )

    def close(self) -> None:
        """Close everything; it is not used again."""
        self.is_closed = True
        self.heartbeat.stop()
        self.hints.flush()
        self.readers.shutdown(wait=False)
        self.fetchers.shutdown(wait=False)
        self._kept.close()
        for engine in self._engines:
            engine.dispose()

    def check_open(self) -> None:
        """Raise `RuntimeError` if the runtime is closed: no heartbeat would renew the claim."""
        if self.is_closed:
            raise RuntimeError("the runtime is closed: make a new one, or give a function that returns the open one")

    def abandon(self) -> None:
        """Forget inherited connections without closing the parent's sockets."""
        self._kept.forget()
        for engine in self._engines:
            engine.dispose(close=False)

    @property
    def _engines(self) -> tuple[Engine, ...]:
        return self.engine, self._autocommit_engine, self._heartbeat_engine

    def home_for(self, tenant: str) -> Home:
        """The database, as it is named to a caller for this tenant."""
        return self.home if self.settings.cell is None else self.home.of_cell(self.settings.cell, tenant)

    def phase(self, task: str, name: str) -> AbstractContextManager[object]:
        """Time a phase of a delivery, and trace it where that is on."""
        timed = metrics.phase(task, name)
        return timed if self.traces is None else self.traces.phase(name, timed)

    def traced(self, name: str, **attributes: str | int | bool) -> AbstractContextManager[object]:
        """A span around a block, where tracing is on. The attributes are ours: `effect="capture"`."""
        if self.traces is None:
            return nullcontext()
        return self.traces.span(name, attributes={OURS + each: value for each, value in attributes.items()})

    @contextmanager
    def autocommit(self, *tenants: str) -> Iterator[Connection]:
        """A connection on which every statement is its own short transaction, about the rows of these tenants.

        Where row-level security is on, a role of one tenant at a time gets an error for any other row.
        """
        connection, is_usable = self._kept.take(), False
        try:
            connections.act_for(connection, tenants)
            yield connection
            is_usable = True
        except SQLAlchemyError as error:
            if isinstance(error, DBAPIError) and error.connection_invalidated:
                self._forget_idle_connections()
            raise
        except BaseException:
            # A signal in the middle of a statement leaves its answer on the wire: never use that connection again.
            connection.invalidate()
            raise
        finally:
            self._kept.give_back(connection, is_usable=is_usable)

    @contextmanager
    def transaction(self, *tenants: str) -> Iterator[Connection]:
        """A connection in a transaction about the rows of these tenants, which is committed in the end."""
        with self.engine.begin() as connection:
            connections.act_for(connection, tenants)
            yield connection

    def stored_result(self, result: Any, *, before_put: Callable[[], object] = lambda: None) -> str:
        """A result as its record keeps it. A large one is put where `large_results_at` says, before the commit that refers to it.

        `before_put` is called before it is put, so that what it raises leaves nothing there.

        Raises `InvalidResult`, and `ResultNotKept` while that place does not take it: however long that lasts, it is no failure
        of the operation. One that has just failed is not asked by others, each of which would hold its locks meanwhile.
        """
        settings, store = self.settings, self.settings.large_results_at
        limit = settings.result_limit if store is None else max(settings.result_limit, settings.large_result_limit)
        text = results.to_text(result, limit=limit, compress_above=settings.compress_results_above)
        if store is None or len(text) <= settings.result_limit:
            return text
        if (left := self._objects_away_until - time.monotonic()) > 0:
            raise objects.ResultNotKept(
                _objects_pause(), f"the place of large results has failed, and is left alone for {left:.0f} s"
            )
        before_put()
        try:
            kept = objects.keep(store, text)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            self._objects_away_until = time.monotonic() + OBJECTS_REST
            log.warning("result_not_kept", error=type(error).__name__, rest=OBJECTS_REST)
            raise objects.ResultNotKept(
                _objects_pause(), f"the place of large results does not take one: {type(error).__name__}"
            ) from error
        crash_point("result.put")
        return kept

    def read_result(self, text: str) -> Any:
        """The result that a record keeps, wherever it is. Raises as `results.from_text` does, and what that place raises."""
        return results.from_text(objects.fetch(self.settings.large_results_at, text))

    def listen(self, channel: str) -> psycopg.Connection[Any] | None:
        """A new connection that receives the NOTIFYs of a channel, which the caller closes; None behind a pooler."""
        engine = connections.make_engine(self.settings, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        connection = engine.raw_connection()
        driver: Any = connection.driver_connection
        if driver.is_pooled:  # it would pass the NOTIFYs to whichever client has the backend
            connection.close()
            return None
        connection.detach()
        driver.execute(f"LISTEN {channel}")
        listener: psycopg.Connection[Any] = driver
        return listener

    def _forget_idle_connections(self) -> None:
        """One was found closed. If Postgres has restarted, all are, and each would fail another request or body."""
        for engine in (self.engine, self._autocommit_engine):
            engine.dispose()

    def _identity(self) -> str:
        with self.autocommit() as connection:
            identity: str = connection.exec_driver_sql(IDENTITY).scalar_one()
            return identity

    def _renew(self, claims: Sequence[Claimed]) -> dict[str, Renewal]:
        try:
            with self._heartbeat_engine.connect() as connection:
                connections.act_for(connection, [claim.id.tenant for claim in claims])
                return renew(connection, claims, self.settings.lease)
        except DBAPIError as error:
            # One record that Postgres refuses to change must not cost all others their leases: halves find it.
            if len(claims) == 1 or not is_row_error(error) or sqlstate(error) == TIMED_OUT:
                raise
        half = len(claims) // 2
        return self._renewed(claims[:half]) | self._renewed(claims[half:])

    def _renewed(self, claims: Sequence[Claimed]) -> dict[str, Renewal]:
        try:
            return self._renew(claims)
        except DBAPIError as error:
            if is_news(error):
                names = {"task": claims[0].id.task, "key": claims[0].id.key} if len(claims) == 1 else {}
                log.warning("lease_not_renewed", leases=len(claims), error=describe(error), **names)
            return {}  # not known


def _objects_pause() -> float:
    return OBJECTS_PAUSE * random.uniform(0.5, 1.5)
