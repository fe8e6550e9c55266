"""A FastAPI application behind the middleware, for server processes of their own.

The environment names its database (DATABASE_URL), its provider (OUTSIDE_URL), its lease, and where its crash points are armed (CRASH_DIRECTORY).
"""

from __future__ import annotations

import os

import httpx
from fastapi import FastAPI
from pydantic import BaseModel

from idempotency.attempt.runtime import Runtime
from idempotency.attempt.session import AttemptSession
from idempotency.http import IdempotencyMiddleware
from idempotency.http.fastapi import CurrentAttempt
from idempotency.settings import Settings
from tests.support import crashing
from tests.support.edge import INSERT

crashing.install()
lease = float(os.environ.get("LEASE", "60"))
runtime = Runtime(Settings.read({"database_url": os.environ["DATABASE_URL"], "lease": lease, "heartbeat": lease / 3}))
app = FastAPI()
app.add_middleware(IdempotencyMiddleware, runtime=runtime, required=True)


class Payment(BaseModel):
    account: str


def charge(account: str, *, idempotency_key: str) -> str:
    """A provider that acts once per key, as a test's outside world does."""
    httpx.post(os.environ["OUTSIDE_URL"], headers={"Idempotency-Key": idempotency_key}, timeout=30).raise_for_status()
    return account


def reserve(session: AttemptSession, account: str) -> str:
    session.execute(INSERT, {"account": f"{account}/step"})
    return account


@app.post("/payments", status_code=201)
def pay(payment: Payment, attempt: CurrentAttempt) -> dict[str, str]:
    attempt.step("reserve", reserve, payment.account)
    charged: str = attempt.effect("charge", charge, payment.account)
    attempt.session.execute(INSERT, {"account": payment.account})
    return {"charged": charged, "process": str(os.getpid())}


@app.post("/entries", status_code=201)
async def write(payment: Payment, attempt: CurrentAttempt) -> dict[str, str]:
    await attempt.run_sync(lambda session: session.execute(INSERT, {"account": payment.account}))
    return {"account": payment.account, "process": str(os.getpid())}
