"""Deploys and people's commands beside running web servers, and what is wrong with a database from the start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
from celery import Celery
from sqlalchemy import Engine, text

import services
from idempotency.application import runtime_of
from idempotency.attempt.runtime import Runtime
from idempotency.errors import ChangeRefused
from idempotency.operate.cancel import cancel
from idempotency.operate.change import read
from idempotency.operate.rename import rename_service
from idempotency.settings import Settings
from idempotency.store import roles
from idempotency.store.rights import APPLICATION
from idempotency.wire.keys import OperationId
from tests.support.edge import Edge, Handler, new_key
from tests.support.operators import ANN
from tests.support.roles import PASSWORDS, url_of


def ask(edge: Edge, key: str, handler: Handler) -> httpx.Response:
    async def send(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/pay", headers={"idempotency-key": key})

    return edge.use(handler, send)


@pytest.mark.long
def test_a_web_server_goes_on_when_the_wall_is_put_up(database: str, engine: Engine) -> None:
    owner = engine.execution_options(isolation_level="READ COMMITTED")
    roles.create(owner, PASSWORDS)
    with engine.connect() as connection:  # as before `migrate --roles`, for a login that has the rights
        connection.execute(text(f"GRANT ALL ON entries TO {APPLICATION}"))
        connection.execute(text(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {APPLICATION}"))
        walled = "SELECT oid::regclass::text FROM pg_class WHERE relforcerowsecurity"
        for table in connection.execute(text(walled)).scalars().all():
            connection.execute(text(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY"))
    runtime = Runtime(Settings.read({"database_url": url_of(APPLICATION, database)}))
    edge, handler, keys = Edge(runtime, engine), Handler(), [new_key() for _ in range(2)]
    try:
        assert ask(edge, new_key(), handler).status_code == 201
        roles.create(owner, PASSWORDS)
        answers = [ask(edge, key, handler).status_code for key in keys for _ in range(3)]
    finally:
        runtime.close()
    # one statement is refused at most, and then all connections are opened anew, and ask whether the wall stands
    assert answers[0] in (201, 503)
    assert answers[1:] == [201] * 5
    assert [edge.entries(key) for key in keys] == [1, 1]


@pytest.mark.long
def test_an_application_is_not_renamed_under_its_running_web_server(
    bank: Celery, database: str, engine: Engine
) -> None:
    key = new_key()
    runtime = Runtime(Settings.read({"database_url": database, "service": "shop"}))
    try:
        assert ask(Edge(runtime, engine), key, Handler()).status_code == 201
    finally:
        runtime.close()
    with pytest.raises(
        ChangeRefused, match=r"^shop: has carried out requests over HTTP within the last 60 s; stop its"
    ):
        rename_service(bank, "shop", "bank", ANN)
    with engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.records SET updated_at = updated_at - interval '61 s'"))
    assert rename_service(bank, "shop", "bank", ANN)["records"] == 1


@pytest.fixture
def bare(servers: services.Services) -> Iterator[str]:
    """A database without the library's tables."""
    name = f"bare_{uuid4().hex[:8]}"
    yield servers.create_database(name)
    servers.drop_database(name)


@pytest.mark.parametrize("wrong", ["no tables", "isolation"])
def test_what_sending_again_does_not_help_is_an_error_of_the_server(
    bare: str, database: str, engine: Engine, wrong: str
) -> None:
    if wrong == "isolation":
        with engine.connect() as connection:
            name = connection.execute(text("SELECT current_database()")).scalar_one()
            connection.execute(text(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'"))
    runtime = Runtime(Settings.read({"database_url": bare if wrong == "no tables" else database}))
    handler = Handler()
    try:
        answer = ask(Edge(runtime, engine), new_key(), handler)
    finally:
        runtime.close()
    assert (answer.status_code, handler.runs, "retry-after" in answer.headers) == (500, 0, False)


def test_a_cancelled_request_is_said_to_be_cancelled(bank: Celery, engine: Engine) -> None:
    edge, key = Edge(runtime_of(bank), engine), new_key()
    assert ask(edge, key, Handler(500)).status_code == 500
    with engine.connect() as connection:
        cancel(bank, read(connection, OperationId("default", "http", key), "bank"), ANN, without_task=True)
    said: Any = ask(edge, key, Handler()).json()
    assert (said["status"], said["code"]) == (500, "cancelled")
    assert said["detail"].startswith("A person has ended it")
