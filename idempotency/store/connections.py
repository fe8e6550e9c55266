"""Engines on the database of the promise, and what is checked and set on each of their connections."""

from __future__ import annotations

import math
from typing import Any

import psycopg
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import PoolResetState

from ..errors import SettingsError
from ..settings import Settings
from .statements import treat_read_only_as_away, wire


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


def reset(driver: Any, record: Any, state: PoolResetState) -> None:
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
