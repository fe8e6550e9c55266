"""A worker, a relay or a beat does not start on a set-up that would lose work or do it twice.

Importing the library is enough: Celery announces each worker before it opens its pool, and each beat before its first
tick. Applications without an idempotent task are left alone. A database that does not answer stops neither: claims wait
for it.
"""

from __future__ import annotations

import sys
from typing import Any

from celery import Celery
from celery.signals import beat_init, celeryd_init, worker_init
from sqlalchemy.exc import DBAPIError


@celeryd_init.connect
def refuse_a_broken_broker_address(instance: Any, **_: Any) -> None:
    """End the process with one line before Celery reads the address: its own error would show parts of it."""
    from . import configuration
    from .errors import SettingsError

    if not configuration.idempotent_tasks(instance.app):
        return
    try:
        configuration.require_broker_address(instance.app)
    except SettingsError as error:
        raise SystemExit(f"idempotency: refused to start: {error}; correct it") from None


@worker_init.connect
@beat_init.connect
def refuse_to_lose(sender: Any, **_: Any) -> None:
    """End the process with status 1 and one line per reason, if there is any."""
    if (unanswered := refuse_to_start(sender.app)) is not None:
        print(f"idempotency: the database does not answer ({unanswered}): claims wait", file=sys.stderr)  # noqa: T201


def refuse_to_start(app: Celery) -> str | None:
    """Raise `SystemExit` with one line per reason not to start. Returns why the database could not be asked, if so."""
    # imported here, because only these processes need them
    from . import configuration, doctor
    from .findings import Level

    if not configuration.idempotent_tasks(app):
        return None
    unanswered = None
    settings, findings = configuration.read_settings(app)
    findings += configuration.check(app, settings)
    if settings is not None:
        try:
            findings += doctor.check_database(settings.database_url)
        except DBAPIError as error:
            unanswered = doctor.reason(error)
    if refusals := [finding for finding in findings if finding.level is Level.REFUSAL]:
        # Celery would log and ignore an exception of a signal's receiver; this one it lets pass.
        raise SystemExit("\n".join(f"idempotency: refused to start: {finding}" for finding in refusals))
    return unanswered
