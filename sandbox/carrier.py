"""The carrier: an HTTP server that makes labels under idempotency keys, voids them, and finds them by their key.

    POST /v1/labels                        {"reference", "kind", ...} → 201, or 422 with a code; stored under the key
    GET  /v1/labels?idempotency_key=…      what was made under a key
    GET  /v1/labels/{id}
    POST /v1/labels/{id}/void              the label as it is then: voided, or collected
    POST /v1/labels/{id}/collect           the driver takes the parcel: collected, or voided if that came first

Faults are those of the provider, and decided in the same way; a label is refused for its `reference`. As in the provider,
no transaction contains an await.
"""

import asyncio
import json
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sandbox import answers, ledger
from sandbox.faults import CARRIER_FAULTS, FaultPlan
from sandbox.payments import Answer, ApiError
from sandbox.provider import RETRY_AFTER_SECONDS, NoAnswer

CREATED, VOIDED, COLLECTED = "created", "voided", "collected"
REFUSED = "address_not_served"


def application(directory: Path, *, plan: FaultPlan | None = None) -> Starlette:
    """Create the carrier, with its ledger in `directory`."""
    return _Carrier(ledger.open_carrier(directory), plan or FaultPlan(known=CARRIER_FAULTS)).application()


class _Carrier:
    def __init__(self, db: sqlite3.Connection, plan: FaultPlan) -> None:
        self._db = db
        self._plan = plan
        self._executing: set[str] = set()

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/labels", self._answered(self._create), methods=["POST"]),
                Route("/v1/labels", self._answered(self._find), methods=["GET"]),
                Route("/v1/labels/{id}", self._answered(self._get), methods=["GET"]),
                Route("/v1/labels/{id}/void", self._answered(self._void), methods=["POST"]),
                Route("/v1/labels/{id}/collect", self._answered(self._collect), methods=["POST"]),
                Route("/_sandbox/faults", self._set_faults, methods=["POST"]),
                Route("/_sandbox/health", self._health, methods=["GET"]),
            ]
        )

    def _answered(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except ApiError as error:
                headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if error.status == 429 else None
                return _response(Answer.error(error), headers)

        return answer

    async def _create(self, request: Request) -> Response:
        wanted, key = await _object(request), request.headers.get("idempotency-key", "")
        reference, kind = wanted.get("reference"), wanted.get("kind")
        if not key or not isinstance(reference, str) or not isinstance(kind, str):
            raise _invalid("needs an Idempotency-Key, a reference and a kind")
        answers.check_key(key)
        parameters = answers.fingerprint({name: str(value) for name, value in wanted.items()})
        if key in self._executing:
            raise answers.in_progress()
        if stored := answers.find(self._db, key, "POST /v1/labels", parameters, time.time()):
            return _response(stored.answer, {"Idempotent-Replayed": "true"})
        fault = self._fault(key, {"reference": reference, "kind": kind})
        if fault == "rate_limited":
            raise ApiError(429, "rate_limited", "Too many requests.", code="rate_limited")

        self._executing.add(key)
        try:
            if self._plan.latency_ms:
                await asyncio.sleep(self._plan.latency_ms / 1000)
            with ledger.transaction(self._db):
                now = time.time()
                if fault == "label_refused":
                    answer = Answer.error(ApiError(422, "refused", "Nobody delivers there.", code=REFUSED))
                elif fault != "error_500_before":
                    answer = self._make(reference, kind, key, wanted, now)
                if fault in ("error_500_before", "error_500_after"):
                    answer = Answer.error(ApiError(500, "api_error", "An unknown error occurred."))
                stored = answers.Stored(answer, secrets.token_hex(7))
                answers.store(self._db, key, "POST /v1/labels", parameters, stored, now)
        finally:
            self._executing.discard(key)
        return NoAnswer(self._plan.hold_ms / 1000) if fault == "timeout_after" else _response(answer)

    def _make(self, reference: str, kind: str, key: str, wanted: dict[str, Any], now: float) -> Answer:
        id = f"lbl_{secrets.token_hex(8)}"
        self._db.execute(
            "INSERT INTO labels (id, reference, kind, idempotency_key, metadata, created) VALUES (?, ?, ?, ?, ?, ?)",
            (id, reference, kind, key, json.dumps(wanted), now),
        )
        return Answer.of({"id": id, "status": CREATED}, 201)

    async def _find(self, request: Request) -> Response:
        key = request.query_params.get("idempotency_key", "")
        ids = self._db.execute("SELECT id FROM labels WHERE idempotency_key = ? ORDER BY seq", (key,)).fetchall()
        return JSONResponse({"labels": [self._label(id) for (id,) in ids]})

    async def _get(self, request: Request) -> Response:
        return JSONResponse(self._label(request.path_params["id"]))

    async def _void(self, request: Request) -> Response:
        return self._become(request.path_params["id"], VOIDED)

    async def _collect(self, request: Request) -> Response:
        return self._become(request.path_params["id"], COLLECTED)

    def _become(self, id: str, status: str) -> Response:
        """Voided or collected, whichever comes first; once. Saying it again changes nothing."""
        if self._label(id)["status"] == CREATED:
            self._db.execute(
                "INSERT INTO label_ends (label_id, status, created) VALUES (?, ?, ?)", (id, status, time.time())
            )
        return JSONResponse(self._label(id))

    def _label(self, id: str) -> dict[str, str]:
        row = self._db.execute(
            "SELECT coalesce(e.status, 'created') FROM labels l LEFT JOIN label_ends e ON e.label_id = l.id WHERE l.id = ?",
            (id,),
        ).fetchone()
        if row is None:
            raise ApiError(404, "not_found", "There is no such label.", code="not_found")
        return {"id": id, "status": row[0]}

    def _fault(self, key: str, about: dict[str, str]) -> str | None:
        queued = self._plan.take(about)
        if queued is not None:
            ledger.inject_once(self._db, queued, key)
            return queued
        for fault in self._plan.planned(key, about):
            identity = about["reference"] if fault == "label_refused" else key
            is_first = ledger.inject_once(self._db, fault, identity)
            if is_first or fault == "label_refused":
                return fault
        return None

    # the sandbox's own controls

    async def _set_faults(self, request: Request) -> Response:
        """Queue single faults ("next") or replace the plan ("rates", "seed", times)."""
        try:
            self._plan = self._plan.changed(await request.json())
        except (ValueError, TypeError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        return JSONResponse({"queued": [queued.fault for queued in self._plan.queued]})

    async def _health(self, _: Request) -> Response:
        self._db.execute("SELECT 1")
        return JSONResponse({"status": "ok"})


async def _object(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise _invalid("the body must be a JSON object")
    return body


def _invalid(message: str) -> ApiError:
    return ApiError(400, "invalid_request", message, code="invalid_request")


def _response(answer: Answer, headers: dict[str, str] | None = None) -> Response:
    return Response(answer.body, answer.status, headers, media_type="application/json")
