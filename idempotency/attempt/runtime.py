"""What one process holds open for one Celery application: settings, connections, leases, heartbeat.

Made on first use in the process that uses it, so that a forked pool child never shares a socket with its parent.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import PoolResetState, StaticPool

from ..errors import SettingsError
from ..settings import Settings
from ..store import records
from ..store.records import Claimed, Renewal
from ..store.statements import treat_read_only_as_away, wire
from .lease import Heartbeat, Leases
from .session import refuse_others_commits


class Runtime:
    """The settings of one process and what it holds open under them. With Celery: `application.runtime_of(app)`."""

    def __init__(self, settings: Settings) -> None:
        self.pid = os.getpid()
        self.settings = settings
        self.holder = process_identity()
        self.engine = make_attempts_engine(self.settings, pool_reset_on_return=None)
        refuse_others_commits(self.engine)
        # What a body has SET is its own affair: the next attempt on the connection begins as we connect.
        event.listen(self.engine, "reset", _reset)
        # Claims and effects are statements that commit by themselves. A pool of their own spares each attempt the
        # round trips of switching a connection to and fro; an attempt never holds one of each.
        self._autocommit_engine = make_engine(
            self.settings,
            # Our statements find rows by key; planning them anew for each value costs more than running them. A kept
            # plan that was made while the tables were empty would read them whole when they have grown.
            server_options="-c plan_cache_mode=force_generic_plan -c enable_seqscan=off",
            # Beyond a lease, for which a claim may wait for a lock, no statement of ours takes a minute.
            patience=self.settings.lease + 60.0,
            isolation_level="AUTOCOMMIT",
            pool_reset_on_return=None,
        )
        self.leases = Leases(
            None if self.settings.redis_url is None else self.settings.redis_url.get_secret_value(),
            database=self.settings.database_name,
            lease=self.settings.lease,
            timeout=self.settings.redis_timeout,
            pause=self.settings.redis_pause,
        )
        # A connection of its own, and kept: a pool emptied by busy attempts must not stop the renewals, and connecting
        # for each costs more than all of them. One that does not answer is replaced before the lease is over.
        self._heartbeat_engine = make_engine(
            self.settings,
            server_options=f"-c statement_timeout={math.ceil(self.settings.heartbeat * 1000)}",
            patience=self.settings.heartbeat,
            isolation_level="AUTOCOMMIT",
            poolclass=StaticPool,
            pool_reset_on_return=None,
        )
        self.heartbeat = Heartbeat(
            self._renew,
            self.leases,
            lease=self.settings.lease,
            interval=self.settings.heartbeat,
            longest_run=self.settings.longest_run,
        )

    def close(self) -> None:
        """Close everything; it is not used again."""
        self.heartbeat.stop()
        self.leases.flush()
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
            return records.renew(connection, claims, self.settings.lease)


def make_engine(
    settings: Settings, *, server_options: str = "", patience: float | None = None, **options: Any
) -> Engine:
    """An engine on the database of the promise, with its rules set on every connection.

    `patience`: seconds until an answer counts as lost, for statements that are all our own.
    """
    if "poolclass" not in options:
        options |= {"pool_size": settings.pool_size, "max_overflow": settings.pool_size}
    # Nobody waits behind a frozen holder for longer than a lease lasts; it is evicted by then.
    lock_ms = max(int(settings.lease * 1000), 1)
    engine = create_engine(
        settings.database_url.get_secret_value(),
        hide_parameters=True,  # errors and logs never show arguments
        connect_args={
            "options": f"-c synchronous_commit=on -c lock_timeout={lock_ms} {server_options}",
            # a heartbeat that has to connect anew does so within its lease; libpq knows no less than two seconds
            "connect_timeout": max(min(math.ceil(settings.lease / 4), 5), 2),
            # A peer that vanished is noticed within a lease, not after the kernel's two hours.
            "keepalives_idle": max(int(settings.lease / 4), 1),
            "keepalives_interval": max(int(settings.lease / 8), 1),
            "keepalives_count": 3,
            # The same for what was sent to it and is not acknowledged; keepalives are not sent meanwhile.
            "tcp_user_timeout": max(int(settings.lease * 1000 / 2), 1),
        },
        **options,
    )
    wire(engine, patience=patience)
    event.listen(engine, "connect", _examine)
    treat_read_only_as_away(engine)
    return engine


def make_attempts_engine(settings: Settings, **options: Any) -> Engine:
    """The engine of the bodies' sessions."""
    longest_ms = math.ceil(settings.longest_run * 1000)
    return make_engine(
        settings,
        # A body that hangs in a transaction, or in one statement, is no holder for longer than this; its locks end with
        # its lease.
        server_options=f"-c idle_in_transaction_session_timeout={longest_ms} -c statement_timeout={longest_ms}",
        **options,
    )


def _examine(driver: Any, _: Any) -> None:
    """Ask a new connection what it is. Raises `SettingsError` where nothing could be promised over it."""
    with driver.cursor() as cursor:
        level, backend = cursor.execute(_WHAT_IT_IS).fetchone()
    driver.rollback()
    if level != "read committed":
        # Under a higher level every renewal and every counted duplicate would fail the finish with 40001.
        raise SettingsError(f"default_transaction_isolation: need 'read committed', got {level!r}")
    if backend != driver.info.backend_pid:
        # A pooler gives itself out as a backend. The next statement may reach another one, where nothing is prepared.
        driver.prepare_threshold = None


_WHAT_IT_IS = "SELECT current_setting('default_transaction_isolation'), pg_backend_pid()"


def _reset(driver: Any, record: Any, state: PoolResetState) -> None:
    """Give a body's settings and role back with its connection; what we connect with is what they are reset to."""
    if state.terminate_only or driver.closed:
        return
    try:
        driver.rollback()
        driver.autocommit = True  # or it would be three round trips
        driver.execute(_RESET)
        driver.autocommit = False
    except psycopg.Error as error:
        record.invalidate(error)  # Postgres is away, and whoever asks next will see that


_RESET = "RESET SESSION AUTHORIZATION; RESET ALL"


def process_identity() -> str:
    """Name this process so that another one on the same host can prove it dead: host, boot, namespace, pid, start.

    Without Linux's /proc the boot id is empty and nothing is ever proven: recovery waits for the lease instead.
    """
    boot = _read("/proc/sys/kernel/random/boot_id")
    namespace = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    return "|".join([socket.gethostname(), boot, namespace, str(os.getpid()), start_time(os.getpid())])


def is_provably_dead(holder: str) -> bool:
    """Whether the process of this name is gone: same host, boot and pid namespace, and no such process any more.

    A closed connection proves nothing, and a process elsewhere is never proven dead. Nor is one that cannot be seen:
    /proc may be mounted with `hidepid`, and then hides the processes of other users.
    """
    try:
        host, boot, namespace, pid, started = holder.split("|")
    except ValueError:
        return False
    mine = process_identity().split("|")
    if not boot or [host, boot, namespace] != mine[:3]:
        return False
    if not pid.isdecimal() or int(pid) == 0:
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass  # there is one, of another user; or this is no pid
    state, start = _state_and_start(pid)
    return state in ("Z", "X") or ("" not in (start, started) and start != started)


def start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty when it is gone, a zombie, or cannot be seen."""
    state, start = _state_and_start(pid)
    return "" if state in ("Z", "X") else start


def _state_and_start(pid: int | str) -> tuple[str, str]:
    """A process' state in one letter, and when it started; both empty when they cannot be read."""
    stat = _read(f"/proc/{pid}/stat")
    # The command in parentheses may hold anything; the fields after the last one are fixed (proc(5): 3 state, 22 start).
    fields = stat.rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) >= 20 else ("", "")


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
