"""The job as a task of Procrastinate, which keeps its queue in the same Postgres. Its command line starts workers of `app`."""

from __future__ import annotations

import os
from typing import Any

from procrastinate import App, PsycopgConnector
from sqlalchemy.orm import Session

from ..jobs import INSERT, engine

QUEUE = "jobs"


def address() -> str:
    """The address of Postgres, as libpq has it."""
    return os.environ.get("DATABASE_URL", "").replace("+psycopg", "", 1)


app = App(connector=PsycopgConnector(conninfo=address()))


@app.task(queue=QUEUE)
def insert(number: int) -> Any:
    """The job itself, as in `jobs.plain`."""
    with Session(engine(os.getpid())) as session, session.begin():
        session.execute(INSERT, {"job": "procrastinate", "number": number})
    return {"number": number}
