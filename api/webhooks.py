"""What payment providers report: `POST /webhooks/stripe`, and `POST /webhooks/payment` for every other one.

Nothing is read or written before the signature over the raw bytes is found valid, but a counter. 200 means that the report
is committed, or was before; whatever else makes the provider send it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Request, Response
from prometheus_client import Counter
from pydantic import SecretStr
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

import celeryconfig
from idempotency import Defer
from idempotency.application import runtime_of
from idempotency.attempt.runtime import Runtime
from idempotency.attempt.tracing import in_trace_of
from idempotency.http.fastapi import as_response
from idempotency.http.problems import Refused, refused
from idempotency.wire.keys import OperationId
from tasks import app, settlement
from tasks.gateway import GatewayError
from tasks.outside import gateway
from tasks.payments import capture_payment
from tasks.reports import STANDARD, STRIPE, Malformed, Report, of_standard, of_stripe
from tasks.signatures import NotSigned, check_standard, check_stripe

from .problems import failure

# Bytes. The largest events of Stripe have some tens of thousands.
LONGEST_BODY = 256 * 1024
# Reports that are settled at once: each takes a thread and a connection, which the other routes need, too.
AT_ONCE = CapacityLimiter(4)
# Reports about which the provider is asked first. A limit of their own, so that a slow provider holds up only these.
ASKING = CapacityLimiter(2)
# Seconds after which a provider that heeds it may try again.
RETRY_AFTER = 5

webhooks = Counter("shop_webhooks", "Webhooks of payment providers", ("gateway", "outcome"))

router = APIRouter(prefix="/webhooks", include_in_schema=False)


@router.post("/stripe")
async def stripe(request: Request) -> Response:
    """A webhook of Stripe."""
    return await _received(STRIPE, request)


@router.post("/payment")
async def payment(request: Request) -> Response:
    """A webhook of another provider, as docs/payment-webhooks.md describes it."""
    return await _received(STANDARD, request)


async def _received(name: str, request: Request) -> Response:
    secrets = _secrets(name)
    if not secrets:
        raise _counted(name, "refused", refused(404, "not_found", "There is no webhook here", "none is set up"))
    body = await _body(name, request)
    try:
        report = _report(name, body, request.headers, secrets)
    except NotSigned as error:
        raise _counted(name, "refused", refused(401, "not_signed", "The signature is not valid", str(error))) from None
    except Malformed as error:
        raise _counted(
            name, "malformed", refused(400, "bad_request", "The event is not as documented", str(error))
        ) from None
    outcome = "ignored"
    if report is not None:
        try:
            outcome = await _outcome(report)
        except (SQLAlchemyError, Defer, GatewayError) as error:
            webhooks.labels(name, "failed").inc()
            answer = as_response(failure(error)) if isinstance(error, SQLAlchemyError) else Response(status_code=503)
            answer.headers["Retry-After"] = str(RETRY_AFTER)
            return answer
    webhooks.labels(name, outcome).inc()
    return Response(status_code=200)


async def _body(name: str, request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LONGEST_BODY:
            too_long = refused(413, "too_large", "The body is too long", f"body: at most {LONGEST_BODY} bytes")
            raise _counted(name, "refused", too_long)
    return body


def _report(name: str, body: bytes, headers: Mapping[str, str], secrets: list[str]) -> Report | None:
    if name == STRIPE:
        check_stripe(body, headers, secrets)
        return of_stripe(body)
    check_standard(body, headers, secrets)
    return of_standard(headers["webhook-id"], body)


async def _outcome(report: Report) -> str:
    """What became of it, once it is committed. Raises `GatewayError`, `SQLAlchemyError` and `Defer`."""
    return await to_thread.run_sync(_settled, await _named(report), limiter=AT_ONCE)


async def _named(report: Report) -> Report:
    """With the payment that it is about. Raises `GatewayError`: a dispute and a change made at the provider's site do not name it."""
    if report.gateway != STRIPE or (report.payment_id is not None and report.object == "charge"):
        return report  # most reports
    if report.payment_id is not None and await to_thread.run_sync(_may_be_ours, report, limiter=AT_ONCE):
        return report
    found = await to_thread.run_sync(gateway.charge, report.charge_id, limiter=ASKING)
    return report if found is None else replace(report, tenant=found.tenant, payment_id=found.name)


def _settled(report: Report) -> str:
    runtime = runtime_of(app)
    with (
        _in_trace_of_payment(runtime, report),
        runtime.transaction(report.tenant) as connection,
        Session(connection) as session,
    ):
        outcome = settlement.settle(session, report)
        session.flush()
    return outcome


def _in_trace_of_payment(runtime: Runtime, report: Report) -> AbstractContextManager[object]:
    """A provider passes no trace on, so what it reports is put into that of the payment, now that its signature is valid."""
    if report.payment_id is None:
        return nullcontext()
    id = OperationId(report.tenant, capture_payment.name, report.payment_id)
    return in_trace_of(runtime, id, "payment webhook")


def _may_be_ours(report: Report) -> bool:
    with runtime_of(app).transaction(report.tenant) as connection, Session(connection) as session:
        return settlement.may_be_ours(session, report)


def _secrets(name: str) -> list[str]:
    settings = celeryconfig.environment
    given: SecretStr = settings.stripe_webhook_secrets if name == STRIPE else settings.payment_webhook_secrets
    return [secret for each in given.get_secret_value().split(",") if (secret := each.strip())]


def _counted(name: str, outcome: str, error: Refused) -> Refused:
    webhooks.labels(name, outcome).inc()
    return error
