"""What two cells may not share, by their addresses, and how settings of cells are refused. Nothing connects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import Celery

from idempotency import use_cells
from idempotency.application import settings_of
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Level
from idempotency.errors import SettingsError, WrongCell
from idempotency.settings import Settings

CELL = {"database_url": "postgresql+psycopg://one/x", "broker_url": "amqp://h//"}


@pytest.mark.parametrize(
    "other",
    [
        {"database_url": "postgresql+psycopg://two/x", "broker_url": "amqp://h:5672//"},
        {"database_url": "postgresql+psycopg://two/x", "broker_url": "amqp://h/"},
        {"database_url": "postgresql+psycopg://two/x", "broker_url": "amqp://h/%2F"},
        {"database_url": "postgresql+psycopg://two/x", "broker_url": "pyamqp://h/?heartbeat=9"},
        {"database_url": "postgresql+psycopg://one,spare/x", "broker_url": "amqp://h/b"},
        {"database_url": "postgresql+psycopg://ONE/x", "broker_url": "amqp://h/b"},
    ],
)
def test_one_place_written_in_two_ways_is_one(other: dict[str, str]) -> None:
    given = {"cells": {"eu": CELL, "us": other}, "cell_of": {"a": "eu"}, "cell": "eu"}
    with pytest.raises(SettingsError, match=r"cells: eu and us have the same (database|broker)_url"):
        Settings.read({**given, "database_url": CELL["database_url"]})


def test_the_same_name_on_another_server_is_another_place() -> None:
    other = {"database_url": "postgresql+psycopg://one:5433/x", "broker_url": "amqp://h:5673//"}
    given = {
        "cells": {"eu": CELL, "us": other},
        "cell_of": {"a": "eu"},
        "cell": "eu",
        "database_url": CELL["database_url"],
    }
    assert Settings.read(given).cells.keys() == {"eu", "us"}


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("database_url", "postgresql+psycopg://u:p@9:S3CRET@h/x"),
        ("database_url", "no address"),
        ("broker_url", "amqp://u:p@h:S3CRET//"),
    ],
)
def test_an_address_that_cannot_be_read_is_named_and_not_shown(name: str, address: str) -> None:
    other = {"database_url": "postgresql+psycopg://two/x", "broker_url": "amqp://h/b"} | {name: address}
    given = {
        "database_url": CELL["database_url"],
        "cells": {"eu": CELL, "us": other},
        "cell_of": {"a": "eu"},
        "cell": "eu",
    }
    with pytest.raises(SettingsError, match=f"cells.*{name}: not an address") as refused:
        Settings.read(given)
    assert "S3CRET" not in str(refused.value)


def read(eu: dict[str, Any], us: dict[str, Any], **more: Any) -> Settings:
    """The settings of a process of `eu`."""
    eu = {"database_url": "postgresql+psycopg://u:p@h/eu", "broker_url": "amqp://h/eu"} | eu
    us = {"database_url": "postgresql+psycopg://u:p@h/us", "broker_url": "amqp://h/us"} | us
    own = {name: value for name, value in eu.items() if name != "broker_url"}
    return Settings.read({"cells": {"eu": eu, "us": us}, "cell_of": {"a": "eu"}, "cell": "eu", **own, **more})


@pytest.mark.parametrize(
    ("eu", "us"),
    [
        ("postgresql+psycopg://u:p@h/eu?dbname=shop", "postgresql+psycopg://u:p@h/us?dbname=shop"),
        ("postgresql+psycopg://shop:p@h/shop", "postgresql+psycopg://shop:p@h/"),
        ("postgresql+psycopg://shop:p@h/shop", "postgresql+psycopg://shop:p@h"),
        ("postgresql+psycopg://u:p@one/shop?hostaddr=10.0.0.1", "postgresql+psycopg://u:p@two/shop?hostaddr=10.0.0.1"),
        ("postgresql+psycopg://u:p@h/shop", "postgresql+psycopg://u:p@h./shop"),
        ("postgresql+psycopg://u:p@localhost/shop", "postgresql+psycopg://u:p@127.0.0.1/shop"),
        ("postgresql+psycopg://u:p@[::1]/shop", "postgresql+psycopg://u:p@127.0.0.1/shop"),
        ("postgresql+psycopg://u:p@[fd00::1]/shop", "postgresql+psycopg://u:p@[FD00:0:0::1]/shop"),
    ],
)
def test_two_cells_in_one_database_are_refused_by_whatever_spelling(eu: str, us: str) -> None:
    with pytest.raises(SettingsError, match="cells: eu and us have the same database_url"):
        read({"database_url": eu}, {"database_url": us})


@pytest.mark.parametrize(
    ("eu", "us"),
    [
        ("postgresql+psycopg://u:p@h/?dbname=eu", "postgresql+psycopg://u:p@h/?dbname=us"),
        ("postgresql+psycopg://eu:p@h/", "postgresql+psycopg://us:p@h/"),
        ("postgresql+psycopg:///shop?service=eu", "postgresql+psycopg:///shop?service=us"),
        ("postgresql+psycopg://u:p@h/?service=EU", "postgresql+psycopg://u:p@h/?service=eu"),
        ("postgresql+psycopg://u:p@h/?service=eu", "postgresql+psycopg://u:p@h/u"),
        ("postgresql+psycopg:///shop?host=/srv/A", "postgresql+psycopg:///shop?host=/srv/a"),
    ],
)
def test_two_databases_are_two_where_the_path_does_not_name_them(eu: str, us: str) -> None:
    one, other = read({"database_url": eu}, {"database_url": us}), read({"database_url": us}, {"database_url": eu})
    assert one.owner != other.owner  # nor are their hints mixed up


@pytest.mark.parametrize(
    ("eu", "us"),
    [
        ("amqp://one/eu;amqp://two/eu", "amqp://two/eu"),
        ("amqp://[::1]/eu", "amqp://[0:0:0:0:0:0:0:1]/eu"),
        ("amqp://localhost/eu", "amqp://127.0.0.1/eu"),
        ("amqps://h/eu", "amqp://H/eu"),
        ("amqps://h:5555/eu", "amqp://h:5672/eu"),
        ("librabbitmq://h/eu", "amqp://h/eu"),
    ],
)
def test_two_cells_at_one_broker_are_refused_by_whatever_spelling(eu: str, us: str) -> None:
    with pytest.raises(SettingsError, match="cells: eu and us have the same broker_url"):
        read({"broker_url": eu}, {"broker_url": us})


@pytest.mark.parametrize(
    ("eu", "us"),
    [("redis://h/0", "redis://h/1"), ("redis://h:6379/0", "rediss://h:6390/0"), ("amqps://h:1/x", "amqps://h:2/x")],
)
def test_two_brokers_are_two(eu: str, us: str) -> None:
    assert read({"broker_url": eu}, {"broker_url": us}).cell == "eu"


def test_a_cell_has_one_virtual_host_at_all_its_brokers() -> None:
    with pytest.raises(SettingsError, match=r"idempotency_cells\.us\.broker_url: names several virtual hosts"):
        read({}, {"broker_url": "amqp://one/us;amqp://two/eu"})


@pytest.mark.parametrize(
    ("eu", "us"),
    [
        ("file:///srv/results", "file:///srv/results"),
        ("file:///srv/results", "file:///srv/x/../results/"),
        ("file:///srv/results", "file:///srv/results/us"),
        ("s3://bucket/results", "s3://bucket/results"),
        ("s3://bucket/results/eu", "s3://bucket/results"),
        ("s3://bucket", "s3://bucket/us"),
    ],
)
def test_no_cell_has_its_large_results_where_the_relay_of_another_deletes(eu: str, us: str) -> None:
    with pytest.raises(SettingsError, match="cells: eu and us have the same large_results_at, or one in the other's"):
        read({"large_results_at": eu}, {"large_results_at": us})
    with pytest.raises(SettingsError, match="store_results_at must not be large_results_at"):
        read({}, {"large_results_at": us}, store_results_at=eu)


@pytest.mark.parametrize(
    ("eu", "us"),
    [("file:///srv/results", "file:///srv/results-us"), ("s3://bucket/eu", "s3://bucket/us"), ("s3://a", "file:///a")],
)
def test_two_places_of_large_results_are_two(eu: str, us: str) -> None:
    assert read({"large_results_at": eu}, {"large_results_at": us}).cell == "eu"


@pytest.mark.parametrize("bad", ["eu", "us"])
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("redis_url", "nonsense://u:S3CRET@h", "not an address"),
        ("redis_url", "sentinel://:S3CRET@h", "must be sentinel://"),
        ("tenant", "", "tenant"),
        ("large_results_at", "s3://key:S3CRET@bucket", "must be file:///a/directory or s3://bucket/prefix"),
    ],
)
def test_what_a_cell_has_wrong_is_refused_once_and_by_its_name(bad: str, name: str, value: str, why: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read(*({name: value} if cell == bad else {} for cell in ("eu", "us")))
    assert str(refused.value).startswith(f"idempotency_cells.{bad}.{name}: ")
    assert why in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert "S3CRET" not in str(refused.value)


def celled(**more: Any) -> Celery:
    """An application of two cells whose servers are not there."""
    app = Celery("celled", set_as_current=False)
    cells = {
        name: {
            "database_url": f"postgresql+psycopg://u:S3CRET@127.0.0.1:1/{name}",
            "broker_url": f"amqp://127.0.0.1:1/{name}",
        }
        for name in ("eu", "us")
    }
    app.conf.update({"idempotency_cells": cells, "idempotency_cell_of": {"a": "eu", "b": "us"}} | more)
    return app


def test_settings_of_cells_may_be_json_as_from_the_environment() -> None:
    app = celled()
    app.conf.update(idempotency_cells=json.dumps(app.conf.idempotency_cells), idempotency_cell="us")
    assert settings_of(app).cell_for("a") == "eu"
    assert settings_of(app).database_name == "127.0.0.1:1/us"


@pytest.mark.parametrize(
    "given",
    [
        "postgresql+psycopg://u:S3CRET@h/x",
        '["S3CRET"]',
        ["S3CRET"],
        {"eu": "amqp://u:S3CRET@h"},
        {"eu": ["S3CRET"]},
        "{}",
    ],
)
def test_cells_of_another_type_are_refused_by_name_and_not_shown(given: Any) -> None:
    app = celled(idempotency_cells=given, idempotency_cell="eu")
    for read_it in (settings_of, use_cells):
        with pytest.raises(SettingsError, match=r"idempotency_cells(\.eu)?: must be a mapping") as refused:
            read_it(app)
        assert "S3CRET" not in str(refused.value)
    app.conf.idempotency_cell = None
    refusals = [str(each) for each in doctor(app) if each.level is Level.REFUSAL]
    assert any(each.startswith("idempotency_cells") for each in refusals)
    assert "S3CRET" not in str(refusals)


@pytest.mark.parametrize("found", [["eu"], {"eu": 1}, 1])
def test_an_answer_of_cell_of_that_is_no_name_is_a_fault_of_the_settings(found: Any) -> None:
    settings = settings_of(celled(idempotency_cell="eu", idempotency_cell_of=lambda tenant: found))
    with pytest.raises(SettingsError, match=f"idempotency_cell_of: must return .*, got a {type(found).__name__}"):
        settings.check_cell("a")


def test_a_mapping_to_what_is_no_name_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"cell_of: \['eu'\] is none of eu, us"):
        settings_of(celled(idempotency_cell="eu", idempotency_cell_of={"a": ["eu"]}))


def test_nothing_is_done_for_no_tenant_where_the_cells_own_is_of_another() -> None:
    from idempotency import publish, runtime_for
    from idempotency.application import close_runtime
    from idempotency.sagas import observe

    app = celled(idempotency_cell="eu", idempotency_tenant="b")
    try:
        for call in (
            lambda: runtime_for(app, None),
            lambda: publish(None, "shipped", {}, exchange="events", app=app),  # type: ignore[arg-type]
            lambda: observe(None, "return", "r1", "received", {}, app=app),  # type: ignore[arg-type]
        ):
            with pytest.raises(WrongCell, match="tenant 'b' is of cell 'us', and this process serves 'eu'"):
                call()
    finally:
        close_runtime(app)


def test_the_doctor_says_of_each_cell_that_another_broker_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IDEMPOTENCY_CELL", raising=False)
    app = celled()
    use_cells(app)
    monkeypatch.setenv("CELERY_BROKER_URL", "amqp://elsewhere//")
    refused = [str(each) for each in doctor(app) if each.level is Level.REFUSAL]
    assert [each.partition(";")[0] for each in refused] == [
        f"{cell}: broker_url: not that of the cell '{cell}'" for cell in ("eu", "us")
    ]


def test_the_doctor_says_once_what_is_wrong_with_the_settings_of_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IDEMPOTENCY_CELL", raising=False)
    app = celled()
    app.conf.idempotency_cells["us"]["redis_url"] = "nonsense://u:S3CRET@h"
    assert [str(each) for each in doctor(app)] == ["idempotency_cells.us.redis_url: not an address; correct it"]
