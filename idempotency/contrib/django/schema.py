"""The library's migrations as Django's: `manage.py migrate` brings its tables to this version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import connections
from django.db.migrations.loader import MigrationLoader
from sqlalchemy import Engine

from ...settings import Settings
from ...store import partitioning, schema
from ...store.connections import make_migrations_engine
from ...store.inserting import IS_PARTITIONED
from .databases import database_alias, database_url, engine_maker

LABEL = "idempotency"


def migrate_to(revision: str) -> Callable[[Any, Any], None]:
    """A function for `RunPython`: the schema at this revision, in the library's database and in no other."""

    def migrate(_: Any, schema_editor: Any) -> None:
        alias = schema_editor.connection.alias
        if alias != database_alias():
            return
        _migrate(alias, revision)

    return migrate


def migrate_unless_django_does(using: str, **_: Any) -> None:
    """Make the tables where Django's migrations are off, as in many a project's tests; a receiver of `post_migrate`.

    Also bring the functions of partitions to this version, for which there is no migration.
    """
    if using != database_alias():
        return
    module, _is_explicit = MigrationLoader.migrations_module(LABEL)
    if module is None and _has_no_tables(using):
        _migrate(using, "head")
    elif _is_partitioned(using):
        engine = _engine(using)
        partitioning.renew(engine)
        engine.dispose()


def _has_no_tables(alias: str) -> bool:
    with connections[alias].cursor() as cursor:
        return not schema.exists(cursor)


def _is_partitioned(alias: str) -> bool:
    if _has_no_tables(alias):
        return False
    with connections[alias].cursor() as cursor:
        cursor.execute(IS_PARTITIONED)
        return bool(cursor.fetchone()[0])


def _migrate(alias: str, revision: str) -> None:
    engine = _engine(alias)
    schema.migrate(engine, revision)
    engine.dispose()


def _engine(alias: str) -> Engine:
    settings = Settings.read({"database_url": database_url(alias), "engine": engine_maker(alias, None)})
    return make_migrations_engine(settings)
