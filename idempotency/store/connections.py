"""Engines for the library's database, and what is checked and set on each connection."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import psycopg
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool, Pool, PoolResetState

from ..errors import InvalidKey, SettingsError
from ..settings import Settings
from .driver import (
    SET_TENANTS,
    CheckedConnection,
    OneStatementCursor,
    TransactionCursor,
    begin_on_clean_connections,
    repeating,
    use_checked_connections,
)
from .statements import treat_stale_as_unavailable

_made: WeakSet[Engine] = WeakSet()


def make_engine(
    settings: Settings,
    *,
    session: Mapping[str, object] | None = None,
    connect: Mapping[str, object] | None = None,
    patience: float | None = None,
    begins: bool = False,
    **options: Any,
) -> Engine:
    """An engine for the library's database, whose connections are checked and have the required settings.

    `session`: settings of Postgres for its sessions; `connect`: arguments of libpq; both in addition to ours.
    `patience`: seconds until an answer counts as lost; only for engines that run nothing but our own statements.
    `begins`: see `begin_on_clean_connections`; what then begins a transaction is asked for its settings there.
    """
    if "poolclass" not in options:
        options |= {"pool_size": settings.pool_size, "max_overflow": settings.pool_size}
    in_session = {
        "synchronous_commit": "on",
        # a commit that no standby has confirmed ends with a WARNING: a role or an address may want none; a body may want
        # NOTICEs, too
        "client_min_messages": "notice" if begins else "warning",
        # as psycopg reads times; not for bodies, which would lose the order in which the database reads day and month
        **({} if begins else {"datestyle": "ISO"}),
        # Wait no longer than a lease: a frozen holder has been evicted by then.
        "lock_timeout": max(int(settings.lease * 1000), 1),
        # which rows of dead letters and signs of life take as their default (migration 0018)
        **({} if settings.code_version is None else {"idempotency.code_version": settings.code_version}),
        **(session or {}),
    }
    create = settings.engine or create_engine
    given = str(make_url(settings.database_url.get_secret_value()).query.get("options", ""))
    session_options = " ".join(f"-c {name}={value}" for name, value in in_session.items())
    engine = create(
        settings.database_url.get_secret_value(),
        hide_parameters=True,  # errors and logs must not show arguments
        connect_args={
            # after the address's own, such as a search_path, which stay unless they contradict
            "options": f"{given} {session_options}",
            # a heartbeat has to reconnect within its lease; libpq's minimum is two seconds
            "connect_timeout": max(min(math.ceil(settings.lease / 4), 5), 2),
            # Notices a vanished peer within a lease, not after the kernel's two hours.
            "keepalives_idle": max(int(settings.lease / 4), 1),
            "keepalives_interval": max(int(settings.lease / 8), 1),
            "keepalives_count": 3,
            # The same while sent data is unacknowledged, during which no keepalives are sent.
            "tcp_user_timeout": max(int(settings.lease * 1000 / 2), 1),
            **(connect or {}),
        },
        **options,
    )
    if not isinstance(engine, Engine) or engine.driver != "psycopg":
        got = f"{engine!r:.100}" if isinstance(engine, Engine) else type(engine).__name__  # a text may be the address
        raise SettingsError(f"idempotency_engine: must return an Engine with the driver psycopg, got {got}")
    if engine in _made:
        raise SettingsError("idempotency_engine: must return a new Engine each time: each has other options")
    _made.add(engine)
    use_checked_connections(engine, patience=patience, set_local=_set_local(given, in_session))
    event.listen(engine, "connect", _check)

    @event.listens_for(engine, "connect")
    def _(driver: CheckedConnection, _: Any) -> None:
        autocommits = options.get("isolation_level") == "AUTOCOMMIT"
        has_options = driver.is_pooled or session_options in driver.info.get_parameters().get("options", "")
        if driver.autocommit != autocommits or not has_options:
            raise SettingsError("idempotency_engine: must pass all its arguments on to create_engine; some were lost")

    if options.get("isolation_level") == "AUTOCOMMIT":
        event.listen(engine, "connect", _wrap_statements)
    elif not begins:
        event.listen(engine, "begin", _begin)
    treat_stale_as_unavailable(engine)
    return engine


def login(settings: Settings) -> Mapping[str, Any]:
    """What psycopg would be given to connect with, by the address and by `idempotency_engine`. Connects to nothing."""
    given: dict[str, Any] = {}

    def note(dialect: Any, record: Any, args: Any, parameters: dict[str, Any]) -> None:
        given.update(parameters)
        raise _NotedError

    address = settings.database_url.get_secret_value()
    for create in (settings.engine or create_engine, create_engine):
        with suppress(Exception):  # one that cannot be used is the finding of another check: the address itself counts
            engine = create(address, poolclass=NullPool)
            event.listen(engine, "do_connect", note)  # after the application's own
            engine.raw_connection().close()
        if given:
            break
    return given


class _NotedError(Exception):
    pass


# Seconds. A connection that was idle for longer goes through its pool, where an application's engine may have it checked.
FRESH = 1.0


class KeptConnection:
    """A connection in AUTOCOMMIT mode that a process with one thread keeps from one statement to the next.

    To take it from its pool and return it costs about as much as a claim itself. It is kept only while no other thread
    uses the engine, so none ever waits in the pool for it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inside: deque[None] = deque()  # one for each thread that has a connection, or waits for one
        self._kept: deque[tuple[Pool, Connection, float]] = deque()

    def take(self) -> Connection:
        """A connection, to be given back."""
        self._inside.append(None)
        try:
            return self._fresh() or self._engine.connect()
        except BaseException:
            self._inside.pop()
            raise

    def _fresh(self) -> Connection | None:
        try:
            pool, connection, since = self._kept.pop()
        except IndexError:
            return None
        # it may have been disposed of meanwhile
        if pool is self._engine.pool and time.monotonic() - since < FRESH:
            return connection
        connection.close()
        return None

    def give_back(self, connection: Connection, *, is_usable: bool) -> None:
        """Keep a connection, or close it."""
        pool = self._engine.pool
        try:
            if (
                is_usable
                and len(self._inside) == 1
                and not (
                    self._kept or connection.invalidated or connection.in_transaction() or isinstance(pool, NullPool)
                )
            ):
                self._kept.append((pool, connection, time.monotonic()))
            else:
                connection.close()
        finally:
            self._inside.pop()

    def close(self) -> None:
        """Close what is kept."""
        while self._kept:
            self._kept.pop()[1].close()

    def forget(self) -> None:
        """Forget it without closing it: it is the parent's."""
        self._kept.clear()


def make_attempts_engine(settings: Settings, **options: Any) -> Engine:
    """The engine for the bodies' sessions."""
    longest_ms = math.ceil(settings.longest_run * 1000)
    # A body that hangs in a transaction or a statement cannot be the holder for longer, and should hold no locks.
    limits = {"idle_in_transaction_session_timeout": longest_ms, "statement_timeout": longest_ms}
    connect = {"cursor_factory": OneStatementCursor}
    options = {"pool_reset_on_return": None, "pool_pre_ping": True, **options}
    engine = make_engine(settings, session=limits, connect=connect, begins=True, **options)
    begin_on_clean_connections(engine)
    event.listen(engine, "reset", _roll_back)
    return engine


def make_migrations_engine(settings: Settings) -> Engine:
    """The engine for migrations: without the time-outs of attempts, because building an index may take long."""
    return make_engine(settings, session={"lock_timeout": 0})


# In a start-up option, a backslash keeps a space from ending the value.
_OPTION = re.compile(r"(?:-c\s*|--)([\w.-]+)=((?:\\.|\S)*)\s*")


def _set_local(given: str, in_session: Mapping[str, object]) -> str:
    """The address's own options and ours as one statement, for a transaction behind a pooler.

    Raises `SettingsError` for an option that is no setting.
    """
    if _OPTION.sub("", given).strip():
        raise SettingsError("idempotency_database_url: options: must be settings, as in `-c search_path=shop`")
    of_address = {name.replace("-", "_"): re.sub(r"\\(.)", r"\1", value) for name, value in _OPTION.findall(given)}
    quoted = [(name, str(value).replace("'", "''")) for name, value in {**of_address, **in_session}.items()]
    return "SELECT " + ", ".join(f"set_config('{name}', '{value}', true)" for name, value in quoted)


def _check(driver: CheckedConnection, _: Any) -> None:
    """Check a new connection. Raises `SettingsError` for the wrong isolation level, and for one that is not ours."""
    if not isinstance(driver, CheckedConnection):
        raise SettingsError(
            "idempotency_engine: a listener of do_connect has connected itself; change the parameters and return None"
        )
    with driver.cursor() as cursor:
        level, backend, driver.needs_tenant, driver.is_partitioned = cursor.execute(_PROPERTIES).fetchone()  # type: ignore[misc]
    driver.rollback()
    if level != "read committed":
        # At a higher level, any renewal or counted duplicate would make the finish fail with 40001.
        raise SettingsError(f"default_transaction_isolation: need 'read committed', got {level!r}")
    if backend != driver.info.backend_pid:
        driver.is_pooled = True
    if driver.is_pooled:
        driver.prepare_threshold = None  # the next transaction may reach another backend


# The last two: whether row-level security is on, and no policy shows this role the rows of all tenants; whether the records are
# in partitions.
_PROPERTIES = """
SELECT current_setting('default_transaction_isolation'), pg_backend_pid(), EXISTS (
    SELECT FROM pg_class c
    WHERE c.relname = 'records' AND c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = 'idempotency')
      AND row_security_active(c.oid) AND NOT EXISTS (
          SELECT FROM pg_policy p, pg_catalog.unnest(p.polroles) role
          WHERE p.polrelid = c.oid AND p.polname = 'all_tenants' AND pg_has_role(role, 'USAGE'))),
    EXISTS (
        SELECT FROM pg_class c
        WHERE c.relname = 'records' AND c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = 'idempotency')
          AND c.relkind = 'p')
"""


def _begin(connection: Connection) -> None:
    """Behind a pooler, give a transaction the settings that another connection has from its start."""
    driver: Any = connection.connection.driver_connection
    if driver.is_pooled:
        connection.exec_driver_sql(driver.set_local)


def act_for(connection: Connection, tenants: Collection[str]) -> None:
    """Set the tenants whose rows a connection's statements may see, if row-level security is on; without any: no rows.

    On a connection in AUTOCOMMIT mode until the next call, otherwise until the end of the transaction, which must have
    begun. Costs a round trip, but not if the same tenants are set already. Raises `InvalidKey` for a line break in a name.
    """
    driver: Any = connection.connection.driver_connection
    if not getattr(driver, "needs_tenant", False):
        return
    if any("\n" in tenant for tenant in tenants):
        raise InvalidKey("tenant: must not contain a line break")
    named = "\n".join(sorted(set(tenants)))
    if not driver.autocommit:
        connection.exec_driver_sql(SET_TENANTS, {"tenants": named, "local": True})
    elif driver.is_pooled:
        driver.tenants = named
    elif driver.tenants != named:
        driver.tenants = None  # until it is answered
        connection.exec_driver_sql(SET_TENANTS, {"tenants": named, "local": False})
        driver.tenants = named


def _wrap_statements(driver: CheckedConnection, _: Any) -> None:
    kind: Any = TransactionCursor if driver.is_pooled else driver.cursor_factory
    driver.cursor_factory = repeating(kind)


def _roll_back(driver: CheckedConnection, record: Any, state: PoolResetState) -> None:
    """Roll back what an attempt has left open when its connection returns to the pool."""
    driver.owner = None  # a closing session returns its connection before `after_transaction_end`
    if state.terminate_only or driver.closed:
        return
    try:
        driver.rollback()
    except psycopg.Error as error:
        record.invalidate(error)  # Postgres is unavailable; the next user will notice
