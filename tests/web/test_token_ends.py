"""A page on this machine whose process was given an ID token, after that token has expired."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine

from idempotency.identities import LEEWAY
from idempotency.operate import discard
from idempotency.operate.people import Person
from idempotency.web import access
from idempotency.web.application import create_app
from tests.integration.test_identities import AUDIENCE, ISSUER, KEYS, id_token
from tests.support import bank as b
from tests.support import operations as op
from tests.support.asgi import Client
from tests.support.deliveries import Deliveries
from tests.web.test_changes import shown


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
    ends = time.time() + 8
    token = id_token(sub="ann", groups=["idempotency-approver"], exp=ends - LEEWAY)
    app = create_app(bank, token=token)
    with Client(app, "http://localhost:8500") as client:
        assert "ann · approver" in client.get("/").text
    time.sleep(ends + 1.5 - time.time())
    with Client(app, "http://localhost:8500") as client:  # a session that only begins now
        assert "ann" not in shown(client.get("/"))
        csrf = app.state.desk.sessions.visitor(client.cookies["idempotency-8500"]).csrf
        sent = client.post(
            "/approvals/approve",
            data={"csrf": csrf, "letter": str(letter.id)},
            headers={"Origin": "http://localhost:8500"},
        )
        assert sent.status_code == 403, sent.text
    app.state.desk.close()
    assert op.dead_letters(connection)[0].status == "open"


@pytest.mark.long
def test_once_the_id_token_has_expired_no_other_tenant_is_seen(
    bank: Celery,
    connection: Connection,
    deliveries: Deliveries,
    configure: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(KEYS)
    configure(oidc_issuer=ISSUER, oidc_audience=AUDIENCE, oidc_keys=str(keys), oidc_tenants="tenants")
    for tenant in ("acme", "beta"):
        deliveries.deliver(b.failing, f"{tenant}s-customer", "permanent", tenant=tenant)
    exp = time.time() + 600
    token = id_token(sub="ann", groups=["idempotency-operator"], tenants=["acme"], exp=exp)
    app = create_app(bank, token=token)
    with Client(app, "http://localhost:8500") as client:
        for now, who in ((exp, "ann · operator"), (exp + LEEWAY + 1, "reader · reader")):
            monkeypatch.setattr(access, "time", SimpleNamespace(time=lambda now=now: now))
            shown = client.get("/letters").text
            assert who in shown
            assert "acmes-customer" in shown
            assert "betas-customer" not in shown
            found = {each.tenant: client.get(f"/letters/{each.id}").status_code for each in op.dead_letters(connection)}
            assert found == {"acme": 200, "beta": 404}
    app.state.desk.close()


@pytest.fixture
def deliveries(bank: Celery) -> Deliveries:
    return Deliveries(bank)
