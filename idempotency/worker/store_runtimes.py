"""What a process of a Celery application holds open for its stores."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from pydantic import SecretStr

from ..application import settings_of
from ..errors import SettingsError
from ..setting_values import store_address
from ..settings import PREFIX
from ..stores.runtime import StoreRuntime

if TYPE_CHECKING:
    from celery import Celery

# By application, then by the task's own address; None: that of the setting.
_open: WeakKeyDictionary[Celery, Mapping[str | None, StoreRuntime]] = WeakKeyDictionary()
_lock = threading.Lock()


def store_runtime_of(app: Celery, own: str | None) -> StoreRuntime:
    """The runtime of the application's store in this process, or of a task's `own`, opened on first use.

    A forked pool child gets its own, so that it shares no socket with its parent. Raises `SettingsError`.
    """
    with _lock:
        runtimes = _open.get(app, {})
        runtime = runtimes.get(own)
        if runtime is None or runtime.pid != os.getpid():
            # what a parent has opened is forgotten, not closed: its sockets are the parent's
            here = {name: each for name, each in runtimes.items() if each.pid == os.getpid()}
            settings = settings_of(app, needs_database=False)
            runtime = StoreRuntime(settings, checked_address(own, settings.store))
            _open[app] = {**here, own: runtime}
        return runtime


def checked_address(own: str | None, of_setting: SecretStr | None) -> str:
    """The address of a task's store. Raises `SettingsError`, which shows none."""
    if own is None:
        if of_setting is None:
            raise SettingsError(f"{PREFIX}store: not set, and a DeduplicatedTask keeps its records there")
        return of_setting.get_secret_value()
    try:
        return store_address(SecretStr(own)).get_secret_value()
    except ValueError as error:
        raise SettingsError(f"store: {error}") from None


def close_store_runtimes(app: Celery) -> None:
    """Close what this process holds open for the application's stores; the next use opens it again."""
    with _lock:
        runtimes = _open.pop(app, {})
    for runtime in runtimes.values():
        runtime.close()
