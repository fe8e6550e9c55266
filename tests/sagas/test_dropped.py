"""Events that a saga waits for and that a process does not keep, because it does not know the saga: who says so."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from idempotency import events
from idempotency.application import settings_of
from idempotency.checks.doctor import doctor
from idempotency.checks.sagas import check_sagas
from idempotency.checks.startup import require_safe_setup
from idempotency.sagas import saga
from tests.sagas.conftest import Stage
from tests.support.commands import runner

FOUND = "event picked: shop.take_back waits for it by return_id=, and no module that is imported here declares that; add the saga's"


@pytest.fixture
def waiting(stage: Stage) -> Any:
    """A saga that waits for `picked` of a return; then its module is forgotten, as where it was never included."""

    @saga("shop.take_back", key="{id}", events={"picked": "{return_id}", "paid": "{order_id}"}, app=stage.app)
    def take_back(saga: Any, id: str) -> Any:
        saga.wait_for("picked", match=id, timeout=3600.0)
        return saga.wait_for("paid", match=id, timeout=3600.0) is not None

    handle = stage.enqueue(take_back, "r1")
    stage.run()
    return handle


def found(stage: Stage) -> list[str]:
    return [str(each) for each in check_sagas(stage.app, settings_of(stage.app))]


def forget(stage: Stage, member: str | None = None) -> None:
    events._expected.pop(stage.app)
    if member is not None:
        events.expect(stage.app, "picked", f"{{{member}}}")


@pytest.mark.long
def test_an_application_without_the_saga_is_told_by_doctor_start_and_show(
    stage: Stage, waiting: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(monkeypatch, capsys)
    assert found(stage) == []
    assert run("saga", "show", "r1", "--json").document["dropped"] == []
    forget(stage)
    assert [line for line in map(str, doctor(stage.app)) if line.startswith(FOUND)]
    require_safe_setup(stage.app)
    assert f"idempotency: warning: {FOUND}" in capsys.readouterr().err
    assert run("saga", "show", "r1", "--json").document["dropped"] == ["picked return_id=r1"]
    assert (
        "no module that is imported here waits for picked return_id=r1: published here" in run("saga", "show", "r1").out
    )
    stage.publish("picked", {"return_id": "r1"})
    stage.run()
    assert waiting.status() == "released"  # it is true


def test_another_member_of_the_same_event_is_not_what_it_waits_for(stage: Stage, waiting: Any) -> None:
    forget(stage, "order_id")
    assert [line.startswith(FOUND) for line in found(stage)] == [True]
    forget(stage, "return_id")
    assert found(stage) == []


def test_nothing_is_said_of_what_no_saga_of_this_application_waits_for_any_more(stage: Stage, waiting: Any) -> None:
    forget(stage)
    with stage.engine.begin() as connection:
        connection.execute(text("UPDATE idempotency.sagas SET service = 'another'"))
    assert found(stage) == []
    with stage.engine.begin() as connection:
        connection.execute(text("UPDATE idempotency.sagas SET service = 'bank'"))
        assert len(found(stage)) == 1
        connection.execute(text("UPDATE idempotency.sagas SET status = 'COMPENSATING'"))
    assert found(stage) == []
