"""A database that was made by code of before has the functions of this one after its migration."""

from __future__ import annotations

from uuid import uuid4

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

import services
from idempotency.store import schema

OF_BEFORE = {
    "resume_saga": "CREATE OR REPLACE FUNCTION idempotency.resume_saga(saga idempotency.sagas) RETURNS void LANGUAGE plpgsql",
    "end_of_operation": "CREATE OR REPLACE FUNCTION idempotency.end_of_operation() RETURNS trigger LANGUAGE plpgsql",
}
BODY = text("SELECT prosrc FROM pg_proc WHERE pronamespace = 'idempotency'::regnamespace AND proname = :name")


@pytest.mark.parametrize("name", OF_BEFORE)
def test_a_database_of_0014_gets_the_functions_of_this_version(servers: services.Services, name: str) -> None:
    bodies = []
    for is_old in (False, True):
        database = f"upgraded_{uuid4().hex[:8]}"
        engine = create_engine(servers.create_database(database), poolclass=NullPool)
        schema.migrate(engine, "0014")
        if is_old:
            with engine.begin() as connection:
                connection.exec_driver_sql(
                    f"{OF_BEFORE[name]} AS 'BEGIN RETURN; END'".replace(
                        "RETURN;", "RETURN NULL;" if "trigger" in OF_BEFORE[name] else "RETURN;"
                    )
                )
        schema.migrate(engine)
        with engine.connect() as connection:
            bodies.append(connection.execute(BODY, {"name": name}).scalar_one())
        servers.drop_database(database)
    assert bodies[0] == bodies[1]
    assert len(bodies[0]) > 500
