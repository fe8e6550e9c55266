"""Which of Django's databases has the library's tables, and how the library connects to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from django.conf import settings
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import IsolationLevel
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL

from ...errors import SettingsError
from ...store.home import IDENTITY

# The one setting that is Django's and not Celery's: an alias in DATABASES.
ALIAS_SETTING = "IDEMPOTENCY_DATABASE"
# What Django's backend gives to psycopg.connect() and libpq does not know.
_NOT_LIBPQ = {"context", "cursor_factory", "prepare_threshold", "server_side_binding", "client_encoding"}


def database_alias() -> str:
    """The alias in `DATABASES` of the database with the library's tables."""
    return str(getattr(settings, ALIAS_SETTING, "default"))


def database_url(alias: str) -> str:
    """The SQLAlchemy URL of one of Django's databases, as Django connects to it now: in tests, the test database.

    Raises `SettingsError` for a database that is not Postgres, and for an isolation level that a body cannot have.
    """
    if alias not in connections.settings:
        known = ", ".join(map(repr, sorted(connections.settings)))
        raise SettingsError(f"{ALIAS_SETTING}: DATABASES has no {alias!r}; it has {known}")
    wrapper = connections[alias]
    if wrapper.vendor != "postgresql":
        raise SettingsError(f"DATABASES[{alias!r}]: must be Postgres, got {wrapper.vendor}")
    level = wrapper.settings_dict["OPTIONS"].get("isolation_level", IsolationLevel.READ_COMMITTED)
    if level != IsolationLevel.READ_COMMITTED:
        raise SettingsError(
            f"DATABASES[{alias!r}]: OPTIONS['isolation_level'] must be READ COMMITTED, in which attempts run and finish; "
            "give another level to a separate alias"
        )
    parameters = {
        name: str(value)
        for name, value in wrapper.get_connection_params().items()
        if name not in _NOT_LIBPQ and value is not None
    }
    # from the start: else each attempt sets it, in an extra round trip
    options = [parameters.get("options", ""), f"-c TimeZone={wrapper.timezone_name}"]
    if role := wrapper.settings_dict["OPTIONS"].get("assume_role"):
        escaped = re.sub(r"([\\\s])", r"\\\1", role)
        options.append(f"-c role={escaped}")
    parameters["options"] = " ".join(options).strip()
    host = parameters.get("host", "")
    is_one = bool(host) and "/" not in host and "," not in host
    url = URL.create(
        "postgresql+psycopg",
        username=parameters.pop("user", None),
        password=parameters.pop("password", None),
        database=parameters.pop("dbname", None),
        host=parameters.pop("host") if is_one else None,
        # also the port, and a host that has no place in a URL: a directory, or several
        query=_several_hosts(parameters),
    )
    return url.render_as_string(hide_password=False)


def _several_hosts(parameters: Mapping[str, str]) -> Mapping[str, str]:
    """The same parameters, with several hosts as SQLAlchemy has them, each with its port; one port is that of all."""
    hosts = parameters.get("host", "").split(",")
    if len(hosts) == 1:
        return parameters
    ports = parameters.get("port", "5432").split(",")
    if len(ports) not in (1, len(hosts)):
        raise SettingsError(
            f"DATABASES: HOST has {len(hosts)} hosts and PORT has {len(ports)} ports; give one, or one each"
        )
    return {**parameters, "port": ",".join(ports if len(ports) > 1 else ports * len(hosts))}


def engine_maker(alias: str, create: Callable[..., Any] | None) -> Callable[..., Any]:
    """`create_engine`, or what the project has in its place, with the login that Django's backend gives at each connect.

    A backend may give another password each time, as for IAM or Vault.
    """

    def make(*args: Any, **options: Any) -> Any:
        engine = (create or create_engine)(*args, **options)
        if isinstance(engine, Engine):
            event.listen(engine, "do_connect", log_in)
        return engine

    def log_in(_dialect: Any, _record: Any, _args: Any, parameters: dict[str, Any]) -> None:
        given = connections[alias].get_connection_params()
        parameters.update({name: given[name] for name in ("user", "password") if given.get(name) is not None})

    return make


def is_same_database(wrapper: BaseDatabaseWrapper, own: BaseDatabaseWrapper) -> bool:
    """Whether two connections of Django's are to the same database: where the settings differ, the server answers."""
    if wrapper is own or wrapper.vendor != own.vendor:
        return wrapper is own
    places = _place(wrapper.settings_dict), _place(own.settings_dict)
    if places[0] == places[1]:
        return True
    if places not in _compared:
        _compared[places] = identity(wrapper) == identity(own)
    return _compared[places]


_compared: dict[tuple[tuple[str, ...], tuple[str, ...]], bool] = {}


def identity(wrapper: BaseDatabaseWrapper) -> str:
    """What the server says that this connection's database is. Connects, if need be, for this question only."""
    with wrapper.temporary_connection() as cursor:
        cursor.execute(IDENTITY)
        return str(cursor.fetchone()[0])


def _place(given: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(given.get(name) or "") for name in ("HOST", "PORT", "NAME"))
