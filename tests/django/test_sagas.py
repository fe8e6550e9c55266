"""Sagas of a Django project: the ORM in their steps, and begun, woken and undone on Django's own connection."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, _state
from django.db import transaction
from sqlalchemy import Engine

from idempotency import SettingsError
from idempotency.contrib.django import publish
from idempotency.contrib.django.sagas import saga
from tests.django.conftest import Entries, make_task
from tests.django.ledger.models import Entry
from tests.sagas.conftest import Stage
from tests.support.deliveries import Deliveries


def enter(session: Any, account: str) -> str:
    Entry.objects.create(account=account)
    return account


def void(self: Any, account: str) -> None:
    Entry.objects.create(account=f"void {account}")


@pytest.mark.long
def test_a_saga_of_the_project_writes_by_the_orm_and_is_undone(
    project: Celery, engine: Engine, deliveries: Deliveries, entries: Entries, outbox: Entries
) -> None:
    undo = make_task(project, void)

    @saga("ledger.take_back", key="{account}", events={"parcel.collected": "{account}"})
    def take_back(saga: Any, account: str) -> Any:
        saga.step("open", enter, account, undo=undo)
        saga.wait_for("parcel.collected", match=account, timeout=3600.0)
        if account == "reads":
            Entry.objects.count()
        if account == "fails":
            raise ValueError("nothing in it")
        return saga.step("close", enter, f"{account} closed")

    stage, accounts = Stage(project, engine, deliveries), ("ends", "fails", "reads")
    with transaction.atomic():
        handles = [take_back.using(priority=3).enqueue("ends"), *(take_back.enqueue(account=a) for a in accounts[1:])]
        assert outbox() == []
    assert outbox() == list(accounts)
    stage.run()
    assert entries() == list(accounts)
    with transaction.atomic():
        for account in accounts:
            publish("parcel.collected", {"account": account}, app=project)
        assert stage.run() == []
    for _ in range(6):
        stage.run()
        stage.pass_time(60.0)
    assert [handle.status() for handle in handles[:2]] == ["completed", "failed"]
    assert {"ends closed", "void fails"} <= set(entries())
    assert not {"fails closed", "void ends", "reads closed"} & set(entries())


def test_a_saga_needs_the_projects_application(default: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_state, "default_app", None)
    with pytest.raises(SettingsError, match="no Celery application"):
        saga("ledger.none", key="{id}")
