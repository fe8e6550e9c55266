"""The library's tables by `manage.py migrate`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from alembic.script import ScriptDirectory
from django.conf import settings
from django.core.management import call_command
from django.db import connections
from django.db.migrations.exceptions import IrreversibleError
from django.db.migrations.loader import MigrationLoader

import services
from idempotency.contrib.django.schema import _engine
from idempotency.store import partitioning, schema
from idempotency.store.migrations.partitioning import PARTITIONS
from tests.django.conftest import database_settings


@pytest.fixture
def empty(servers: services.Services, default: Any) -> Iterator[Any]:
    """Another alias, for a database without any table."""
    name = f"empty_{uuid4().hex[:8]}"
    connections.settings["empty"] = default.settings_dict | database_settings(servers.create_database(name))
    yield connections["empty"]
    connections["empty"].close()
    del connections["empty"], connections.settings["empty"]
    servers.drop_database(name)


def has_tables(connection: Any) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT to_regclass('idempotency.records') IS NOT NULL")
        return bool(cursor.fetchone()[0])


def test_the_newest_migration_reaches_the_newest_revision_of_the_schema() -> None:
    newest = sorted(name for app, name in MigrationLoader(None).disk_migrations if app == "idempotency")[-1]
    assert newest.endswith(f"_{ScriptDirectory.from_config(schema._config()).get_current_head()}")


def test_only_the_librarys_database_gets_its_tables(empty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call_command("migrate", "idempotency", database="empty", verbosity=0)
    assert not has_tables(empty)


@pytest.mark.long
def test_a_database_that_has_the_tables_already_is_left_as_it_is(empty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "IDEMPOTENCY_DATABASE", "empty", raising=False)
    call_command("migrate", "idempotency", database="empty", verbosity=0)
    call_command("migrate", "idempotency", database="empty", fake=True, verbosity=0)
    with empty.cursor() as cursor:
        cursor.execute("DELETE FROM django_migrations WHERE app = 'idempotency'")
    call_command("migrate", "idempotency", database="empty", verbosity=0)
    assert has_tables(empty)
    with pytest.raises(IrreversibleError):  # what was accepted is not dropped
        call_command("migrate", "idempotency", "zero", database="empty", verbosity=0)


@pytest.mark.long
def test_the_tables_are_those_of_the_role_that_django_assumes(
    role: str, empty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "IDEMPOTENCY_DATABASE", "empty", raising=False)
    with empty.cursor() as cursor:
        cursor.execute(f"GRANT CREATE ON DATABASE {empty.settings_dict['NAME']} TO {role}")
        cursor.execute(f"GRANT ALL ON SCHEMA public TO {role}")
    empty.close()
    monkeypatch.setitem(empty.settings_dict, "OPTIONS", {"assume_role": role})
    call_command("migrate", "idempotency", database="empty", verbosity=0)
    with empty.cursor() as cursor:
        cursor.execute("SELECT DISTINCT tableowner FROM pg_tables WHERE schemaname IN ('public', 'idempotency')")
        assert cursor.fetchall() == [(role,)]


@pytest.mark.long
def test_where_migrations_are_switched_off_the_tables_are_made_as_well(
    empty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `pytest --nomigrations`, and in many a project's settings for tests."""
    monkeypatch.setattr(settings, "IDEMPOTENCY_DATABASE", "empty", raising=False)
    apps = ("idempotency", "ledger", "django_celery_results", "django_celery_beat")
    monkeypatch.setattr(settings, "MIGRATION_MODULES", dict.fromkeys(apps))
    for _ in range(2):
        call_command("migrate", database="empty", verbosity=0, run_syncdb=True)
    assert has_tables(empty)


@pytest.mark.long
def test_functions_of_partitions_are_brought_up_to_date_without_a_migration(
    empty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "IDEMPOTENCY_DATABASE", "empty", raising=False)
    call_command("migrate", "idempotency", database="empty", verbosity=0)
    engine = _engine("empty")
    partitioning.partition(engine, "day")
    version = f"{PARTITIONS}.version()"
    for database, is_made in (("default", False), ("empty", True)):
        with empty.cursor() as cursor:
            cursor.execute(f"DROP FUNCTION {version}")
            call_command("migrate", "idempotency", database=database, verbosity=0)
            cursor.execute(f"SELECT to_regprocedure('{version}') IS NOT NULL")
            assert cursor.fetchone() == (is_made,)
            cursor.execute(f"CREATE OR REPLACE FUNCTION {version} RETURNS int LANGUAGE sql AS 'SELECT 1'")
    engine.dispose()
