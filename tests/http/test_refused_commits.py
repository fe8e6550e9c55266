"""What Postgres refuses at the end of a handler is the handler's own error: 500, and due at once; never an outage."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from idempotency.http.fastapi import AttemptSession, CurrentAttempt
from tests.http.test_handlers import fast, post
from tests.support.edge import INSERT, Edge, new_key


@pytest.fixture(scope="module")
def tables(edge: Edge) -> None:
    with edge.engine.connect() as connection:
        connection.execute(text("CREATE TABLE seats (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
        connection.execute(text("INSERT INTO seats VALUES (1)"))
        connection.execute(text("CREATE TABLE customers (id int PRIMARY KEY)"))
        connection.execute(text("INSERT INTO customers VALUES (1)"))


def application(edge: Edge) -> FastAPI:
    app = fast(edge)

    @app.post("/deferred")
    def deferred(session: AttemptSession, attempt: CurrentAttempt) -> None:
        session.execute(INSERT, {"account": attempt.key})
        session.execute(text("INSERT INTO seats VALUES (1)"))

    @app.post("/caught")
    def caught(session: AttemptSession, attempt: CurrentAttempt) -> dict[str, bool]:
        session.execute(INSERT, {"account": attempt.key})
        try:
            session.execute(text("INSERT INTO customers VALUES (1)"))
        except IntegrityError:
            return {"existed": True}
        return {"existed": False}

    @app.post("/nested")
    def nested(session: AttemptSession, attempt: CurrentAttempt) -> dict[str, bool]:
        session.execute(INSERT, {"account": attempt.key})
        try:
            with session.begin_nested():
                session.execute(text("INSERT INTO customers VALUES (1)"))
        except IntegrityError:
            return {"existed": True}
        return {"existed": False}

    return app


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    ("path", "status", "record", "error", "entries"),
    [
        ("/deferred", 500, "released", "IntegrityError", 0),  # which only COMMIT finds
        ("/caught", 500, "released", "SessionNotYours", 0),  # its transaction is lost, and the handler has gone on
        ("/nested", 200, "completed", "", 1),
    ],
)
def test_a_commit_that_postgres_refuses_is_the_handlers_error(
    edge: Edge, path: str, status: int, record: str, error: str, entries: int
) -> None:
    key = new_key()
    first, second = post(application(edge), key, path, times=2)  # the second is not told to wait
    assert (first.status_code, second.status_code) == (status, status)
    found: Any = edge.record(key)
    assert (found.status, edge.entries(key)) == (record, entries)
    assert error in (found.error or "")
