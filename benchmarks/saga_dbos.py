"""A DBOS workflow of ten steps, as its documentation recommends: each a transaction of a datasource, so that its row and
what is recorded of it are one commit, and the key of the work as the workflow's id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dbos import DBOS, SetWorkflowID, SQLAlchemyDatasource

from .jobs import INSERT
from .saga_tasks import STEPS


@contextmanager
def launched(database_url: str) -> Iterator[Any]:
    """DBOS in this process, with its tables in the same database. Yields what runs a workflow and returns its result."""
    DBOS(config={"name": "benchmarks", "system_database_url": database_url, "log_level": "ERROR"})
    rows = SQLAlchemyDatasource.create(database_url)

    # as our steps; its default, SERIALIZABLE, costs more
    @rows.transaction(isolation_level="READ COMMITTED")
    def insert(number: int) -> int:
        rows.sql_session().execute(INSERT, {"job": "dbos", "number": number})
        return number

    @DBOS.workflow()
    def ten_steps(number: int) -> int:
        for _ in range(STEPS):
            insert(number)
        return number

    def run(number: int) -> Any:
        with SetWorkflowID(str(number)):
            return ten_steps(number)

    DBOS.launch()
    try:
        yield run
    finally:
        DBOS.destroy()
        rows.engine.dispose()
