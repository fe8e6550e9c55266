"""The settings of a Celery application, and the connections that each of its processes holds open."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from .attempt.runtime import Runtime
from .errors import SettingsError
from .framework import framework
from .settings import PREFIX, Settings

if TYPE_CHECKING:
    from celery import Celery

_open: WeakKeyDictionary[Celery, Runtime] = WeakKeyDictionary()
_lock = threading.Lock()


# In the place of an address, where no task needs Postgres.
NO_DATABASE = "postgresql+psycopg://"


def settings_of(app: Celery, *, needs_database: bool = True) -> Settings:
    """Read the settings from the application's configuration, in its namespace if it has one.

    Without `needs_database`, for tasks whose records are in a store, no address of one has to be given. Raises
    `SettingsError`, as `Settings.read` does.
    """
    # with namespace="CELERY", as Celery finds its own: CELERY_IDEMPOTENCY_LEASE
    prefixes = [PREFIX] if app.namespace is None else [PREFIX, f"{app.namespace}_{PREFIX}".upper()]
    names = {key.removeprefix(prefix).lower() for key in app.conf for prefix in prefixes if key.startswith(prefix)}
    given = {name: app.conf[PREFIX + name] for name in names}
    is_frameworks = "database_url" not in given and (url := framework().database_url()) is not None
    if is_frameworks:
        given["database_url"] = url
    elif not needs_database:
        given.setdefault("database_url", NO_DATABASE)
    elif "database_url" not in given and "store" in given:
        raise SettingsError(
            "idempotency_database_url: not set, and this is about what Postgres has. DeduplicatedTask keeps its records in "
            "idempotency_store, about which docs/stores.md has the commands: `doctor`, `metrics` without -A, and a task's `drop`"
        )
    settings = Settings.read({"service": app.main or "celery"} | given)
    return (
        settings.model_copy(update={"engine": framework().engine_maker(settings.engine)}) if is_frameworks else settings
    )


def runtime_of(app: Celery) -> Runtime:
    """The runtime of this application in this process, opened on first use. Raises `SettingsError`.

    A forked pool child gets its own, so it never shares a socket with its parent.
    """
    return framework().runtime(app) or _of_this_process(app) or _opened(app)


def _of_this_process(app: Celery) -> Runtime | None:
    runtime = _open.get(app)
    return runtime if runtime is not None and runtime.pid == os.getpid() else None


def _opened(app: Celery) -> Runtime:
    with _lock:
        if (runtime := _of_this_process(app)) is not None:
            return runtime  # another thread was faster
        if (inherited := _open.get(app)) is not None:
            inherited.abandon()
        runtime = _open[app] = Runtime(settings_of(app))
        return runtime


@contextmanager
def runtime_replaced(app: Celery, runtime: Runtime) -> Iterator[None]:
    """Until the block ends, use this runtime for the application in this process; then close it."""
    with _lock:
        before, _open[app] = _open.get(app), runtime
    try:
        yield
    finally:
        with _lock:
            if before is None:
                _open.pop(app, None)
            else:
                _open[app] = before
        runtime.close()


def close_runtime(app: Celery) -> None:
    """Close what this process holds open for the application; the next use opens it again."""
    with _lock:
        runtime = _open.pop(app, None)
    if runtime is not None:
        runtime.close()


def close_all_runtimes() -> None:
    """Close what this process holds open for any application."""
    for app in list(_open):
        close_runtime(app)
