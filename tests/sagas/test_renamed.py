"""Renaming an application while its sagas wait: their events wake them under the new name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from idempotency.operate.rename import rename_service
from idempotency.store import renaming
from idempotency.upkeep import maintenance
from tests.integration.test_renaming import rename as set_name
from tests.sagas.application import paid_once_picked
from tests.sagas.conftest import Stage
from tests.support.operators import ANN


@pytest.fixture(autouse=True)
def named_as_before(bank: Celery) -> Iterator[None]:
    yield
    set_name(bank, None)


def waiting(stage: Stage) -> Any:
    handle = stage.enqueue(paid_once_picked(stage), "r1")
    stage.run()
    return handle


@pytest.mark.long
def test_an_event_between_the_deploy_and_the_rename_wakes_its_saga(stage: Stage) -> None:
    handle = waiting(stage)
    set_name(stage.app, "ledger")  # the deploy; its web server publishes
    stage.publish("picked", {"id": "r1"})
    rename_service(stage.app, "bank", "ledger", ANN)
    maintenance.recover(stage.app)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("completed", ["paid"])


@pytest.mark.long
def test_an_event_during_the_rename_wakes_its_saga(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = waiting(stage)
    set_name(stage.app, "ledger")
    real, published = renaming.rename, list[Any]()

    def rename(connection: Any, table: str, old: str, new: str, *, after: Any) -> Any:
        if table == "sagas" and not published:
            published.append(stage.publish("picked", {"id": "r1"}))
        return real(connection, table, old, new, after=after)

    monkeypatch.setattr(renaming, "rename", rename)
    rename_service(stage.app, "bank", "ledger", ANN)
    stage.run()
    maintenance.recover(stage.app)
    stage.run()
    assert published
    assert (handle.status(), stage.accounts()) == ("completed", ["paid"])


@pytest.mark.long
def test_an_event_of_the_old_name_wakes_a_saga_of_the_new_one(stage: Stage) -> None:
    """A rolling deploy: the old web server publishes last, then it stops, and a person renames."""
    set_name(stage.app, "ledger")
    handle = waiting(stage)  # of the new name
    set_name(stage.app, "bank")
    stage.publish("picked", {"id": "r1"})
    set_name(stage.app, "ledger")
    rename_service(stage.app, "bank", "ledger", ANN)
    maintenance.recover(stage.app)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("completed", ["paid"])
