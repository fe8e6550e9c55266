"""Which of Django's databases has the library's tables, and how the library connects to it."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from sqlalchemy.engine import URL

from ...errors import SettingsError

# The one setting that is Django's and not Celery's: an alias in DATABASES.
ALIAS_SETTING = "IDEMPOTENCY_DATABASE"
# What Django's backend gives to psycopg.connect() and libpq does not know.
_NOT_LIBPQ = {"context", "cursor_factory", "prepare_threshold", "server_side_binding", "client_encoding"}


def database_alias() -> str:
    """The alias in `DATABASES` of the database with the library's tables."""
    return str(getattr(settings, ALIAS_SETTING, "default"))


def database_url(alias: str) -> str:
    """The SQLAlchemy URL of one of Django's databases, as Django connects to it now: in tests, the test database.

    Raises `SettingsError` for a database that is not Postgres.
    """
    if alias not in connections.settings:
        known = ", ".join(map(repr, sorted(connections.settings)))
        raise SettingsError(f"{ALIAS_SETTING}: DATABASES has no {alias!r}; it has {known}")
    wrapper = connections[alias]
    if wrapper.vendor != "postgresql":
        raise SettingsError(f"DATABASES[{alias!r}]: must be Postgres, got {wrapper.vendor}")
    parameters = {
        name: str(value)
        for name, value in wrapper.get_connection_params().items()
        if name not in _NOT_LIBPQ and value is not None
    }
    # from the start: else each attempt sets it, in a round trip of its own
    parameters["options"] = f"{parameters.get('options', '')} -c TimeZone={wrapper.timezone_name}".strip()
    host = parameters.get("host", "")
    is_one = bool(host) and "/" not in host and "," not in host
    url = URL.create(
        "postgresql+psycopg",
        username=parameters.pop("user", None),
        password=parameters.pop("password", None),
        database=parameters.pop("dbname", None),
        host=parameters.pop("host") if is_one else None,
        query=parameters,  # also the port, and a host that has no place in a URL: a directory, or several
    )
    return url.render_as_string(hide_password=False)


def is_same_database(wrapper: BaseDatabaseWrapper, alias: str) -> bool:
    """Whether a connection of Django's is to the same database as this alias."""
    return _place(wrapper.settings_dict) == _place(connections[alias].settings_dict)


def _place(given: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(given.get(name) or "") for name in ("HOST", "PORT", "NAME"))
