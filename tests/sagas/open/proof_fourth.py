"""Proofs of a breaker, fourth batch. Each asserts the good outcome."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from idempotency import publish
from idempotency.application import runtime_of
from idempotency.sagas import saga
from tests.sagas.conftest import Stage


def test_a_batch_of_events_is_published_in_one_transaction(stage: Stage) -> None:
    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        return saga.wait_for("picked", match=id, timeout=timedelta(days=5)) is not None

    with stage.engine.connect():
        pass
    with Session(runtime_of(stage.app).engine) as session:
        for n in range(40_000):
            try:
                publish(session, "picked", {"id": f"r{n}"}, app=stage.app)
            except Exception as error:
                pytest.fail(f"event {n}: {error}"[:300])
        session.commit()
