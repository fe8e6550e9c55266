"""Django in this process, with a database of its own for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import django
import pytest
from celery import Celery, _state
from django.conf import settings
from django.core.management import call_command
from django.db import connections
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import make_url

import services
from idempotency.application import close_runtime
from idempotency.contrib.django import IdempotentTask
from idempotency.contrib.django.integration import Django
from idempotency.framework import Framework, use_framework
from idempotency.queues import quorum_queue
from tests.support.deliveries import Deliveries

QUEUE = "ledger"
Entries = Callable[[], list[str]]


# Once in this process, and before a test module imports a model. Only this package's tests use the integration.
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "none yet"}},
    INSTALLED_APPS=[
        "idempotency.contrib.django",
        "tests.django.ledger",
        "django_celery_results",
        "django_celery_beat",
    ],
    MIGRATION_MODULES={"ledger": None},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    USE_TZ=True,
    SECRET_KEY="test",
    LOGGING_CONFIG=None,
    TASKS={"default": {"BACKEND": "idempotency.contrib.django.backend.IdempotentBackend"}},
    CELERY_TASK_QUEUES=[quorum_queue(QUEUE, exchange=QUEUE, dead_letter_queue=f"{QUEUE}-dead")],
    CELERY_TASK_DEFAULT_QUEUE=QUEUE,
    CELERY_TASK_CREATE_MISSING_QUEUES=False,
    CELERY_TASK_IGNORE_RESULT=True,
    CELERY_IDEMPOTENCY_LEASE=30.0,
    CELERY_IDEMPOTENCY_HEARTBEAT=10.0,
    CELERY_IDEMPOTENCY_RETRY_BASE=0.05,
)
django.setup()
use_framework(Framework())


def database_settings(address: str) -> dict[str, Any]:
    """Django's form of an address."""
    url = make_url(address)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": url.database,
        "USER": url.username or "",
        "PASSWORD": url.password or "",
        "HOST": url.host or "",
        "PORT": str(url.port or ""),
    }


def make_task(app: Celery, body: Callable[..., Any], **options: Any) -> Any:
    """The body as a task of this application alone."""
    return app.task(base=IdempotentTask, bind=True, name=f"ledger.{body.__name__}", shared=False, **options)(body)


def use_database(address: str) -> None:
    """From now on, this is Django's default database."""
    connections["default"].close()
    connections["default"].settings_dict.update(database_settings(address))


@pytest.fixture(scope="session")
def template(servers: services.Services) -> Iterator[str]:
    """A database after `manage.py migrate`; each test gets a copy of it."""
    name = f"template_{uuid4().hex[:8]}"
    use_database(servers.create_database(name))
    call_command("migrate", verbosity=0, run_syncdb=True)
    connections["default"].close()
    yield name
    servers.drop_database(name)


@pytest.fixture
def default(application_database: str) -> Iterator[Any]:
    """Django's own connection to the test's database."""
    use_database(application_database)
    use_framework(Django())
    yield connections["default"]
    use_framework(Framework())
    connections.close_all()


@pytest.fixture
def second(default: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Another alias of the same database, as projects have for a role or a pooler, with another spelling of its host."""
    monkeypatch.setitem(connections.settings, "second", {**default.settings_dict, "HOST": "localhost"})
    yield connections["second"]
    connections["second"].close()
    del connections["second"]


@pytest.fixture
def role(engine: Engine) -> Iterator[str]:
    """A role for `assume_role`, which may do in the test's database what an application does."""
    name = f"shop_{uuid4().hex[:8]}"
    grants = (
        f'CREATE ROLE "{name}"',
        f'GRANT "{name}" TO CURRENT_USER',
        f'GRANT CREATE ON DATABASE {engine.url.database} TO "{name}"',
        f'GRANT ALL ON SCHEMA public, idempotency TO "{name}"',
        f'GRANT ALL ON ALL TABLES IN SCHEMA public, idempotency TO "{name}"',
        f'GRANT ALL ON ALL SEQUENCES IN SCHEMA public, idempotency TO "{name}"',
    )
    with engine.connect() as connection:
        for grant in grants:
            connection.execute(text(grant))
    yield name
    connections.close_all()
    with engine.connect() as connection:
        connection.execute(text(f'DROP OWNED BY "{name}" CASCADE'))
        connection.execute(text(f'DROP ROLE "{name}"'))


@pytest.fixture
def app(default: Any, redis_url: str, servers: services.Services) -> Iterator[Celery]:
    """A Celery application with its settings in Django's namespace."""
    settings.CELERY_BROKER_URL, settings.CELERY_IDEMPOTENCY_REDIS_URL = servers.broker_url, redis_url
    app = Celery("ledger", set_as_current=False)
    app.config_from_object("django.conf:settings", namespace="CELERY")
    yield app
    close_runtime(app)


@pytest.fixture
def project(app: Celery) -> Iterator[Celery]:
    """The application as a project's own: Celery's current one, and the one of its shared tasks."""
    before = _state.default_app, _state._tls.current_app
    app.set_default()
    app.set_current()
    yield app
    _state.default_app, _state._tls.current_app = before


@pytest.fixture
def deliveries(app: Celery) -> Deliveries:
    return Deliveries(app)


@pytest.fixture
def entries(default: Any) -> Entries:
    """The accounts of all entries that another connection sees, in order."""

    def read() -> list[str]:
        other = default.copy()
        with other.cursor() as cursor:
            cursor.execute("SELECT account FROM ledger_entry ORDER BY id")
            rows = [account for (account,) in cursor.fetchall()]
        other.close()
        return rows

    return read


@pytest.fixture
def outbox(database: str) -> Iterator[Entries]:
    """The keys in the outbox that others see, oldest first."""
    engine = create_engine(database, isolation_level="AUTOCOMMIT")

    def read() -> list[str]:
        with engine.connect() as connection:
            return list(connection.execute(text("SELECT key FROM idempotency.outbox ORDER BY id")).scalars())

    yield read
    engine.dispose()
