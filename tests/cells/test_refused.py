"""What is refused of cells with servers: two of them in one database, and places that the relay of another would empty."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import services
from idempotency import publish
from idempotency.application import close_runtime, runtime_of
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Level
from idempotency.errors import SettingsError, WrongCell
from idempotency.letters.examine import _named
from idempotency.sagas import observe
from tests.cells.conftest import Cells, Serve
from tests.support.celled import app, deposit
from tests.support.proxy import Proxy


def refusals() -> list[str]:
    return [str(each) for each in doctor(app) if each.level is Level.REFUSAL]


def test_no_relay_of_a_cell_deletes_where_another_has_its_results(serve: Serve, cells: Cells, tmp_path: Path) -> None:
    for name, cell in cells.items():
        cell["large_results_at"] = f"file://{tmp_path}/{name}"
    serve("us")
    cells["us"]["large_results_at"] = f"file://{tmp_path}/eu/us"
    with pytest.raises(SettingsError, match="cells: eu and us have the same large_results_at, or one in the other's"):
        serve("us")


@pytest.mark.long
def test_the_doctor_looks_at_every_cell_though_another_broker_wins(
    serve: Serve, cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(None)
    assert refusals() == []
    monkeypatch.setenv("CELERY_BROKER_URL", "amqp://elsewhere//")
    assert [each.partition(":")[0] for each in refusals()] == ["eu", "us"]


@pytest.mark.parametrize("bad", ["eu", "us"])
def test_a_cell_whose_redis_is_mistyped_is_named_whichever_is_served(serve: Serve, cells: Cells, bad: str) -> None:
    cells[bad]["redis_url"] = "nonsense://u:p@h"
    for cell in (None, "eu", "us"):
        with pytest.raises(SettingsError) as error:
            serve(cell)
        assert str(error.value) == f"idempotency_cells.{bad}.redis_url: not an address"


@pytest.mark.long
def test_the_doctor_refuses_one_database_by_two_names(
    serve: Serve, cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    # which the addresses do not tell: the resolver alone takes this for a number
    cells["us"]["database_url"] = cells["eu"]["database_url"].replace("127.0.0.1", "127.1")
    monkeypatch.setitem(app.conf.changes, "idempotency_plain_text_hosts", ("127.1",))
    serve(None)
    assert [each.partition(";")[0] for each in refusals()] == ["us: database: is that of eu, too, by another address"]


@pytest.mark.parametrize("spelling", ["localhost", "[::1]", "127.0.0.1."])
def test_one_database_by_another_spelling_is_refused_before(serve: Serve, cells: Cells, spelling: str) -> None:
    cells["us"]["database_url"] = cells["eu"]["database_url"].replace("127.0.0.1", spelling)
    with pytest.raises(SettingsError, match="cells: eu and us have the same database_url"):
        serve("us")


def test_an_answer_that_is_a_list_is_an_outage_as_any_that_is_no_cell(serve: Serve) -> None:
    for cell_of in (lambda tenant: "mars", lambda tenant: ["eu"]):
        serve("eu")
        app.conf.idempotency_cell_of = cell_of
        close_runtime(app)
        assert _named(deposit, [["a1"], {}, None], {"idempotency-tenant": "eu-acme"}).reason is None
        with pytest.raises(SettingsError, match="idempotency_cell_of: "):
            deposit.apply_async(("a1",), tenant="eu-acme")


CALLS: dict[str, Callable[[Session], object]] = {
    "enqueue": lambda session: deposit.enqueue(session, "a1"),
    "publish": lambda session: publish(session, "shipped", {"a": 1}, exchange="events", app=app),
    "observe": lambda session: observe(session, "return", "r1", "received", {}, app=app),
}


@pytest.mark.parametrize("how", CALLS)
def test_without_a_tenant_no_row_of_another_cells_tenant_is_written(
    serve: Serve, cells: Cells, engines: dict[str, Engine], how: str
) -> None:
    cells["eu"]["tenant"] = "us-house"
    serve("eu")
    with (
        Session(runtime_of(app).engine) as session,
        session.begin(),
        pytest.raises(WrongCell, match="tenant 'us-house' is of cell 'us', and this process serves 'eu'"),
    ):
        CALLS[how](session)
    with engines["eu"].connect() as connection:
        for table in ("outbox", "sagas"):
            assert connection.execute(text(f"SELECT count(*) FROM idempotency.{table}")).scalar_one() == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("may_make_queues", [True, False])
def test_the_doctor_finds_one_virtual_host_by_two_addresses(
    serve: Serve, cells: Cells, servers: services.Services, may_make_queues: bool
) -> None:
    """Another node of one cluster, or a Service beside a host. A user who may not declare a queue cannot be sure."""
    address = urlsplit(cells["eu"]["broker_url"])
    url = address.geturl()
    if not may_make_queues:
        name = f"declares-nothing-{uuid4().hex[:8]}"
        rights = {"user": name, "vhost": unquote(address.path[1:]), "configure": "^$", "write": ".*", "read": ".*"}
        document = {"users": [{"name": name, "password": name, "tags": []}], "permissions": [rights]}
        servers.rabbitmq.import_definitions(json.dumps(document).encode())
        url = f"amqp://{name}:{name}@127.0.0.1:{address.port}{address.path}"
    with Proxy("127.0.0.1", address.port or 5672) as other:
        cells["eu"]["broker_url"], cells["us"]["broker_url"] = url, url.replace(f":{address.port}", f":{other.port}")
        serve(None)
        found = [each for each in doctor(app) if "is that of eu" in each.found or "may be that of eu" in each.found]
    assert [(each.level, each.subject, each.found.partition(",")[0]) for each in found] == [
        (Level.REFUSAL, "us: broker", "is that of eu")
        if may_make_queues
        else (Level.WARNING, "us: broker", "may be that of eu")
    ]
