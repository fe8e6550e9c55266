"""What tenants submit. Business row, message and answer are one commit: the session is that of the request's attempt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request, Response

from idempotency.http.fastapi import AttemptSession, CurrentAttempt
from idempotency.http.problems import refused
from idempotency.wire.keys import OperationId
from tasks.checkout import submit_order
from tasks.payments import capture_payment, submit_payment
from tasks.refunds import submit_refund
from tasks.returns import submit_return
from tasks.validation import NotReturnable, Taken

from .callers import root_of
from .operations import address
from .problems import documented
from .schemas import Accepted, AcceptedOrder, NewOrder, NewPayment, NewRefund, NewReturn

KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": True,
    "description": "Names the operation: a new one for each, the same when it is repeated.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!#-+.-~]+$"},
}
PREFER = {
    "name": "Prefer",
    "in": "header",
    "required": False,
    "description": "wait=n: wait up to n seconds, at most 30, for the end of the work, and answer 200 with it.",
    "schema": {"type": "string", "examples": ["wait=10"]},
}
KEYED: dict[str, Any] = {
    "status_code": 202,
    "responses": {
        200: {"description": "With `Prefer: wait=n`: the operation has ended. The schema is that of GET /operations"},
        **documented(400, 401, 403, 409, 413, 415, 422, 429, 500, 503),
    },
    "openapi_extra": {"parameters": [KEY, PREFER]},
}

router = APIRouter()


@router.post("/payments", summary="Charge a customer once", **KEYED)
def create_payment(
    payment: NewPayment, attempt: CurrentAttempt, session: AttemptSession, request: Request, response: Response
) -> Accepted:
    """The key is the payment's id. The work goes on: Location says where to ask for its end."""
    with _refused_if_taken("Idempotency-Key: is the id of another payment"):
        handle = submit_payment(session, tenant=attempt.tenant, payment_id=attempt.key, **payment.model_dump())
    return Accepted(id=handle.id.key, operation=_located(request, response, handle.id))


@router.post("/refunds", summary="Refund a payment, whole or in part, once", **KEYED)
def create_refund(
    refund: NewRefund, attempt: CurrentAttempt, session: AttemptSession, request: Request, response: Response
) -> Accepted:
    """The key is the refund's id. Whether enough is left to refund is decided by the operation, not by this answer."""
    with _refused_if_taken("Idempotency-Key: is the id of another refund"):
        handle = submit_refund(session, tenant=attempt.tenant, refund_id=attempt.key, **refund.model_dump())
    return Accepted(id=handle.id.key, operation=_located(request, response, handle.id))


@router.post(
    "/orders", summary="Order what a checkout session contains, once", response_model_exclude_none=True, **KEYED
)
def create_order(
    order: NewOrder, attempt: CurrentAttempt, session: AttemptSession, request: Request, response: Response
) -> AcceptedOrder:
    """One order and one payment for each checkout session, even if the requests for it have different keys.

    Services place it one after another, each by an event: the operation is its payment's, which ends in any case.
    """
    with _refused_if_taken("checkout_session_id: has an order for another customer, amount or article"):
        found = submit_order(session, tenant=attempt.tenant, **order.model_dump())
    payment = OperationId(attempt.tenant, capture_payment.name, found.order_id)
    return AcceptedOrder(id=found.order_id, operation=_located(request, response, payment), **order.model_dump())


@router.post("/returns", summary="Take an order back, once", **KEYED)
def create_return(
    wanted: NewReturn, attempt: CurrentAttempt, session: AttemptSession, request: Request, response: Response
) -> Accepted:
    """The key is the return's id. Its label comes by e-mail; the operation is a saga, which ends weeks later."""
    try:
        with _refused_if_taken("Idempotency-Key: is the id of another return"):
            handle = submit_return(session, tenant=attempt.tenant, return_id=attempt.key, **wanted.model_dump())
    except NotReturnable as error:
        raise refused(409, "not_returnable", "This order cannot be returned", str(error)) from None
    return Accepted(id=handle.id.key, operation=_located(request, response, handle.id))


def _located(request: Request, response: Response, id: OperationId) -> str:
    where = response.headers["Location"] = f"{root_of(request.scope)}{address(id)}"
    return where


@contextmanager
def _refused_if_taken(detail: str) -> Iterator[None]:
    try:
        yield
    except Taken:
        raise refused(409, "already_used", "This was used before, for something else", detail) from None
