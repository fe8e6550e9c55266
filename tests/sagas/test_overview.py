"""What operators see beside sagas that wait."""

from __future__ import annotations

from typing import Any

import pytest

from idempotency.application import settings_of
from idempotency.sagas import saga
from idempotency.store import overview
from tests.sagas.application import entering
from tests.sagas.conftest import Stage


@pytest.mark.long
def test_a_count_that_waiting_sagas_have_stopped_says_so(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    make = entering(stage, "make")

    @saga("waits", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waits(saga: Any, id: str) -> Any:
        saga.wait_for("picked", match=id, timeout=5 * 86400.0)

    for number in range(12):
        stage.enqueue(waits, f"s{number}")
    stage.run()
    stage.enqueue(make, "thing", idempotency_key="k")
    monkeypatch.setattr(overview, "BOUND", 10)  # two fewer than there are waiting sagas
    with stage.engine.connect() as connection:
        found = overview.take_snapshot(connection, settings_of(stage.app))
    # the window is full of operations that have begun: how many have not is unknown
    assert [state.at_least for state in found.queues.values() if "accepted" in state.at_least]
