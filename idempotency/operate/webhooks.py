"""Webhooks: endpoints of customers, their secrets, and deliveries that are wanted again."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from celery import Celery
from sqlalchemy import Row

from ..application import runtime_of
from ..attempt.runtime import Runtime
from ..errors import ChangeRefused, OperationNotFound
from ..hosts import Allowed
from ..store import operations, waking
from ..store import webhooks as stored
from ..store.statements import repeatable
from ..webhooks.addresses import target_of
from ..webhooks.challenge import post_challenge
from ..webhooks.posting import Sender
from ..webhooks.signing import Scheme, new_secret, verifier_of
from ..wire.keys import OperationId, check_key
from .change import Change, audit

ID_BYTES = 12
# Patterns of one endpoint.
EVENTS_LIMIT = 100
_EVENT = re.compile(r"[!-~]{1,255}", re.ASCII)
# Seconds for which an old secret signs beside the new one, unless told otherwise: a day to bring it to the receiver.
KEEP_SECRET = 86400.0
LONGEST_KEEP = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class NewEndpoint:
    """An endpoint that has just been made. `verifier` is what its receiver checks signatures with; it is shown only now."""

    id: str
    verifier: str = field(repr=False)


def add_endpoint(
    runtime: Runtime, change: Change, tenant: str, *, url: str, events: Sequence[str], scheme: Scheme = Scheme.SHARED
) -> NewEndpoint:
    """Register a URL for a tenant's events. It gets nothing before `enable_endpoint` has challenged it.

    `events`: patterns of types, such as `order.*`. Raises `AddressRefused`, `InvalidKey`, `WrongCell`, and `ChangeRefused` for
    patterns, and for a URL that the tenant has registered before and not disabled: each event would go there twice.
    """
    tenant, wanted = check_key(tenant, field="tenant"), sorted(set(events))
    runtime.settings.check_cell(tenant)
    if not 0 < len(wanted) <= EVENTS_LIMIT or not all(map(_EVENT.fullmatch, wanted)):
        raise ChangeRefused(f"--event: 1 to {EVENTS_LIMIT} patterns of event types, each of 1 to 255 ASCII characters")
    target = target_of(url, Allowed.of(runtime.settings.webhook_allowed_hosts))
    id, secret = f"ep_{secrets.token_hex(ID_BYTES)}", new_secret(scheme)
    with runtime.engine.begin() as connection:
        for other in stored.endpoints(connection, runtime.settings.service, tenant):
            if other.url == target.url and other.status != stored.DISABLED:
                raise ChangeRefused(
                    f"{tenant} has {other.id} with this URL, which is {other.status}; enable or disable that"
                )
        stored.add_endpoint(
            connection,
            id,
            tenant=tenant,
            service=runtime.settings.service,
            url=target.url,
            events=wanted,
            secret=secret,
        )
        # the path of a URL may be a secret
        details = {"id": id, "tenant": tenant, "host": target.host, "events": ", ".join(wanted)}
        audit(connection, change, "webhook_added", None, None, details=details)
    return NewEndpoint(id, verifier_of(secret))


def enable_endpoint(runtime: Runtime, change: Change, id: str) -> None:
    """Challenge an endpoint, and let it get webhooks once it has answered. What it has missed is not sent.

    Takes up to `webhook_timeout` seconds. Raises `ChangeRefused` for another answer or none, and if it was disabled
    meanwhile, and `OperationNotFound`.
    """
    endpoint, given = _endpoint(runtime, id)
    post_challenge(Sender.of(runtime.settings), endpoint.url, given)
    with runtime.engine.begin() as connection:
        if not stored.enable(connection, runtime.settings.service, id, seen=endpoint.changed_at):
            raise ChangeRefused(f"{id}: was disabled while it was challenged; look again")
        audit(connection, change, "webhook_enabled", None, None, details=_details(endpoint))


def disable_endpoint(runtime: Runtime, change: Change, id: str) -> None:
    """Send an endpoint nothing more; what waits is given up. An alarm about it is over. Raises `OperationNotFound`."""
    endpoint, _ = _endpoint(runtime, id)
    with runtime.engine.begin() as connection:
        stored.disable(connection, runtime.settings.service, id)
        audit(connection, change, "webhook_disabled", None, None, details=_details(endpoint))


def rotate_secret(
    runtime: Runtime, change: Change, id: str, *, keep: float = KEEP_SECRET, scheme: Scheme | None = None
) -> str:
    """Sign by a new secret, and for `keep` seconds by the old one as well. Returns what the receiver checks it with.

    `scheme`: another kind of signature than the one before. Raises `OperationNotFound`, and `ChangeRefused` for `keep`.
    """
    if not 0 <= keep <= LONGEST_KEEP:
        raise ChangeRefused(f"--keep: 0 to {LONGEST_KEEP:.0f} seconds, got {keep:g}")
    endpoint, given = _endpoint(runtime, id)
    is_ed25519 = bool(given) and given[0].startswith("whsk_")
    secret = new_secret(scheme or (Scheme.ED25519 if is_ed25519 else Scheme.SHARED))
    with runtime.engine.begin() as connection:
        stored.replace_secret(connection, id, secret, keep=keep)
        audit(connection, change, "webhook_rotated", None, None, details=_details(endpoint) | {"keep": keep})
    return verifier_of(secret)


@repeatable
def redeliver(app: Celery, change: Change, id: str) -> int:
    """Deliver again, under the same id, what was delivered or given up; what waits for its next attempt, now.

    Returns the number of the redelivery, which stays if the delivery still waited. An attempt that is made now is one of
    `ATTEMPTS`. Raises `OperationNotFound`, and `ChangeRefused` for one that was erased, that is being attempted, that only the
    replay of a dead letter would deliver, or whose endpoint is not enabled.
    """
    app.loader.import_default_modules()
    runtime = runtime_of(app)
    service = runtime.settings.service
    delivery = _delivery(runtime, id)
    if delivery.task not in app.tasks:
        raise ChangeRefused(f"{id}: the application has no task {delivery.task!r}; is its module in `include`?")
    if delivery.is_erased:
        raise ChangeRefused(f"{id}: its body was erased")
    if (status := _endpoint(runtime, delivery.endpoint_id)[0].status) != stored.ENABLED:
        raise ChangeRefused(f"{id}: its endpoint {delivery.endpoint_id} is {status}; enable that first")
    with runtime.engine.begin() as connection:
        row = stored.reopen(connection, service, id)
        if row is not None:
            app.tasks[row.task].enqueue(connection, delivery_id=id, redelivery=row.redelivery, tenant=row.tenant)
        else:
            row = _delivery(runtime, id)
            if row.is_erased:
                raise ChangeRefused(f"{id}: its body was erased")
            if row.ended_at is not None:
                raise ChangeRefused(f"{id}: was {row.status} at this moment; look again")
            if row.next_attempt_at is None and row.dead_letter is not None:
                raise ChangeRefused(f"{id}: its message is the dead letter {row.dead_letter}; replay that")
            operation = OperationId(row.tenant, row.task, f"{id}:{row.redelivery}")
            waking.wake(connection, operation, service)
            record = operations.lookup(connection, operation, service)
            if record is not None and record.status != "released":
                raise ChangeRefused(f"{id}: an attempt is under way, or ends just now; look again")
        audit(connection, change, "webhook_redelivered", None, None, details={"id": id, "tenant": row.tenant})
    return int(row.redelivery)


def _endpoint(runtime: Runtime, id: str) -> tuple[Row[Any], Sequence[str]]:
    with runtime.autocommit() as connection:
        found = stored.endpoint(connection, runtime.settings.service, id)
        if found is None:
            raise OperationNotFound("endpoint: there is none with this id")
        return found, stored.secrets_of(connection, id)


def _delivery(runtime: Runtime, id: str) -> Row[Any]:
    with runtime.autocommit() as connection:
        found = stored.delivery(connection, runtime.settings.service, id)
    if found is None:
        raise OperationNotFound("delivery: there is none with this id")
    return found


def _details(endpoint: Row[Any]) -> dict[str, Any]:
    return {"id": endpoint.id, "tenant": endpoint.tenant, "host": urlsplit(endpoint.url).hostname}
