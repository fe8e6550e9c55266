"""How much Postgres has written ahead."""

from __future__ import annotations

from sqlalchemy import Connection, text

_POSITION = text("SELECT (pg_current_wal_lsn() - '0/0'::pg_lsn)::bigint")


def written(connection: Connection) -> int:
    """Bytes since the server was made, of all its databases: of two answers, the difference counts."""
    return int(connection.execute(_POSITION).scalar_one())
