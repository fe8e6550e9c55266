"""Engines for the library's database, and what is checked and set on each connection."""

from __future__ import annotations

import math
from typing import Any

import psycopg
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import PoolResetState

from ..errors import SettingsError
from ..settings import Settings
from .statements import treat_read_only_as_unavailable, use_checked_connections


def make_engine(
    settings: Settings, *, server_options: str = "", patience: float | None = None, **options: Any
) -> Engine:
    """An engine for the library's database, whose connections are checked and have the required settings.

    `patience`: seconds until an answer counts as lost; only for engines that run nothing but our own statements.
    """
    if "poolclass" not in options:
        options |= {"pool_size": settings.pool_size, "max_overflow": settings.pool_size}
    # Wait no longer than a lease: a frozen holder has been evicted by then.
    lock_ms = max(int(settings.lease * 1000), 1)
    engine = create_engine(
        settings.database_url.get_secret_value(),
        hide_parameters=True,  # errors and logs must not show arguments
        connect_args={
            "options": f"-c synchronous_commit=on -c lock_timeout={lock_ms} {server_options}",
            # a heartbeat has to reconnect within its lease; libpq's minimum is two seconds
            "connect_timeout": max(min(math.ceil(settings.lease / 4), 5), 2),
            # Notices a vanished peer within a lease, not after the kernel's two hours.
            "keepalives_idle": max(int(settings.lease / 4), 1),
            "keepalives_interval": max(int(settings.lease / 8), 1),
            "keepalives_count": 3,
            # The same while sent data is unacknowledged, during which no keepalives are sent.
            "tcp_user_timeout": max(int(settings.lease * 1000 / 2), 1),
        },
        **options,
    )
    use_checked_connections(engine, patience=patience)
    event.listen(engine, "connect", _check)
    treat_read_only_as_unavailable(engine)
    return engine


def make_attempts_engine(settings: Settings, **options: Any) -> Engine:
    """The engine for the bodies' sessions."""
    longest_ms = math.ceil(settings.longest_run * 1000)
    return make_engine(
        settings,
        # A body that hangs in a transaction or a statement cannot be the holder for longer, and should hold no locks.
        server_options=f"-c idle_in_transaction_session_timeout={longest_ms} -c statement_timeout={longest_ms}",
        **options,
    )


def _check(driver: Any, _: Any) -> None:
    """Check a new connection. Raises `SettingsError` for the wrong isolation level."""
    with driver.cursor() as cursor:
        level, backend = cursor.execute(_PROPERTIES).fetchone()
    driver.rollback()
    if level != "read committed":
        # At a higher level, any renewal or counted duplicate would make the finish fail with 40001.
        raise SettingsError(f"default_transaction_isolation: need 'read committed', got {level!r}")
    if backend != driver.info.backend_pid:
        # A pooler is in between, and the next statement may reach another backend, with no prepared statements.
        driver.prepare_threshold = None


_PROPERTIES = "SELECT current_setting('default_transaction_isolation'), pg_backend_pid()"


def reset(driver: Any, record: Any, state: PoolResetState) -> None:
    """Reset what a body has SET when its connection returns to the pool; the connection options stay."""
    if state.terminate_only or driver.closed:
        return
    try:
        driver.rollback()
        driver.autocommit = True  # one round trip instead of three
        driver.execute(_RESET)
        driver.autocommit = False
    except psycopg.Error as error:
        record.invalidate(error)  # Postgres is unavailable; the next user will notice


_RESET = "RESET SESSION AUTHORIZATION; RESET ALL"
