"""What an observer notes about a process that no saga conducts: for people to read, never for a service."""

from __future__ import annotations

from typing import Any

from celery import Celery, current_app

from ..application import runtime_for
from ..errors import InvalidArguments
from ..observe.logs import log
from ..store import sagas
from ..store.callers import Caller, in_transaction_of
from ..store.refused import explained
from ..store.sagas import RUNNING, STATUSES
from ..wire import keys, results
from ..wire.keys import OperationId


def observe(
    session: Caller,
    saga_type: str,
    entity_id: str,
    step: str,
    data: Any,
    *,
    status: str = RUNNING,
    tenant: str | None = None,
    app: Celery | None = None,
) -> None:
    """Note a step of a process in `saga_instances`, when the caller commits.

    A step that was noted before changes nothing but the status. Where an operation has that name and key, nothing is noted.
    Raises `InvalidArguments`, also for the name of a saga of this application, and `InvalidKey`.
    """
    application = app or current_app._get_current_object()
    runtime = runtime_for(application, tenant)
    tenant = tenant or runtime.settings.tenant
    if status not in STATUSES:
        raise InvalidArguments(f"status: must be one of {', '.join(STATUSES)}, got {status!r}")
    if hasattr(application.tasks.get(saga_type), "saga_entity"):
        raise InvalidArguments(f"saga_type: {saga_type!r} is a saga, which keeps its own rows")
    for field, value in (("saga_type", saga_type), ("entity_id", entity_id), ("step", step)):
        keys.check_key(value, field=field)
    connection = in_transaction_of(session, runtime.home_for(tenant))
    with explained():
        is_noted = sagas.observe(
            connection,
            OperationId(tenant, saga_type, entity_id),
            service=runtime.settings.service,
            step=step,
            result=results.to_text(data, limit=runtime.settings.result_limit, what="data"),
            status=status,
        )
    if not is_noted:  # another application's, perhaps; the observer's event is no worse for it
        log.warning("not_observed", saga_type=saga_type, entity_id=entity_id, why="is a saga, which keeps its own rows")
