"""A database that was made by code of before has the functions of this one after its migration."""

from __future__ import annotations

from uuid import uuid4

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

import services
from idempotency.store import schema

# As any other body would be.
OF_BEFORE = {
    "resume_saga": "resume_saga(saga idempotency.sagas) RETURNS void LANGUAGE plpgsql AS 'BEGIN END'",
    "end_of_operation": "end_of_operation() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
}
BODY = text("SELECT prosrc FROM pg_proc WHERE pronamespace = 'idempotency'::regnamespace AND proname = :name")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OF_BEFORE)
def test_a_database_of_0014_gets_the_functions_of_this_version(servers: services.Services, name: str) -> None:
    bodies = []
    for is_old in (False, True):
        database = f"upgraded_{uuid4().hex[:8]}"
        engine = create_engine(servers.create_database(database), poolclass=NullPool)
        schema.migrate(engine, "0014")
        if is_old:
            with engine.begin() as connection:
                connection.exec_driver_sql(f"CREATE OR REPLACE FUNCTION idempotency.{OF_BEFORE[name]}")
        schema.migrate(engine)
        with engine.connect() as connection:
            bodies.append(connection.execute(BODY, {"name": name}).scalar_one())
        servers.drop_database(database)
    assert bodies[0] == bodies[1]
    assert len(bodies[0]) > 500
