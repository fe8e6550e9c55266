"""A page on this machine whose process was given an ID token, after that token has expired."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine

from idempotency.identities import LEEWAY
from idempotency.operate import discard
from idempotency.operate.people import Person
from idempotency.web.application import create_app
from tests.integration.test_identities import AUDIENCE, ISSUER, KEYS, id_token
from tests.support import bank as b
from tests.support import operations as op
from tests.support.asgi import Client
from tests.support.deliveries import Deliveries


@pytest.fixture
def connection(engine: Engine) -> Any:
    with engine.connect() as connection:
        yield connection.execution_options(isolation_level="AUTOCOMMIT")


@pytest.mark.long
def test_once_the_id_token_has_expired_everyone_is_a_reader(
    bank: Celery,
    connection: Connection,
    engine: Engine,
    deliveries: Deliveries,
    configure: Callable[..., None],
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(KEYS)
    configure(oidc_issuer=ISSUER, oidc_audience=AUDIENCE, oidc_keys=str(keys))
    deliveries.deliver(b.failing, "a1", "permanent")
    (letter,) = op.dead_letters(connection)
    with engine.begin() as transaction:
        discard.request(transaction, Person("ben", "operator", ISSUER), letter.id, "a test")
    token = id_token(sub="ann", groups=["idempotency-approver"], exp=time.time() - LEEWAY + 2)
    app = create_app(bank, token=token)
    with Client(app, "http://localhost:8500") as client:
        assert "ann · approver" in client.get("/").text
    time.sleep(3.5)
    with Client(app, "http://localhost:8500") as client:  # a session that only begins now
        assert "ann" not in client.get("/").text
        csrf = app.state.desk.sessions.visitor(client.cookies["idempotency-8500"]).csrf
        sent = client.post(
            "/approvals/approve",
            data={"csrf": csrf, "letter": str(letter.id)},
            headers={"Origin": "http://localhost:8500"},
        )
        assert sent.status_code == 403, sent.text
    app.state.desk.close()
    assert op.dead_letters(connection)[0].status == "open"


@pytest.fixture
def deliveries(bank: Celery) -> Deliveries:
    return Deliveries(bank)
