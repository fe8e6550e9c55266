"""Settings in Django's namespace, and Django's DATABASES as the library's."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from django.conf import settings
from django.db import connections
from sqlalchemy import text
from sqlalchemy.engine import make_url

from idempotency import SettingsError
from idempotency.application import runtime_of, settings_of
from idempotency.contrib.django.databases import database_url
from tests.django.conftest import make_task
from tests.support.deliveries import Deliveries
from tests.support.operations import Record


def test_settings_are_found_in_the_namespace_of_celerys_own(app: Celery) -> None:
    assert (settings_of(app).lease, settings_of(app).retry_base) == (30.0, 0.05)
    assert settings_of(app).service == "ledger"


def test_a_misspelt_setting_in_the_namespace_is_refused(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "CELERY_IDEMPOTENCY_LEESE", 30, raising=False)
    with pytest.raises(SettingsError, match="idempotency_leese: no such setting; did you mean idempotency_lease"):
        settings_of(app)


def test_a_setting_of_the_application_itself_wins_as_celerys_own_does(app: Celery) -> None:
    app.conf.update(idempotency_lease=40.0, task_ignore_result=False)
    wins = app.conf.task_ignore_result is False  # not in Celery 5.5, where the namespace does
    assert settings_of(app).lease == (40.0 if wins else 30.0)


def test_the_library_connects_where_django_does(app: Celery, default: Any) -> None:
    with runtime_of(app).autocommit() as connection:
        where = connection.execute(text("SELECT current_database(), current_user")).one()
    with default.cursor() as cursor:
        cursor.execute("SELECT current_database(), current_user")
        assert tuple(where) == cursor.fetchone()


def test_what_django_gives_to_the_driver_the_librarys_connections_have_too(
    app: Celery, default: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"options": "-c search_path=elsewhere", "application_name": "shop", "sslmode": "prefer"}
    monkeypatch.setitem(default.settings_dict, "OPTIONS", options)
    with runtime_of(app).engine.connect() as connection:
        for name, value in {"search_path": "elsewhere", "application_name": "shop", "TimeZone": "UTC"}.items():
            assert connection.execute(text(f"SHOW {name}")).scalar_one() == value
        assert connection.execute(text("SHOW lock_timeout")).scalar_one() == "30s"


def test_a_password_with_any_character_is_passed_on(default: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default.settings_dict, "PASSWORD", "a/b@c:d e%+?#")
    assert make_url(database_url("default")).password == "a/b@c:d e%+?#"


@pytest.mark.parametrize("host", ["db.example", "/run/postgresql", "one,two"])
def test_the_database_is_named_by_its_host(app: Celery, default: Any, host: str) -> None:
    """Redis' hints of two databases of one name must differ."""
    before = dict(default.settings_dict)
    default.settings_dict.update(HOST=host, PORT="6432", NAME="shop")
    named = settings_of(app).database_name
    default.settings_dict.update(before)
    assert named == f"{host}:6432/shop"


def test_another_alias_is_named_by_a_setting(
    app: Celery, database: str, monkeypatch: pytest.MonkeyPatch, default: Any
) -> None:
    monkeypatch.setitem(connections.settings, "other", {**default.settings_dict, "NAME": "somewhere"})
    monkeypatch.setattr(settings, "IDEMPOTENCY_DATABASE", "other", raising=False)
    assert settings_of(app).database_name.endswith("/somewhere")
    del connections["other"]


def test_a_database_that_is_not_postgres_is_refused(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    lite = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    monkeypatch.setitem(connections.settings, "lite", connections.configure_settings({"default": lite})["default"])
    monkeypatch.setattr(settings, "IDEMPOTENCY_DATABASE", "lite", raising=False)
    with pytest.raises(SettingsError, match="DATABASES\\['lite'\\]: must be Postgres, got sqlite"):
        settings_of(app)
    del connections["lite"]


def test_an_address_of_another_database_makes_the_orm_in_a_body_an_error(
    app: Celery, deliveries: Deliveries, default: Any, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writes could not share the record's commit."""

    def pay(self: Any) -> None:
        connections["default"].ensure_connection()

    app.conf.update(idempotency_database_url=database_url("default"))
    monkeypatch.setitem(default.settings_dict, "NAME", "another")
    outcome = deliveries.deliver(make_task(app, pay, max_attempts=1), key="k")
    assert isinstance(outcome.value, SettingsError)
    assert "DATABASES['default'] is 'another'" in str(outcome.value)
    assert record("k").status == "failed"
