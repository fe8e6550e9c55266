"""Celery's requests as deliveries: the operation that one names, and the fingerprint that it was accepted under."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from celery.utils.time import maybe_iso8601, maybe_make_aware

from ..application import runtime_of
from ..attempt.attempt import Attempt
from ..attempt.runtime import Runtime
from ..errors import FingerprintMismatch, PermanentError, ServiceMismatch
from ..store import claims, letters
from ..store.answers import error_text
from ..wire import keys
from ..wire.delivery import Delivery
from ..wire.headers import ETA_HEADER, FINGERPRINT_HEADER, ORIGIN_HEADER, REVOKED_HEADER
from ..wire.message import Message
from ..wire.signing import claimed_at

if TYPE_CHECKING:
    from .calls import KeyedTask


@dataclass(frozen=True, slots=True)
class Returned:
    """Celery sees a value."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """Celery sees an exception."""

    error: BaseException


def attempt_of(request: Any) -> Attempt | None:
    """The attempt whose body this request is for at the moment. A header of that name is only text."""
    attempt = getattr(request, "attempt", None)
    return attempt if isinstance(attempt, Attempt) else None


def delivery_of(task: KeyedTask, request: Any) -> Delivery:
    """A request to this task as a delivery, whichever cell its tenant is of. Raises `CallRefused` if it names no operation."""
    headers = request.headers or {}
    args, kwargs = request.args or (), request.kwargs or {}
    named = task.named_anywhere(args, kwargs, headers)
    # every later delivery is for this operation, whatever its key is made from
    message = Message.delivered(request).naming(named.id)
    if request.is_eager:
        # if this process dies, a worker goes on with it
        message = message.routed(task.app, task.name, args, kwargs)
    # by the rule of the message, so that the record agrees with the outbox row it came from
    fingerprint, *also = keys.fingerprints(named.arguments, headers.get(FINGERPRINT_HEADER))
    return Delivery(
        id=named.id,
        fingerprint=fingerprint,
        also=also,
        arguments=named.arguments,
        task_id=request.id,
        message=message.to_text(),
        headers=headers,
        queue=message.queue(task.app),
        resent=ORIGIN_HEADER in headers or bool((request.delivery_info or {}).get("redelivered")),
        is_eager=bool(request.is_eager),
        is_revoked=REVOKED_HEADER in headers,
        # its worker has checked the signature; without secrets anybody can have written it
        signed_at=claimed_at(headers) if runtime_of(task.app).settings.message_secrets else None,
        eta=maybe_make_aware(maybe_iso8601(headers[ETA_HEADER])) if headers.get(ETA_HEADER) else None,
    )


def is_under_another(delivery: Delivery) -> bool:
    """Whether its message names another fingerprint than its arguments have by now."""
    given = delivery.headers.get(FINGERPRINT_HEADER)
    return given not in (None, delivery.fingerprint, *delivery.also) and keys.is_fingerprint(given)


def as_accepted(runtime: Runtime, delivery: Delivery) -> Delivery:
    """The delivery under the other fingerprint, if it was accepted with that: a deploy has renamed parameters since.

    The message's header alone proves nothing: the same body must be stored under that fingerprint.
    """
    given, computed = delivery.headers.get(FINGERPRINT_HEADER), [delivery.fingerprint, *delivery.also]
    body = Message.from_text(delivery.message).body
    with runtime.autocommit(delivery.id.tenant) as connection:
        if not claims.is_accepted(connection, delivery.id, str(given), body):
            return delivery
    return replace(delivery, fingerprint=str(given), also=computed)


def is_anothers(runtime: Runtime, delivery: Delivery) -> bool:
    """Whether this delivery is a mere duplicate: the operation runs or was accepted under another task id."""
    with runtime.autocommit(delivery.id.tenant) as connection:
        service = runtime.settings.service
        also = delivery.also
        return claims.is_anothers(
            connection, delivery.id, delivery.fingerprint, delivery.task_id, service=service, also=also
        )


def store_refusal(
    runtime: Runtime,
    delivery: Delivery,
    generation: int,
    error: FingerprintMismatch | ServiceMismatch | PermanentError,
) -> None:
    """Keep a request under a key that another one has used, or what cannot be sent after its end, as a dead letter."""
    with runtime.autocommit(delivery.id.tenant) as connection:
        letters.store_refusal(
            connection,
            delivery,
            generation=generation,
            reason=error.code,
            error=error_text(error.code, str(error)),
            service=runtime.settings.service,
        )
