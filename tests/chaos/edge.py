"""The application under chaos over HTTP: `uvicorn tests.chaos.edge:app`, behind the middleware.

A deposit writes its row, accepts itself and a task that goes on under the request's number, and enqueues that task: all
in the attempt's session. Some deposits are refused after that, some servers fail each of them once, and some pay first.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy.orm import Session

from idempotency.application import runtime_of
from idempotency.errors import StoredRefusal
from idempotency.http import IdempotencyMiddleware
from idempotency.http.asgi import Scope
from idempotency.http.attempt import RequestAttempt
from idempotency.http.fastapi import CurrentAttempt
from tests.chaos import application
from tests.chaos.evidence import EDGE
from tests.support import crashing

TENANT_HEADER = "x-tenant"
# What becomes of a deposit; answered 201 unless it is refused.
Kind = Literal["plain", "paid", "refused", "broken"]
REFUSAL = 422
# What a paid one is answered if the provider has refused it for good.
DECLINED = 402
# Below the directory of all processes' crash points: what is planned there is for these servers.
CRASHES = "edge"


class Deposit(BaseModel):
    kind: Kind
    account: str
    amount: int
    # of the provider
    url: str


def work(attempt: RequestAttempt, session: Session, deposit: Deposit) -> dict[str, Any]:
    """What a deposit does, in the attempt's thread or in a thread of the framework."""
    if deposit.kind == "paid":
        url = f"{deposit.url}/steady"
        try:
            attempt.effect("pay", application.pay, url, deposit.amount, reconcile=application.find)
        except StoredRefusal as refusal:  # of a key that it has closed; raised, it would be raised again without end
            raise HTTPException(DECLINED, refusal.code) from None
    row: dict[str, Any] = {"account": deposit.account, "amount": deposit.amount}
    session.execute(application.INSERT, row)
    application.accept(session, tenant=attempt.tenant, task=EDGE, key=attempt.key, **row)
    task, further = application.deposit, row | {"account": f"{deposit.account}/task"}
    application.accept(session, tenant=attempt.tenant, task=task.name, key=attempt.key, **further)
    task.enqueue(session, number=attempt.key, **further, tenant=attempt.tenant)
    # of this attempt alone, so that its answer is like no other attempt's
    mark = secrets.token_hex(8)
    if deposit.kind == "refused":
        raise HTTPException(REFUSAL, f"no such account, says {mark}")
    if deposit.kind == "broken" and (key := (attempt.tenant, attempt.key)) not in _failed:
        _failed.add(key)
        if len(_failed) % 2:
            raise ConnectionError("not yet")
        raise HTTPException(500, "not yet")
    # An attempt that is stopped here past the lease goes on to a finish that must match nothing.
    crashing.reach("body.done")
    return row | {"attempt": mark}


# What this server has failed once.
_failed: set[tuple[str, str]] = set()


def tenant_of(scope: Scope) -> str:
    """The tenant that a request names."""
    return str(dict(scope["headers"])[TENANT_HEADER.encode()], "ascii")


app = FastAPI()
app.add_middleware(IdempotencyMiddleware, runtime=lambda: runtime_of(application.app), tenant=tenant_of, required=True)


@app.post("/deposits", status_code=201)
def deposit(given: Deposit, attempt: CurrentAttempt) -> dict[str, Any]:
    return work(attempt, attempt.session, given)


@app.post("/async/deposits", status_code=201)
async def deposit_asynchronously(given: Deposit, attempt: CurrentAttempt) -> dict[str, Any]:
    return await attempt.run_sync(lambda session: work(attempt, session, given))


if "CHAOS_QUEUE" in os.environ:
    os.environ["CRASH_DIRECTORY"] = str(Path(os.environ["CRASH_DIRECTORY"]) / CRASHES)
