"""The library's migrations as Django's: `manage.py migrate` brings its tables to this version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...settings import Settings
from ...store import schema
from ...store.connections import make_engine
from .databases import database_alias, database_url


def migrate_to(revision: str) -> Callable[[Any, Any], None]:
    """A function for `RunPython`: the schema at this revision, in the library's database and in no other."""

    def migrate(_: Any, schema_editor: Any) -> None:
        alias = schema_editor.connection.alias
        if alias != database_alias():
            return
        engine = make_engine(Settings.read({"database_url": database_url(alias)}))
        schema.migrate(engine, revision)
        engine.dispose()

    return migrate
