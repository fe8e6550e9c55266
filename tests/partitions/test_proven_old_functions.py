"""Functions of an earlier checkout stay until a person runs `migrate --partitioned` again; nothing says so."""

from __future__ import annotations

import subprocess
from typing import Any

from celery import Celery
from sqlalchemy import Connection, Engine

from idempotency.application import settings_of
from idempotency.checks.postgres import check_database
from idempotency.store import schema, waking
from tests.support import operations as op
from tests.support.operations import early
from tests.support.partitions import while_it_moves
from tests.support.tasks import transactional

FIRST = "7e0ad1ef"


def old_functions() -> str:
    path = "idempotency/store/migrations/partitioning.py"
    source = subprocess.run(["git", "show", f"{FIRST}:{path}"], capture_output=True, text=True, check=True).stdout
    found: dict[str, Any] = {}
    exec(source.replace("from ..", "from idempotency.store."), found)  # noqa: S102
    return str(found["FUNCTIONS"])


def test_an_upgrade_of_code_and_schema_alone_loses_wakes_and_the_doctor_is_content(
    bank: Celery, engine: Engine, connection: Connection
) -> None:
    connection.exec_driver_sql(old_functions().replace("%", "%%"))
    schema.migrate(engine)  # what a deploy runs
    assert [
        f"{each.level} {each.found}" for each in check_database(settings_of(bank)) if "partitions" in each.subject
    ] == ["ok 6, by day"]
    id = early(connection).id  # for ten minutes

    def wake() -> None:
        with transactional(engine).begin() as own:
            waking.wake(own, id, op.SERVICE)

    while_it_moves(engine, connection, id, wake)
    assert op.seconds_from_now(connection, id, "available_at") > 500  # the wake is lost
