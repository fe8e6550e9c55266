"""The library's signal handlers in Celery's processes. The task base installs them once it is bound to an application."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import bootsteps
from celery.signals import (
    after_setup_logger,
    after_setup_task_logger,
    beat_init,
    before_task_publish,
    celeryd_after_setup,
    celeryd_init,
    worker_init,
    worker_process_init,
    worker_shutting_down,
)

from .checks import startup
from .letters import guard
from .observe import logs, metrics
from .upkeep import presence
from .worker import eager, signed_calls, unread, waiting


class Stopping(bootsteps.StartStopStep):
    """The worker's step that says that it stops: of a remote `shutdown` Celery sends no signal.

    The signal of a local one comes first: in a pool that runs bodies in this process, the step is closed after them.
    """

    def close(self, worker: Any) -> None:
        waiting.note_shutdown()


def add_stopping(sender: Any, **_: Any) -> None:
    """For `worker_init`."""
    sender.app.steps["worker"].add(Stopping)


# Celery calls them in this order: a configuration that is refused never registers a sign of life.
_RECEIVERS: tuple[tuple[Any, Callable[..., object]], ...] = (
    (after_setup_logger, logs.keep_lines_whole),
    (after_setup_task_logger, logs.keep_lines_whole),
    (celeryd_init, startup.check_broker_address),
    (celeryd_after_setup, startup.warn_about_pool_size),
    (worker_process_init, startup.freeze_imported_objects),
    (before_task_publish, signed_calls.sign_message),
    (worker_init, startup.check_worker_start),
    (worker_init, guard.add_guard),
    (worker_init, presence.sign_as_worker),
    (worker_init, waiting.note_start),
    (worker_init, add_stopping),
    (worker_shutting_down, waiting.note_shutdown),
    (beat_init, startup.check_beat_start),
    (beat_init, presence.sign_as_beat),
)
# Of an application whose records are all in a store, those that need no Postgres.
_FOR_STORES: tuple[tuple[Any, Callable[..., object]], ...] = (
    (after_setup_logger, logs.keep_lines_whole),
    (after_setup_task_logger, logs.keep_lines_whole),
    (worker_init, startup.check_stores_start),
    (worker_init, unread.reject_unread),
    (worker_init, waiting.note_start),
    (worker_init, add_stopping),
    (worker_shutting_down, waiting.note_shutdown),
)


def install_for_stores() -> None:
    """The same for tasks whose records are in a store. Idempotent. Raises `OSError`, as `install` does."""
    metrics.prepare()
    for signal, receiver in _FOR_STORES:
        signal.connect(receiver)


def install() -> None:
    """Connect to the signals of Celery's workers and beat, make the counters, and watch the pools. Idempotent.

    Raises `OSError` if the counters cannot be made: a process that cannot count does not start.
    """
    metrics.prepare()
    eager.watch_connections()
    for signal, receiver in _RECEIVERS:
        signal.connect(receiver)  # connecting a receiver twice has no effect
