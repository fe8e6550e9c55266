"""What one process holds open: connections, hints, heartbeat.

Made in the process that uses it, so that a forked child never shares a socket with its parent.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import StaticPool

from ..settings import Settings
from ..store import connections
from ..store.answers import Claimed, Renewal
from ..store.claims import renew
from .heartbeat import Heartbeat
from .hints import Hints
from .liveness import process_identity
from .session import refuse_others_commits


class Runtime:
    """The settings of one process and what it holds open under them. With Celery: `application.runtime_of(app)`."""

    def __init__(self, settings: Settings) -> None:
        self.pid = os.getpid()
        self.settings = settings
        self.holder = process_identity()
        self.engine = connections.make_attempts_engine(self.settings, pool_reset_on_return=None)
        refuse_others_commits(self.engine)
        # What a body has SET is its own affair: the next attempt on the connection begins as we connect.
        event.listen(self.engine, "reset", connections.reset)
        # Claims and effects are statements that commit by themselves. A pool of their own spares each attempt the
        # round trips of switching a connection to and fro; an attempt never holds one of each.
        self._autocommit_engine = connections.make_engine(
            self.settings,
            # Our statements find rows by key; planning them anew for each value costs more than running them. A kept
            # plan that was made while the tables were empty would read them whole when they have grown.
            server_options="-c plan_cache_mode=force_generic_plan -c enable_seqscan=off",
            # Beyond a lease, for which a claim may wait for a lock, no statement of ours takes a minute.
            patience=self.settings.lease + 60.0,
            isolation_level="AUTOCOMMIT",
            pool_reset_on_return=None,
        )
        self.hints = Hints(
            None if self.settings.redis_url is None else self.settings.redis_url.get_secret_value(),
            database=self.settings.database_name,
            lease=self.settings.lease,
            timeout=self.settings.redis_timeout,
            pause=self.settings.redis_pause,
        )
        # A connection of its own, and kept: a pool emptied by busy attempts must not stop the renewals, and connecting
        # for each costs more than all of them. One that does not answer is replaced before the lease is over.
        self._heartbeat_engine = connections.make_engine(
            self.settings,
            server_options=f"-c statement_timeout={math.ceil(self.settings.heartbeat * 1000)}",
            patience=self.settings.heartbeat,
            isolation_level="AUTOCOMMIT",
            poolclass=StaticPool,
            pool_reset_on_return=None,
        )
        self.heartbeat = Heartbeat(
            self._renew,
            self.hints,
            lease=self.settings.lease,
            interval=self.settings.heartbeat,
            longest_run=self.settings.longest_run,
        )

    def close(self) -> None:
        """Close everything; it is not used again."""
        self.heartbeat.stop()
        self.hints.flush()
        for engine in self._engines:
            engine.dispose()

    def abandon(self) -> None:
        """Forget inherited connections without closing the parent's sockets."""
        for engine in self._engines:
            engine.dispose(close=False)

    @property
    def _engines(self) -> tuple[Engine, ...]:
        return self.engine, self._autocommit_engine, self._heartbeat_engine

    @contextmanager
    def autocommit(self) -> Iterator[Connection]:
        """A connection on which every statement is its own short transaction."""
        with self._autocommit_engine.connect() as connection:
            try:
                yield connection
            except SQLAlchemyError:
                raise
            except BaseException:
                # A signal in the middle of a statement leaves its answer on the wire: nobody may use that again.
                connection.invalidate()
                raise

    def listen(self, channel: str) -> psycopg.Connection[Any]:
        """A connection of its own that hears the NOTIFYs of a channel. The caller closes it."""
        url = self.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        connection = psycopg.connect(url, autocommit=True, connect_timeout=5)
        connection.execute(f"LISTEN {channel}")
        return connection

    def _renew(self, claims: Sequence[Claimed]) -> dict[str, Renewal]:
        with self._heartbeat_engine.connect() as connection:
            return renew(connection, claims, self.settings.lease)
