"""Settings in Django's namespace, and Django's DATABASES as the library's."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from django.conf import settings
from django.db import connections
from psycopg import IsolationLevel
from sqlalchemy import Engine, text
from sqlalchemy.engine import make_url

import services
from idempotency import SettingsError
from idempotency.application import close_runtime, runtime_of, settings_of
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Level
from idempotency.contrib.django.databases import database_url
from tests.django.conftest import make_task
from tests.support.deliveries import Deliveries
from tests.support.operations import Record


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("host", "port", "place"),
    [
        ("db.example", "6432", "db.example:6432"),
        ("/run/postgresql", "6432", "/run/postgresql:6432"),
        ("one,two", "6432", "one:6432,two:6432"),
        ("::1,::2", "6432", "::1:6432,::2:6432"),
        ("two,one", "6432,6433", "one:6433,two:6432"),
    ],
)
def test_the_database_is_named_by_its_host(app: Celery, default: Any, host: str, port: str, place: str) -> None:
    """Redis' hints of two databases of one name must differ."""
    before = dict(default.settings_dict)
    default.settings_dict.update(HOST=host, PORT=port, NAME="shop")
    named = settings_of(app).database_name
    default.settings_dict.update(before)
    assert named == f"{place}/shop"


def test_hosts_without_a_port_each_are_refused(app: Celery, default: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default.settings_dict, "HOST", "one,two,three")
    monkeypatch.setitem(default.settings_dict, "PORT", "6432,6433")
    with pytest.raises(SettingsError, match="HOST has 3 hosts and PORT has 2 ports"):
        settings_of(app)


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


@pytest.mark.long
@pytest.mark.parametrize(("level", "is_refused"), [("SERIALIZABLE", True), ("READ_COMMITTED", False)])
def test_an_isolation_level_that_a_body_cannot_have_is_refused(
    app: Celery, default: Any, monkeypatch: pytest.MonkeyPatch, level: str, is_refused: bool
) -> None:
    monkeypatch.setitem(default.settings_dict, "OPTIONS", {"isolation_level": IsolationLevel[level]})
    found = [str(finding) for finding in doctor(app) if finding.level is Level.REFUSAL]
    assert any("OPTIONS['isolation_level'] must be READ COMMITTED" in each for each in found) == is_refused


@pytest.mark.long
def test_the_doctor_compares_djangos_database_with_the_one_that_is_named(
    app: Celery, database: str, servers: services.Services
) -> None:
    def found() -> list[str]:
        return [str(each) for each in doctor(app) if "DATABASES['default']" in str(each)]

    assert found() == []
    app.conf.update(idempotency_database_url=database)
    assert found() == []
    app.conf.update(idempotency_database_url=servers.database_url)
    assert len(found()) == 1


def test_the_role_that_django_assumes_is_that_of_every_connection(
    app: Celery, deliveries: Deliveries, record: Record, default: Any, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    default.close()
    monkeypatch.setitem(default.settings_dict, "OPTIONS", {"assume_role": role})

    def who(self: Any) -> list[str]:
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT current_user")
            by_orm = cursor.fetchone()[0]
        found = [by_orm, self.session.execute(text("SELECT current_user")).scalar_one()]
        with connections["default"].cursor() as cursor:
            cursor.execute("SET ROLE NONE")
        self.session.execute(text("SET SESSION AUTHORIZATION DEFAULT"))
        self.session.rollback()
        return found

    task = make_task(app, who)
    assert [deliveries.deliver(task, key=key).value for key in ("first", "on the same connection")] == [
        [role, role]
    ] * 2
    with runtime_of(app).autocommit() as connection:
        assert connection.execute(text("SELECT current_user")).scalar_one() == role
    close_runtime(app)


@pytest.mark.direct  # a pooler has its own list of logins
def test_a_login_that_djangos_backend_renews_is_the_librarys_as_well(
    app: Celery, default: Any, superuser: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, original = f"login_{uuid4().hex[:8]}", type(default).get_connection_params
    password = "first"
    monkeypatch.setattr(
        type(default), "get_connection_params", lambda self: original(self) | {"user": name, "password": password}
    )
    with superuser.connect() as admin:
        admin.execute(text(f"CREATE ROLE {name} LOGIN SUPERUSER PASSWORD 'first'"))

        def user() -> Any:
            with runtime_of(app).autocommit() as connection:
                return connection.execute(text("SELECT current_user")).scalar_one()

        assert user() == name
        password = "second"
        admin.execute(text(f"ALTER ROLE {name} PASSWORD 'second'"))
        runtime_of(app)._autocommit_engine.dispose()
        assert user() == name
        close_runtime(app)
        admin.execute(text(f"DROP ROLE {name}"))
