"""Webhooks to customers: endpoints with their secrets, deliveries, and the attempts of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row

from .record import is_open

ENABLED, DISABLED, UNVERIFIED = "enabled", "disabled", "unverified"
# Why an endpoint is disabled.
GONE, FAILING, BY_PERSON = "gone", "failing", "person"
# Why a delivery was given up; or the code with which its operation has failed.
EXHAUSTED, NO_ENDPOINT, ERASED, DISCARDED = "attempts_exhausted", "endpoint_disabled", "erased", "discarded"

_ADD = """
INSERT INTO idempotency.webhook_endpoints (id, tenant, service, url, events)
VALUES (%(id)s, %(tenant)s, %(service)s, %(url)s, %(events)s)
"""
_SIGN_BY = """
INSERT INTO idempotency.webhook_secrets (endpoint_id, tenant, secret)
SELECT id, tenant, %(secret)s FROM idempotency.webhook_endpoints WHERE id = %(endpoint)s
"""
# The old ones sign beside the new one for a while; what has expired is of no use to anybody.
_EXPIRE_SECRETS = """
UPDATE idempotency.webhook_secrets SET expires_at = least(expires_at, clock_timestamp() + make_interval(secs => %(keep)s))
WHERE endpoint_id = %(endpoint)s
"""
_FORGET_SECRETS = """
DELETE FROM idempotency.webhook_secrets WHERE endpoint_id = %(endpoint)s AND expires_at <= clock_timestamp()
"""
_SECRETS = """
SELECT secret FROM idempotency.webhook_secrets
WHERE endpoint_id = %(endpoint)s AND (expires_at IS NULL OR expires_at > clock_timestamp()) ORDER BY id DESC
"""

_ENDPOINT_COLUMNS = """e.id, e.tenant, e.url, e.events, e.status, e.disabled_because, e.failing_since, e.given_up,
       e.created_at, e.changed_at"""
_ENDPOINTS = f"""
SELECT {_ENDPOINT_COLUMNS} FROM idempotency.webhook_endpoints e
WHERE e.service = %(service)s AND (%(tenant)s::text IS NULL OR e.tenant = %(tenant)s) ORDER BY e.tenant, e.created_at, e.id
"""
_ENDPOINT = f"""
SELECT {_ENDPOINT_COLUMNS} FROM idempotency.webhook_endpoints e WHERE e.id = %(id)s AND e.service = %(service)s
"""
_OPEN = f"""
SELECT e.id, e.events FROM idempotency.webhook_endpoints e
WHERE e.tenant = %(tenant)s AND e.service = %(service)s AND e.status = '{ENABLED}'
"""
_SET_STATUS = """
UPDATE idempotency.webhook_endpoints
SET status = %(status)s, disabled_because = %(because)s, failing_since = NULL, given_up = 0, changed_at = clock_timestamp()
WHERE id = %(id)s AND service = %(service)s
"""
# One that was disabled since it was read stays so.
_ENABLE = f"{_SET_STATUS} AND (status <> '{DISABLED}' OR changed_at = %(seen)s)"

# Of a record, an outbox row or a dead letter: it is of the operation that makes the delivery `w`.
OF_DELIVERY = "(tenant, task, key) = (w.tenant, w.task, w.id || ':' || w.redelivery)"
_NEXT_ATTEMPT = f"""CASE WHEN w.status = 'waiting' THEN
           (SELECT min(available_at) FROM idempotency.outbox WHERE {OF_DELIVERY} AND status = 'pending') END AS next_attempt_at"""
_ADD_DELIVERY = """
INSERT INTO idempotency.webhook_deliveries (id, tenant, service, endpoint_id, task, event_type, body)
VALUES (%(id)s, %(tenant)s, %(service)s, %(endpoint)s, %(task)s, %(event_type)s, %(body)s) ON CONFLICT DO NOTHING
"""
_DELIVERY = f"""
SELECT id, tenant, endpoint_id, task, event_type, status, given_up_because, redelivery, created_at, ended_at, body = '' AS is_erased,
       {_NEXT_ATTEMPT},
       (SELECT min(id) FROM idempotency.dead_letters WHERE {OF_DELIVERY} AND {is_open()}) AS dead_letter
FROM idempotency.webhook_deliveries w WHERE id = %(id)s AND service = %(service)s
"""
_DELIVERIES = f"""
SELECT id, event_type, status, given_up_because, redelivery, created_at, ended_at, {_NEXT_ATTEMPT}
FROM idempotency.webhook_deliveries w
WHERE endpoint_id = %(endpoint)s ORDER BY created_at DESC, id LIMIT %(limit)s
"""
_REOPEN = """
UPDATE idempotency.webhook_deliveries SET status = 'waiting', given_up_because = NULL, ended_at = NULL, redelivery = redelivery + 1
WHERE id = %(id)s AND service = %(service)s AND status <> 'waiting' AND body <> '' RETURNING tenant, task, redelivery
"""
_END = """
UPDATE idempotency.webhook_deliveries SET status = %(status)s, given_up_because = %(because)s, ended_at = clock_timestamp()
WHERE id = %(id)s AND redelivery = %(redelivery)s
"""
# Written only if it changes something: all deliveries to an endpoint would wait for its row.
_WORKS = """
UPDATE idempotency.webhook_endpoints e SET failing_since = NULL, given_up = 0
FROM idempotency.webhook_deliveries d
WHERE d.id = %(id)s AND e.id = d.endpoint_id AND (e.failing_since IS NOT NULL OR e.given_up > 0)
"""
_GIVE_UP = f"""
UPDATE idempotency.webhook_endpoints e SET
    given_up = e.given_up + 1,
    changed_at = clock_timestamp(),
    status = CASE WHEN judged.because IS NULL THEN e.status ELSE '{DISABLED}' END,
    disabled_because = judged.because
FROM (
    SELECT f.id, CASE
        WHEN %(gone)s THEN '{GONE}'
        WHEN f.given_up + 1 >= %(most)s
             AND f.failing_since <= clock_timestamp() - make_interval(secs => %(failing_for)s) THEN '{FAILING}'
    END AS because
    FROM idempotency.webhook_endpoints f JOIN idempotency.webhook_deliveries d ON d.endpoint_id = f.id
    WHERE d.id = %(id)s FOR UPDATE OF f
) judged
WHERE e.id = judged.id AND e.status = '{ENABLED}' RETURNING e.id, e.disabled_because
"""

# Attempts at one endpoint at a time: a slow one must not occupy all workers.
AT_ONCE = 8
# By itself, before `_DUE`: what a statement counts it sees as of its beginning, not as of when it has waited for the lock.
_IN_TURN = """
SELECT FROM idempotency.webhook_endpoints e JOIN idempotency.webhook_deliveries d ON d.endpoint_id = e.id
WHERE d.id = %(id)s FOR NO KEY UPDATE OF e
"""
_DUE = """
SELECT d.body, e.id AS endpoint_id, e.url, e.status,
       (SELECT count(*) FROM idempotency.webhook_attempts a WHERE a.delivery_id = d.id AND a.redelivery = %(redelivery)s) AS tries,
       (SELECT count(*) FROM idempotency.webhook_attempts a
        WHERE a.endpoint_id = e.id AND a.ended_at IS NULL
          AND a.begun_at > clock_timestamp() - make_interval(secs => %(longest)s))
       >= CASE WHEN e.failing_since IS NULL THEN %(at_once)s ELSE 1 END AS is_busy
FROM idempotency.webhook_deliveries d JOIN idempotency.webhook_endpoints e ON e.id = d.endpoint_id WHERE d.id = %(id)s
"""
_BEGIN = """
INSERT INTO idempotency.webhook_attempts (delivery_id, endpoint_id, tenant, redelivery)
SELECT id, endpoint_id, tenant, %(redelivery)s FROM idempotency.webhook_deliveries WHERE id = %(id)s RETURNING id
"""
_ANSWERED = """
UPDATE idempotency.webhook_attempts
SET ended_at = clock_timestamp(), status = %(status)s, error = %(error)s, milliseconds = %(milliseconds)s
WHERE id = %(id)s RETURNING endpoint_id
"""
_FAILS = """
UPDATE idempotency.webhook_endpoints SET failing_since = clock_timestamp() WHERE id = %(id)s AND failing_since IS NULL
"""
_ATTEMPTS = """
SELECT a.delivery_id, d.event_type, a.redelivery, a.begun_at, a.status, a.error, a.milliseconds
FROM idempotency.webhook_attempts a JOIN idempotency.webhook_deliveries d ON d.id = a.delivery_id
WHERE (%(endpoint)s::text IS NULL OR a.endpoint_id = %(endpoint)s)
  AND (%(delivery)s::text IS NULL OR a.delivery_id = %(delivery)s)
ORDER BY a.id DESC LIMIT %(limit)s
"""

_DISABLED_BY_ITSELF = f"""
SELECT id, tenant, disabled_because FROM idempotency.webhook_endpoints
WHERE service = %(service)s AND status = '{DISABLED}' AND disabled_because IN ('{GONE}', '{FAILING}') ORDER BY id LIMIT 100
"""


@dataclass(frozen=True, slots=True)
class Begun:
    """What an attempt needs: `number` is its place among those of this redelivery, from 1."""

    attempt: int
    number: int
    url: str = field(repr=False)
    body: str = field(repr=False)
    secrets: Sequence[str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class NotBegun:
    """No attempt may be made. `because`: why the delivery is given up; None: the endpoint is busy with others."""

    because: str | None


# ---------------------------------------------------------------- endpoints


def add_endpoint(
    connection: Connection, id: str, *, tenant: str, service: str, url: str, events: Sequence[str], secret: str
) -> None:
    """Store a new endpoint, which gets nothing before it is verified."""
    fields = {"id": id, "tenant": tenant, "service": service, "url": url, "events": list(events)}
    connection.exec_driver_sql(_ADD, fields)
    connection.exec_driver_sql(_SIGN_BY, {"endpoint": id, "secret": secret})


def replace_secret(connection: Connection, endpoint: str, secret: str, *, keep: float) -> None:
    """Sign by this secret from now on, and for `keep` seconds also by those before it."""
    connection.exec_driver_sql(_EXPIRE_SECRETS, {"endpoint": endpoint, "keep": keep})
    connection.exec_driver_sql(_FORGET_SECRETS, {"endpoint": endpoint})
    connection.exec_driver_sql(_SIGN_BY, {"endpoint": endpoint, "secret": secret})


def secrets_of(connection: Connection, endpoint: str) -> Sequence[str]:
    """What an endpoint's webhooks are signed with, the newest first."""
    return connection.exec_driver_sql(_SECRETS, {"endpoint": endpoint}).scalars().all()


def endpoints(connection: Connection, service: str, tenant: str | None = None) -> Sequence[Row[Any]]:
    """The endpoints of one tenant or of all; never a secret."""
    return connection.exec_driver_sql(_ENDPOINTS, {"service": service, "tenant": tenant}).all()


def endpoint(connection: Connection, service: str, id: str) -> Row[Any] | None:
    """One endpoint; None if there is none with this id."""
    return connection.exec_driver_sql(_ENDPOINT, {"service": service, "id": id}).one_or_none()


def open_endpoints(connection: Connection, service: str, tenant: str) -> Sequence[Row[Any]]:
    """The tenant's endpoints that get webhooks, and the patterns of their events."""
    return connection.exec_driver_sql(_OPEN, {"service": service, "tenant": tenant}).all()


def enable(connection: Connection, service: str, id: str, *, seen: datetime) -> bool:
    """Enable an endpoint whose last change was `seen`, and forget how it has failed. False: it was disabled since then."""
    fields = {"service": service, "id": id, "status": ENABLED, "because": None, "seen": seen}
    return connection.exec_driver_sql(_ENABLE, fields).rowcount > 0


def disable(connection: Connection, service: str, id: str) -> None:
    """Disable an endpoint for a person."""
    fields = {"service": service, "id": id, "status": DISABLED, "because": BY_PERSON}
    connection.exec_driver_sql(_SET_STATUS, fields)


def disabled_by_itself(connection: Connection, service: str) -> Sequence[Row[Any]]:
    """Endpoints that no person has disabled; at most a hundred."""
    return connection.exec_driver_sql(_DISABLED_BY_ITSELF, {"service": service}).all()


# ---------------------------------------------------------------- deliveries


def add_delivery(
    connection: Connection, id: str, *, tenant: str, service: str, endpoint: str, task: str, event_type: str, body: str
) -> None:
    """Store what is to be delivered; once for each id."""
    fields = {"id": id, "tenant": tenant, "service": service, "endpoint": endpoint, "task": task}
    connection.exec_driver_sql(_ADD_DELIVERY, fields | {"event_type": event_type, "body": body})


def delivery(connection: Connection, service: str, id: str) -> Row[Any] | None:
    """One delivery without its body; None if there is none with this id."""
    return connection.exec_driver_sql(_DELIVERY, {"service": service, "id": id}).one_or_none()


def deliveries(connection: Connection, endpoint: str, *, limit: int) -> Sequence[Row[Any]]:
    """The newest deliveries to an endpoint."""
    return connection.exec_driver_sql(_DELIVERIES, {"endpoint": endpoint, "limit": limit}).all()


def reopen(connection: Connection, service: str, id: str) -> Row[Any] | None:
    """Open a delivery that has ended for a redelivery. None if it has not, or there is none with this id."""
    return connection.exec_driver_sql(_REOPEN, {"service": service, "id": id}).one_or_none()


def delivered(connection: Connection, id: str, redelivery: int) -> None:
    """A delivery was accepted, so its endpoint works."""
    connection.exec_driver_sql(_END, {"id": id, "redelivery": redelivery, "status": "delivered", "because": None})
    connection.exec_driver_sql(_WORKS, {"id": id})


def give_up(connection: Connection, id: str, redelivery: int, because: str) -> None:
    """End a delivery that was not accepted."""
    connection.exec_driver_sql(_END, {"id": id, "redelivery": redelivery, "status": "given_up", "because": because})


def count_given_up(connection: Connection, id: str, *, is_gone: bool, most: int, failing_for: float) -> Row[Any] | None:
    """Note that a delivery's endpoint has not accepted it. Disables the endpoint if it is gone, or has failed so often, for
    so many seconds. Returns its id and why it is disabled, or None for that; None if it was not enabled.
    """
    fields = {"id": id, "gone": is_gone, "most": most, "failing_for": failing_for}
    return connection.exec_driver_sql(_GIVE_UP, fields).one_or_none()


# ---------------------------------------------------------------- attempts


def begin_attempt(connection: Connection, id: str, redelivery: int, *, most: int, longest: float) -> Begun | NotBegun:
    """Note that an attempt begins, before it is made; commit before the POST. `longest`: seconds that one may take."""
    fields = {"id": id, "redelivery": redelivery, "longest": longest, "at_once": AT_ONCE}
    connection.exec_driver_sql(_IN_TURN, fields)
    found = connection.exec_driver_sql(_DUE, fields).one_or_none()
    if found is None or found.status != ENABLED:
        return NotBegun(NO_ENDPOINT)
    if not found.body:
        return NotBegun(ERASED)
    if found.tries >= most:
        return NotBegun(EXHAUSTED)
    if found.is_busy:
        return NotBegun(None)
    attempt = connection.exec_driver_sql(_BEGIN, {"id": id, "redelivery": redelivery}).scalar_one()
    return Begun(attempt, found.tries + 1, found.url, found.body, secrets_of(connection, found.endpoint_id))


def end_attempt(
    connection: Connection, attempt: int, *, status: int | None, error: str | None, milliseconds: int, is_accepted: bool
) -> None:
    """Note what came of an attempt, and since when its endpoint has accepted nothing."""
    fields = {"id": attempt, "status": status, "error": error, "milliseconds": milliseconds}
    endpoint = connection.exec_driver_sql(_ANSWERED, fields).scalar_one_or_none()
    if not is_accepted:
        connection.exec_driver_sql(_FAILS, {"id": endpoint})


def attempts(
    connection: Connection, *, endpoint: str | None = None, delivery: str | None = None, limit: int
) -> Sequence[Row[Any]]:
    """The newest attempts of an endpoint or a delivery."""
    fields = {"endpoint": endpoint, "delivery": delivery, "limit": limit}
    return connection.exec_driver_sql(_ATTEMPTS, fields).all()
