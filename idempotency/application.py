"""The settings of a Celery application, and the connections that each of its processes holds open."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from .attempt.runtime import Runtime
from .cells import cells_given
from .errors import SettingsError
from .framework import framework
from .settings import PREFIX, Settings

if TYPE_CHECKING:
    from celery import Celery

_open: WeakKeyDictionary[Celery, Runtime] = WeakKeyDictionary()
_open_cells: WeakKeyDictionary[Celery, _Cells] = WeakKeyDictionary()
# While something is opened or closed; nothing of the application's runs under it.
_lock = threading.Lock()


class _Cells:
    """What a process that serves no cell knows of all, and the runtimes of those that it has called into, by name."""

    def __init__(self, settings: Settings) -> None:
        self.pid = os.getpid()
        self.settings = settings
        self.runtimes: dict[str, Runtime] = {}


# In the place of an address, where no task needs Postgres.
NO_DATABASE = "postgresql+psycopg://"
# What is nobody's where there are cells. What a relay does not know in the place of large results, it deletes.
_EACH_CELLS_OWN = frozenset({"database_url", "large_results_at"})


def settings_of(app: Celery, *, needs_database: bool = True, cell: str | None = None) -> Settings:
    """Read the settings from the application's configuration, in its namespace if it has one.

    Without `needs_database`, for tasks whose records are in a store, no address of one has to be given. `cell`: those of this
    cell instead of the process's own. Raises `SettingsError`, as `Settings.read` does, and where there are cells and the
    process serves none.
    """
    # with namespace="CELERY", as Celery finds its own: CELERY_IDEMPOTENCY_LEASE
    prefixes = [PREFIX] if app.namespace is None else [PREFIX, f"{app.namespace}_{PREFIX}".upper()]
    names = {key.removeprefix(prefix).lower() for key in app.conf for prefix in prefixes if key.startswith(prefix)}
    given = {name: app.conf[PREFIX + name] for name in names}
    if given.get("cells"):
        given = _of_cell(given, cell)
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


def _of_cell(given: dict[str, Any], cell: str | None) -> dict[str, Any]:
    """The settings with those of the cell over them; what they are not, `Settings.read` says."""
    if common := sorted(_EACH_CELLS_OWN & given.keys()):
        raise SettingsError(f"{PREFIX}{common[0]}: each cell has its own, in {PREFIX}cells")
    cells, serves = cells_given(given["cells"]), cell or given.get("cell")
    names = ", ".join(map(str, cells))
    if serves is None:
        raise SettingsError(
            f"{PREFIX}cell: this process serves none of {names}; set IDEMPOTENCY_CELL, and call use_cells(app) after the "
            "configuration. Without a cell there are only enqueue and handles, for a tenant that is named"
        )
    if serves not in cells:
        raise SettingsError(f"{PREFIX}cell: {serves!r} is none of {names}")
    if not isinstance(own := cells[serves], Mapping):
        raise SettingsError(f"{PREFIX}cells.{serves}: must be a mapping from the names of settings to their values")
    own = {name: value for name, value in own.items() if name != "broker_url"}
    return {**given, **own, "cells": cells, "cell": serves}


def use_cells(app: Celery) -> None:
    """Have this process serve the cell that the environment's IDEMPOTENCY_CELL names, or none.

    Call it once the application is configured. It sets `idempotency_cell` and Celery's
    `broker_url`. Raises `SettingsError` for settings that do not fit, and for a cell that is not there.
    """
    from .environment import environment  # takes a while to import, and most applications have no cells

    if not app.conf.get(f"{PREFIX}cells"):
        raise SettingsError(f"{PREFIX}cells: not set")
    if framework().database_url() is not None:
        raise SettingsError(f"{PREFIX}cells: the framework has one database for all tenants")
    serve_cell(app, environment().cell)


def serve_cell(app: Celery, cell: str | None) -> None:
    """Have this process serve this cell from now on, or none. What it has open of another is closed."""
    close_runtime(app)
    app.conf[f"{PREFIX}cell"] = cell
    settings = _settings_of_callers(app)  # all of them are checked, whichever this process serves
    if cell is not None:
        if cell not in settings.cells:
            raise SettingsError(f"{PREFIX}cell: {cell!r} is none of {', '.join(settings.cells)}")
        app.conf["broker_url"] = settings.cells[cell].broker_url.get_secret_value()
        app.conf["broker_read_url"] = app.conf["broker_write_url"] = None  # or they would win
        if app.conf["broker_url"] != app.conf.broker_write_url or app.conf["broker_url"] != app.conf.broker_read_url:
            raise SettingsError(f"broker_url: not that of the cell {cell!r}; set neither CELERY_BROKER_URL nor its kin")


def _settings_of_callers(app: Celery) -> Settings:
    """The settings as a process without a cell has them: of any cell, to find a tenant's by."""
    return settings_of(app, cell=next(iter(cells_given(app.conf[f"{PREFIX}cells"])))).model_copy(update={"cell": None})


def serves_no_cell(app: Celery) -> bool:
    """Whether there are cells, and this process serves none of them: it has no broker, and no database of its own."""
    return bool(app.conf.get(f"{PREFIX}cells")) and app.conf.get(f"{PREFIX}cell") is None


def runtime_of(app: Celery) -> Runtime:
    """The runtime of this application in this process, opened on first use: of the cell that it serves. Raises `SettingsError`.

    A forked pool child gets its own, so it never shares a socket with its parent.
    """
    return framework().runtime(app) or _of_this_process(app) or _opened(app)


def runtime_for(app: Celery, tenant: str | None) -> Runtime:
    """The runtime of the cell that a tenant is of: `Session(runtime_for(app, tenant).engine)` is a session to enqueue with.

    Where there are no cells, that of the application; for no tenant, that of the process's cell, whose own `tenant` counts.
    Raises `WrongCell` for a tenant that is in no cell, or of another one than this process serves; and `SettingsError`, also in
    a process without a cell for no tenant.
    """
    # a process that has opened its own serves a cell, or there are none: asked first, because it costs less
    if tenant is None or _of_this_process(app) is not None or not serves_no_cell(app):
        runtime = runtime_of(app)
        # a cell's own tenant may be another cell's
        runtime.settings.check_cell(runtime.settings.tenant if tenant is None else tenant)
        return runtime
    cell = _cells_of(app).settings.cell_for(tenant)
    assert cell is not None
    return _cells_of(app).runtimes.get(cell) or _opened_cell(app, cell)


def _cells_of(app: Celery) -> _Cells:
    known = _open_cells.get(app)
    if known is not None and known.pid == os.getpid():
        return known
    with _lock:
        return _cells_opened(app)


def _cells_opened(app: Celery) -> _Cells:
    known = _open_cells.get(app)
    if known is None or known.pid != os.getpid():
        for inherited in () if known is None else known.runtimes.values():
            inherited.abandon()
        known = _open_cells[app] = _Cells(_settings_of_callers(app))
    return known


def _opened_cell(app: Celery, cell: str) -> Runtime:
    with _lock:
        runtimes = _cells_opened(app).runtimes
        if cell not in runtimes:
            runtimes[cell] = Runtime(settings_of(app, cell=cell))
        return runtimes[cell]


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
        runtime, cells = _open.pop(app, None), _open_cells.pop(app, None)
    for each in (runtime, *(() if cells is None else cells.runtimes.values())):
        if each is not None and each.pid == os.getpid():
            each.close()
        elif each is not None:
            each.abandon()  # its connections are the parent's


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()  # the thread that held it is not there


os.register_at_fork(after_in_child=_renew_lock)


def close_all_runtimes() -> None:
    """Close what this process holds open for any application."""
    for app in {*_open, *_open_cells}:
        close_runtime(app)
