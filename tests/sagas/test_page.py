"""The page on sagas, done as a newcomer does it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from celery import _state
from sqlalchemy import Engine, text

from idempotency.application import close_runtime, runtime_of
from idempotency.cli import timeline
from idempotency.store import saga_reading
from idempotency.wire.keys import OperationId
from tests.sagas.conftest import Stage
from tests.support.deliveries import Deliveries
from tests.support.documents import blocks, python_blocks

SHOP, BEGIN, EVENTS, VERSION = python_blocks("docs/sagas.md")


@pytest.fixture
def shop(engine: Engine, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The reader's module, with its tables."""
    # Celery gives the tasks of every application to those that are made later; the reader has only Celery's own
    builtin = {each for each in _state._on_app_finalizers if each.__module__ == "celery.app.builtins"}
    monkeypatch.setattr(_state, "_on_app_finalizers", builtin)
    for name in ("DATABASE_URL", "BROKER_URL"):
        monkeypatch.setenv(name, environment[name])
    with engine.connect() as connection:
        for statement in blocks("docs/sagas.md", "sql")[0].strip().splitlines():
            connection.execute(text(statement))
    module: Any = ModuleType("shop")
    exec(SHOP, module.__dict__)
    monkeypatch.setitem(sys.modules, "shop", module)
    yield module
    module.engine.dispose()
    close_runtime(module.app)


@pytest.fixture
def shops_stage(shop: Any, engine: Engine) -> Stage:
    return Stage(shop.app, engine, Deliveries(shop.app))


def rows(engine: Engine, table: str) -> list[Any]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(f"SELECT * FROM {table} ORDER BY 1"))]


@pytest.mark.long
def test_the_page_on_sagas_runs_as_it_is(shop: Any, shops_stage: Stage, engine: Engine) -> None:
    names: dict[str, Any] = {}
    exec(BEGIN, names)
    shops_stage.run()
    assert rows(engine, "returns") == [("r1", "open"), ("r2", "open")]
    assert [shops_stage.saga(key).current_step for key in ("r1", "r2")] == ["parcel.collected"] * 2
    exec(EVENTS, names)
    shops_stage.run()
    assert [shops_stage.saga(key).status for key in ("r1", "r2")] == ["COMPLETED", "FAILED"]
    assert rows(engine, "returns") == [("r1", "refunded"), ("r2", "called off")]
    assert rows(engine, "labels") == [("r1", True), ("r2", False)]
    assert shops_stage.letters() == [("shop.process_return", "rejected", "open")]
    with runtime_of(shop.app).autocommit() as connection:
        shown = saga_reading.show(connection, OperationId("default", "shop.process_return", "r2"))
    assert timeline.mermaid(shown) + "\n" == blocks("docs/sagas.md", "mermaid")[0]


@pytest.mark.long
def test_a_parcel_that_nobody_collects_calls_the_return_off(shop: Any, shops_stage: Stage, engine: Engine) -> None:
    shops_stage.enqueue(shop.process_return, return_id="r3")
    shops_stage.run()
    shops_stage.pass_time(5 * 86400 + 1)
    shops_stage.run()
    assert (rows(engine, "returns"), rows(engine, "labels")) == ([("r3", "called off")], [("r3", False)])
    assert shops_stage.letters() == [("shop.process_return", "not_collected", "open")]


def test_the_pages_new_code_keeps_old_sagas_on_their_path(shop: Any, shops_stage: Stage) -> None:
    before = VERSION.replace('saga.version("label later")', "False")
    exec(before, shop.__dict__)
    shops_stage.enqueue(shop.take_back, return_id="old")
    shops_stage.run()
    shop.app.tasks.pop("shop.take_back")
    exec(VERSION, shop.__dict__)
    new = shops_stage.enqueue(shop.take_back, return_id="new")
    shops_stage.run()
    shops_stage.pass_time(86401.0)
    shops_stage.run()
    assert new.status() == "completed"
    assert [name for _, name, _ in shops_stage.steps("old")] == ["shop.create_label", "open", "sleep"]
    assert [name for _, name, _ in shops_stage.steps("new")] == ["label later", "open", "shop.create_label", "sleep"]
