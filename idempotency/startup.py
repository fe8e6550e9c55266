"""A worker does not start on a set-up that would lose work or do it twice.

Importing the library is enough: Celery announces each worker before it opens its pool. Applications without an
idempotent task are left alone. A database that does not answer stops nothing: claims wait for it.
"""

from __future__ import annotations

import sys
from typing import Any

from celery.signals import celeryd_init, worker_init
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
def refuse_to_lose(sender: Any, **_: Any) -> None:
    """End the process with status 1 and one line per reason, if there is any."""
    # imported here, because only workers need them
    from . import configuration, doctor
    from .findings import Level

    app = sender.app
    if not configuration.idempotent_tasks(app):
        return
    settings, findings = configuration.read_settings(app)
    findings += configuration.check(app, settings)
    if settings is not None:
        try:
            findings += doctor.check_database(settings.database_url)
        except DBAPIError as error:
            print(f"idempotency: the database does not answer ({doctor.reason(error)}): claims wait", file=sys.stderr)  # noqa: T201
    if refusals := [finding for finding in findings if finding.level is Level.REFUSAL]:
        # Celery would log and ignore an exception of a signal's receiver; this one it lets pass.
        raise SystemExit("\n".join(f"idempotency: refused to start: {finding}" for finding in refusals))
