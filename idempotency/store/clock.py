"""The database's clock: the only one used in comparisons."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection

from .statements import execute

_DATABASE_TIME = "SELECT extract(epoch FROM clock_timestamp())::float8"


def database_time(connection: Connection) -> float:
    """Seconds since the epoch by the database's clock."""
    return float(execute(connection, _DATABASE_TIME).fetchone()[0])


def has_come(connection: Connection, time: datetime) -> bool:
    """Whether a time has come by the database's clock."""
    return bool(execute(connection, "SELECT %(time)s <= clock_timestamp()", {"time": time}).fetchone()[0])
