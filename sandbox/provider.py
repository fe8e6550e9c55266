"""The payment provider: the part of Stripe's HTTP API that `tasks.gateway` uses, with faults on request.

One process with one event loop and one connection to the ledger. No transaction contains an await, so none overlap. The
only state in memory is the set of keys that are being executed.
"""

import asyncio
import json
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sandbox import answers, ledger, payments
from sandbox.events import Outgoing, Webhooks
from sandbox.faults import FaultPlan
from sandbox.payments import Answer, ApiError, invalid

# Not a secret: the sandbox holds no money.
API_KEY = "sk_test_sandbox"
RETRY_AFTER_SECONDS = 1
# Seconds between two looks at what is to be decided.
DECISIONS_PAUSE = 0.05

T = TypeVar("T", payments.NewPaymentIntent, payments.NewRefund)
Handler = Callable[[Request], Awaitable[Response]]


def application(
    directory: Path, *, api_key: str = API_KEY, plan: FaultPlan | None = None, webhooks: Webhooks | None = None
) -> Starlette:
    """Create the provider, with its ledger in `directory`. With `webhooks` it tells what becomes of charges and refunds."""
    return _Provider(ledger.open_provider(directory), api_key, plan or FaultPlan(), webhooks).application()


class _Provider:
    def __init__(self, db: sqlite3.Connection, api_key: str, plan: FaultPlan, webhooks: Webhooks | None) -> None:
        self._db = db
        self._events = None if webhooks is None else Outgoing(db, webhooks)
        self._authorization = f"Bearer {api_key}"
        self._plan = plan
        self._executing: set[str] = set()

    def application(self) -> Starlette:
        api = "/v1/payment_intents", "/v1/refunds"
        return Starlette(
            routes=[
                self._route("POST", api[0], self._create_payment_intent),
                self._route("GET", api[0], self._list_payment_intents),
                self._route("GET", api[0] + "/search", self._search_payment_intents),
                self._route("GET", api[0] + "/{id}", self._get_payment_intent),
                self._route("POST", api[1], self._create_refund),
                self._route("GET", api[1], self._list_refunds),
                self._route("GET", api[1] + "/{id}", self._get_refund),
                Route("/_sandbox/faults", self._set_faults, methods=["POST"]),
                Route("/_sandbox/requests", self._requests, methods=["GET"]),
                Route("/_sandbox/disputes", self._dispute, methods=["POST"]),
                Route("/_sandbox/health", self._health, methods=["GET"]),
            ],
            exception_handlers={404: _no_such_url, 405: _no_such_url},
            lifespan=self._background,
        )

    @asynccontextmanager
    async def _background(self, _: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._decide())]
        if self._events is not None:
            tasks.append(asyncio.create_task(self._events.send()))
        yield
        for task in tasks:
            task.cancel()

    async def _decide(self) -> None:
        """Decide what was accepted, when its time has come."""
        while True:
            now = time.time()
            with ledger.transaction(self._db):
                for intent in payments.decide_payment_intents(self._db, now):
                    self._tell_of_intent(intent, now)
                for refund in payments.decide_refunds(self._db, now):
                    self._tell("refund.failed", refund, now)
            await asyncio.sleep(DECISIONS_PAUSE)

    def _tell_of_intent(self, intent: dict[str, Any], now: float) -> None:
        kind = {payments.CHARGED: "succeeded", payments.DECLINED: "payment_failed"}.get(intent["status"], "processing")
        self._tell(f"payment_intent.{kind}", intent, now)

    def _tell(self, event_type: str, thing: dict[str, Any], now: float) -> None:
        if self._events is not None:
            self._events.add(event_type, thing, now)

    def _route(self, method: str, path: str, handler: Handler) -> Route:
        endpoint = f"{method} {path}"

        async def answer(request: Request) -> Response:
            request.state.endpoint = endpoint
            request.state.id = f"req_{secrets.token_hex(7)}"
            idempotency_key = request.headers.get("idempotency-key", "") if method == "POST" else ""
            try:
                if not secrets.compare_digest(
                    request.headers.get("authorization", "").encode(), self._authorization.encode()
                ):
                    raise ApiError(401, "invalid_request_error", "Invalid API Key provided.")
                answers.check_key(idempotency_key)
                self._count(endpoint, idempotency_key)
                response = await handler(request)
            except ApiError as error:
                response = _json(Answer.error(error))
                if error.status == 429:
                    response.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
            response.headers["Request-Id"] = request.state.id
            if idempotency_key.isascii() and idempotency_key:
                response.headers["Idempotency-Key"] = idempotency_key
            return response

        return Route(path, answer, methods=[method])

    # the API

    async def _create_payment_intent(self, request: Request) -> Response:
        return await self._post(
            request,
            payments.NewPaymentIntent.parse,
            self._new_payment_intent,
        )

    def _new_payment_intent(self, new: payments.NewPaymentIntent, key: str, now: float, fault: str | None) -> Answer:
        undecided_for = self._plan.decides_after(key, new.metadata)
        answer = payments.create_payment_intent(
            self._db, new, key, now, decline=fault == "declined", undecided_for=undecided_for
        )
        document = json.loads(answer.body)
        intent = document.get("error", {}).get("payment_intent", document)
        if intent.get("object") == "payment_intent":
            self._tell_of_intent(intent, now)
        return answer

    def _new_refund(self, new: payments.NewRefund, key: str, now: float, fault: str | None) -> Answer:
        fails_after = self._plan.decision_ms / 1000 if fault == "refund_fails" else None
        answer = payments.create_refund(self._db, new, key, now, fails_after=fails_after)
        refund = json.loads(answer.body)
        if refund.get("object") == "refund":
            self._tell("refund.created", refund, now)
        return answer

    async def _list_payment_intents(self, request: Request) -> Response:
        return _json(Answer.of(payments.list_payment_intents(self._db, request.query_params)))

    async def _create_refund(self, request: Request) -> Response:
        return await self._post(
            request,
            payments.NewRefund.parse,
            self._new_refund,
        )

    async def _get_payment_intent(self, request: Request) -> Response:
        return _json(Answer.of(payments.get_payment_intent(self._db, request.path_params["id"])))

    async def _get_refund(self, request: Request) -> Response:
        return _json(Answer.of(payments.get_refund(self._db, request.path_params["id"])))

    async def _list_refunds(self, request: Request) -> Response:
        return _json(Answer.of(payments.list_refunds(self._db, request.query_params)))

    async def _search_payment_intents(self, request: Request) -> Response:
        visible_before = time.time() - self._plan.search_lag_ms / 1000
        return _json(Answer.of(payments.search_payment_intents(self._db, request.query_params, visible_before)))

    async def _post(
        self,
        request: Request,
        parse: Callable[[dict[str, str]], T],
        execute: Callable[[T, str, float, str | None], Answer],
    ) -> Response:
        endpoint: str = request.state.endpoint
        key = request.headers.get("idempotency-key", "")
        form = _form(await request.body())
        parameters = answers.fingerprint(form)
        if key in self._executing:
            raise answers.in_progress()
        if key and (stored := answers.find(self._db, key, endpoint, parameters, time.time())):
            return _json(stored.answer, {"Idempotent-Replayed": "true", "Original-Request": stored.request_id})
        new = parse(form)
        fault = self._fault(endpoint, key, new.metadata)
        if fault == "rate_limited":
            raise ApiError(429, "invalid_request_error", "Too many requests.", code="rate_limit")

        if key:
            self._executing.add(key)
        try:
            if self._plan.latency_ms:
                await asyncio.sleep(self._plan.latency_ms / 1000)
            with ledger.transaction(self._db):
                now = time.time()
                if fault != "error_500_before":
                    answer = execute(new, key, now, fault)
                if fault in ("error_500_before", "error_500_after"):
                    answer = Answer.error(ApiError(500, "api_error", "An unknown error occurred."))
                if key:
                    stored = answers.Stored(answer, request.state.id)
                    answers.store(self._db, key, endpoint, parameters, stored, now)
        finally:
            self._executing.discard(key)
        return NoAnswer(self._plan.hold_ms / 1000) if fault == "timeout_after" else _json(answer)

    def _fault(self, endpoint: str, key: str, metadata: dict[str, str]) -> str | None:
        queued = self._plan.take(metadata)
        if queued is not None:
            ledger.inject_once(self._db, queued, key)
            return queued
        for fault in self._plan.planned(key, metadata):
            if fault == "declined":
                # Depends on the purchase, so it is declined under every key. Refunds are never declined.
                if endpoint == "POST /v1/payment_intents":
                    ledger.inject_once(self._db, fault, metadata["purchase_id"])
                    return fault
            elif fault == "refund_fails" and endpoint != "POST /v1/refunds":
                continue
            elif ledger.inject_once(self._db, fault, key):
                return fault
        return None

    def _count(self, endpoint: str, key: str) -> None:
        self._db.execute(
            "INSERT INTO calls VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET count = count + 1", (endpoint, key)
        )

    # the sandbox's own controls

    async def _set_faults(self, request: Request) -> Response:
        """Queue single faults ("next") or replace the plan ("rates", "seed", times)."""
        try:
            self._plan = self._plan.changed(await request.json())
        except (ValueError, TypeError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        return JSONResponse({"queued": [queued.fault for queued in self._plan.queued]})

    async def _requests(self, request: Request) -> Response:
        """Counts of calls per endpoint, per key (at least `at_least`), and of injected faults."""
        at_least = request.query_params.get("at_least", "1")
        if not at_least.isdecimal():
            return JSONResponse({"error": "at_least must be a whole number"}, status_code=400)
        return JSONResponse(
            {
                "endpoints": dict(
                    self._db.execute("SELECT endpoint, sum(count) FROM calls GROUP BY endpoint ORDER BY endpoint")
                ),
                "keys": dict(
                    self._db.execute(
                        "SELECT idempotency_key, sum(count) AS called FROM calls WHERE idempotency_key != ''"
                        " GROUP BY idempotency_key HAVING called >= ?",
                        (int(at_least),),
                    )
                ),
                "faults": dict(self._db.execute("SELECT fault, count(*) FROM injected GROUP BY fault")),
            }
        )

    async def _dispute(self, request: Request) -> Response:
        """The customer disputes a charge, or its dispute has another status: `payment_intent`, `status`, `id`."""
        wanted = await request.json()
        intent = payments.get_payment_intent(self._db, wanted["payment_intent"])
        dispute = {
            "object": "dispute",
            "reason": "fraudulent",
            "amount": intent["amount"],
            "currency": intent["currency"],
        }
        with ledger.transaction(self._db):
            self._tell("charge.dispute.updated", wanted | dispute, time.time())
        return JSONResponse({})

    async def _health(self, _: Request) -> Response:
        self._db.execute("SELECT 1")
        return JSONResponse({"status": "ok"})


class NoAnswer(Response):
    """Keep the client waiting until it disconnects or for `hold` seconds, then cut the connection."""

    def __init__(self, hold: float) -> None:
        super().__init__()
        self._hold = hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Cancelled when the sandbox stops.
        with suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(self._hold):
                while (await receive())["type"] != "http.disconnect":
                    pass
        # ASGI cannot cut a connection, but the server does so if an announced body is missing.
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})


def _json(answer: Answer, headers: dict[str, str] | None = None) -> Response:
    return Response(answer.body, answer.status, headers, media_type="application/json")


def _form(body: bytes) -> dict[str, str]:
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=200))
    except ValueError:
        raise invalid("The body must be at most 200 form-encoded fields in UTF-8.") from None


async def _no_such_url(request: Request, _: Exception) -> Response:
    return _json(Answer.error(invalid(f"Unrecognized request URL ({request.method}: {request.url.path}).", status=404)))
