"""Our own statements, handed to the driver past SQLAlchemy's result machinery, with SQLAlchemy's errors.

An attempt runs two statements of ours; SQLAlchemy's cursor results cost more than psycopg's whole execution of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError


def execute(connection: Connection, statement: str, parameters: Mapping[str, Any] | None = None) -> Any:
    """Run a statement in the connection's transaction; returns a psycopg cursor of named tuples. Raises what SQLAlchemy would."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    if not (driver.autocommit or connection.in_transaction()):
        connection.begin()  # or SQLAlchemy would not know what its commit() has to commit
    try:
        return driver.cursor(row_factory=namedtuple_row).execute(statement, parameters)
    except psycopg.Error as error:
        if driver.closed:
            connection.invalidate()
        raise DBAPIError.instance(
            statement,
            None,  # an error never shows parameters
            error,
            psycopg.Error,
            hide_parameters=True,
            connection_invalidated=connection.invalidated,
            dialect=connection.dialect,
        ) from error
