"""The test database: recognised by its name, and migrated. And Redis, emptied of a test's hints."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress

import redis
from celery import Celery
from sqlalchemy import Connection
from sqlalchemy.pool import NullPool

from ..application import settings_of
from ..attempt.hints import hint_name
from ..sentinel import client_of
from ..settings import Settings
from ..store.connections import make_engine
from ..wire.keys import OperationId

# The word in the name of a database for tests: test_shop, shop_test, shop_tests_1. Not latest, nor contest.
MARK = re.compile(r"(?<![a-z0-9])tests?(?![a-z])", re.IGNORECASE)


def require_test_database(connection: Connection, *, allowed: str | None = None) -> None:
    """Raise `ValueError` unless the database has the word "test" in its name, or the name `allowed`."""
    name = connection.exec_driver_sql("SELECT current_database()").scalar_one()
    if name != allowed and MARK.search(name) is None:
        raise ValueError(
            f"a test empties tables, and the name of the database {name!r} does not say that it is one for tests: it needs "
            'the word "test", as in test_shop or shop_test_1'
        )


def prepare(app: Celery, *, allow_database: str | None = None) -> None:
    """Bring the library's tables in the application's test database to this version.

    The database has to exist; the application's own tables are its own business. `allow_database`: its name, if the word
    "test" is not in it. Raises `ValueError` for any other database.
    """
    from ..store import schema  # with alembic, which only a migration needs

    engine = make_engine(settings_of(app), poolclass=NullPool)
    with engine.connect() as connection:
        require_test_database(connection, allowed=allow_database)
    schema.migrate(engine)


def forget_hints(settings: Settings, ids: Collection[OperationId]) -> None:
    """Delete the hints of these operations. Without Redis there is nothing to delete."""
    if settings.redis_url is None or not ids:
        return
    url = settings.redis_url.get_secret_value()
    with suppress(redis.RedisError), client_of(url, socket_timeout=5, socket_connect_timeout=5) as client:
        client.delete(*(hint_name(id, settings.owner) for id in ids))
