"""An application whose every secret is in its environment, as in production, and whose tasks fail with the values of rows."""

from __future__ import annotations

import os

import psycopg
from celery import Celery
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

from idempotency import IdempotentTask, PermanentError
from idempotency.queues import quorum_queue

INSERT = text("INSERT INTO people (email, age) VALUES (:email, :age)")

app = Celery("vault", config_source="celeryconfig")
app.conf.update(
    task_queues=[quorum_queue(os.environ["VAULT_QUEUE"])],
    task_default_queue=os.environ["VAULT_QUEUE"],
    task_default_routing_key=os.environ["VAULT_QUEUE"],
    task_routes={},
    beat_schedule={},
    result_backend=os.environ["REDIS_URL"],
    task_ignore_result=False,
    worker_send_task_events=True,
    worker_enable_remote_control=True,
    idempotency_retry_base=0.01,
    idempotency_retry_cap=0.02,
    idempotency_unknown_task_grace=0,
    idempotency_sweep=1,
)


@app.task(name="vault.keep", base=IdempotentTask, bind=True, max_attempts=2)
def keep(self: IdempotentTask, email: str, how: str) -> str:
    """Notes a person; `how` says in which way it fails."""
    address = os.environ["DATABASE_URL"]
    match how:
        case "succeeds":
            return email
        case "unique":
            for _ in range(2):
                self.session.execute(INSERT, {"email": email, "age": 1})
        case "check":
            self.session.execute(INSERT, {"email": email, "age": -1})
        case "data":
            self.session.execute(text("SELECT CAST(:email AS int)"), {"email": email})
        case "own engine":  # which hides no parameters
            with create_engine(address).begin() as connection:
                connection.execute(INSERT, {"email": email, "age": -1})
        case "psycopg":
            with psycopg.connect(make_url(address).set(drivername="postgresql").render_as_string(False)) as connection:
                connection.execute("INSERT INTO people (email, age) VALUES (%s, -1)", [email])
        case "wrapped":
            try:
                self.session.execute(INSERT, {"email": email, "age": -1})
            except DBAPIError as error:
                raise ValueError(f"cannot note a person: {error}") from error
        case "permanent":
            try:
                with create_engine(address).begin() as connection:
                    connection.execute(INSERT, {"email": email, "age": -1})
            except DBAPIError as error:
                raise PermanentError(str(error), "no_person") from error
    return "noted"
