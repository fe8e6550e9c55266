"""A worker, a relay or a beat does not start on a set-up that would lose work or do it twice.

Celery announces each worker before it opens its pool, and each beat before its first tick. Applications without an idempotent task are left alone. A database that does not answer stops neither: claims wait
for it.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterable
from typing import Any

from celery import Celery
from sqlalchemy.exc import DBAPIError

from ..errors import SettingsError
from ..worker.task import idempotent_tasks
from . import configuration


def refuse_a_broken_broker_address(instance: Any, **_: Any) -> None:
    """End the process with one line before Celery reads the address: its own error would show parts of it."""
    if not idempotent_tasks(instance.app):
        return
    try:
        configuration.require_broker_address(instance.app)
    except SettingsError as error:
        raise SystemExit(f"idempotency: refused to start: {error}; correct it") from None


def collect_often(**_: Any) -> None:
    """Keep the memory of a pool process flat.

    Celery leaves the traceback of every failed attempt in a cycle, which only a full collection frees; and those wait
    until what is new is a quarter of all there is. Frozen, what was imported counts no more.
    """
    gc.freeze()
    gc.collect()


def warn_of_few_connections(instance: Any, **_: Any) -> None:
    """Say when a worker has more concurrency than connections; not known before its options are read."""
    if idempotent_tasks(instance.app):
        settings, _findings = configuration.read_settings(instance.app)
        if settings is not None:
            pool = getattr(instance.pool_cls, "__module__", str(instance.pool_cls))
            _warn(configuration.connections(pool, instance.concurrency, settings))


def check_worker_start(sender: Any, **_: Any) -> None:
    """End the process with status 1 and one line per reason, if there is any."""
    if (unanswered := refuse_to_start(sender.app)) is not None:
        print(f"idempotency: the database does not answer ({unanswered}): claims wait", file=sys.stderr)  # noqa: T201


def refuse_to_start(app: Celery) -> str | None:
    """Raise `SystemExit` with one line per reason not to start. Returns why the database could not be asked, if so."""
    # alembic logs the set-up of each of its plugins while it is imported
    logging.getLogger("alembic.runtime.plugins").setLevel(logging.WARNING)
    # imported here, because only these processes need them
    from . import doctor
    from .findings import Level

    if not idempotent_tasks(app):
        return None
    unanswered = None
    settings, findings = configuration.read_settings(app)
    findings += configuration.check(app, settings)
    if settings is not None:
        try:
            findings += doctor.check_database(settings)
        except DBAPIError as error:
            unanswered = doctor.reason(error)
    if refusals := [finding for finding in findings if finding.level is Level.REFUSAL]:
        # Celery would log and ignore an exception of a signal's receiver; this one it lets pass.
        raise SystemExit("\n".join(f"idempotency: refused to start: {finding}" for finding in refusals))
    _warn(finding for finding in findings if finding.subject.startswith("database") and finding.level is Level.WARNING)
    return unanswered


def _warn(findings: Iterable[Any]) -> None:
    for finding in findings:
        print(f"idempotency: warning: {finding}", file=sys.stderr)  # noqa: T201
