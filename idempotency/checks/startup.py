"""A worker, relay or beat does not start on a set-up that would lose work, do it twice or expose it.

The signals come before a worker opens its pool and before a beat's first tick. Applications without an idempotent task
are left alone. A database that does not answer prevents no start: claims wait for it.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable
from typing import Any

from celery import Celery
from sqlalchemy.exc import DBAPIError

from ..errors import SettingsError
from ..observe.unreachable import WRONG_ADDRESS, reason
from ..worker.task import idempotent_tasks
from .broker import require_broker_address
from .findings import Finding, Level
from .settings import check_pool_size, read_settings

# The process that has frozen its objects, after those it was forked from.
_frozen: list[int] = []


def check_broker_address(instance: Any, **_: Any) -> None:
    """Exit with one line if the address is invalid, before Celery reads it: its own error would show parts of it."""
    if not idempotent_tasks(instance.app):
        return
    try:
        require_broker_address(instance.app)
    except SettingsError as error:
        raise SystemExit(f"idempotency: refused to start: {error}; correct it") from None


def freeze_imported_objects(**_: Any) -> None:
    """Keep the memory of a pool process flat.

    Celery leaves the traceback of every failed attempt in a reference cycle, which only a full collection frees. Python
    delays those until new objects are a quarter of all; frozen objects do not count. Once in each process: a test's may
    start many workers, and what is frozen is never freed.
    """
    if os.getpid() not in _frozen:
        _frozen.append(os.getpid())
        gc.freeze()
        gc.collect()


def warn_about_pool_size(instance: Any, **_: Any) -> None:
    """Warn if a worker's concurrency exceeds its connections, once its options are known."""
    if idempotent_tasks(instance.app):
        settings, _findings = read_settings(instance.app)
        if settings is not None:
            pool = getattr(instance.pool_cls, "__module__", str(instance.pool_cls))
            _warn(check_pool_size(pool, instance.concurrency, settings))


def check_worker_start(sender: Any, **_: Any) -> None:
    """Exit with status 1 and one line per reason if the set-up is unsafe."""
    _note(require_safe_setup(sender.app, consumed=sender.app.amqp.queues.consume_from))


def check_stores_start(sender: Any, **_: Any) -> None:
    """Exit with status 1 and one line per reason if a store would lose records, or its address exposes them."""
    from .stores import check_stores

    findings = check_stores(sender.app)
    if refusals := [finding for finding in findings if finding.level is Level.REFUSAL]:
        raise SystemExit("\n".join(f"idempotency: refused to start: {finding}" for finding in refusals))
    _warn(each for each in findings if each.level is Level.WARNING)


def check_beat_start(sender: Any, **_: Any) -> None:
    """Exit with status 1 and one line per reason if the set-up is unsafe."""
    _note(require_safe_setup(sender.app))


def _note(unanswered: str | None) -> None:
    if unanswered is not None:
        print(f"idempotency: the database does not answer ({unanswered}): claims wait", file=sys.stderr)  # noqa: T201


def require_safe_setup(app: Celery, *, consumed: Iterable[str] = (), has_streams: bool = False) -> str | None:
    """Raise `SystemExit` with one line per reason not to start. Returns why the database could not be checked, if so.

    `consumed`: the queues that a worker takes messages from. A worker of another application must not. `has_streams`: there is
    something to check even if no task of the application is idempotent.
    """
    # only these processes need them
    from .doctor import check_configuration
    from .postgres import check_database
    from .processes import check_consumed
    from .sagas import check_sagas
    from .streams import check_stream_settings
    from .tls import is_refused

    if not has_streams and not idempotent_tasks(app):
        return None
    unanswered = None
    settings, findings = read_settings(app)
    findings += check_configuration(app, settings)
    if has_streams and settings is not None:
        findings += check_stream_settings(app, settings)
    if settings is not None and not is_refused(findings, "idempotency_database_url"):
        try:
            findings += check_database(settings)
            if not any(finding.level is Level.REFUSAL for finding in findings):
                findings += check_consumed(settings, consumed)
                findings += check_sagas(app, settings)
        except DBAPIError as error:
            unanswered = reason(error)
            if unanswered in WRONG_ADDRESS:
                findings.append(Finding(Level.REFUSAL, "idempotency_database_url", unanswered, "correct it"))
    if refusals := [finding for finding in findings if finding.level is Level.REFUSAL]:
        # Celery logs and ignores other exceptions of signal receivers.
        raise SystemExit("\n".join(f"idempotency: refused to start: {finding}" for finding in refusals))
    _warn(
        each
        for each in findings
        if each.subject.startswith(("database", "event", "messages")) and each.level is Level.WARNING
    )
    return unanswered


def _warn(findings: Iterable[Finding]) -> None:
    for finding in findings:
        print(f"idempotency: warning: {finding}", file=sys.stderr)  # noqa: T201
