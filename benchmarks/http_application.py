"""One endpoint, plain and behind the middleware: a row, and its commit."""

from __future__ import annotations

import os
from typing import Annotated

from fastapi import Body, FastAPI
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from idempotency.attempt.runtime import Runtime
from idempotency.http import IdempotencyMiddleware
from idempotency.http.fastapi import AttemptSession
from idempotency.settings import Settings

INSERT = text("INSERT INTO jobs (job, number) VALUES (:job, :number)")

settings = Settings.read({"database_url": os.environ["DATABASE_URL"]})
engine = create_engine(os.environ["DATABASE_URL"], pool_size=settings.pool_size, max_overflow=settings.pool_size)

plain = FastAPI()
keyed = FastAPI()
keyed.add_middleware(IdempotencyMiddleware, runtime=Runtime(settings), required=True)


@plain.post("/jobs", status_code=201)
def write(number: Annotated[int, Body(embed=True)]) -> dict[str, int]:
    with Session(engine) as session, session.begin():
        session.execute(INSERT, {"job": "plain", "number": number})
    return {"number": number}


@keyed.post("/jobs", status_code=201)
def write_once(number: Annotated[int, Body(embed=True)], session: AttemptSession) -> dict[str, int]:
    session.execute(INSERT, {"job": "http", "number": number})
    return {"number": number}
