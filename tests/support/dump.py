"""All that the library's tables hold, as text."""

from __future__ import annotations

from sqlalchemy import Engine, text

_RELATIONS = """
SELECT oid::regclass::text AS name FROM pg_class
WHERE relnamespace = 'idempotency'::regnamespace AND relkind IN ('r', 'p', 'v') ORDER BY 1
"""


def dump(engine: Engine) -> dict[str, str]:
    """Every row of every table and view, by its name."""
    with engine.connect() as connection:
        names = connection.execute(text(_RELATIONS)).scalars().all()
        return {
            name: "\n".join(connection.execute(text(f"SELECT t::text FROM {name} t")).scalars().all()) for name in names
        }


def holding(engine: Engine, canary: str) -> set[str]:
    """The tables and views that hold a text."""
    return {name.removeprefix("idempotency.") for name, rows in dump(engine).items() if canary in rows}
