"""What was found by reading: each test passes while the fault is there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import Engine, text

from idempotency import IdempotentTask, PermanentError
from idempotency.operate.change import Change
from idempotency.operate.edit import edit
from idempotency.operate.replay import replay
from idempotency.relay.resend import resend_lost
from tests.cells.conftest import Cells, Serve
from tests.cells.test_page import close, copy, run_all
from tests.support.celled import app
from tests.support.deliveries import Deliveries

RAN: list[int] = []


@app.task(name="proven.refund", base=IdempotentTask, bind=True, key="{order_id}", max_attempts=1, shared=False)
def refund(self: Any, order_id: str, cents: int) -> int:
    if cents < 0:
        raise PermanentError("below zero", "invalid_amount")
    RAN.append(cents)
    return cents


def test_a_moved_tenants_request_of_before_an_edit_is_refused_as_another_one(
    serve: Serve, cells: Cells, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve("eu")
    old = Deliveries(app)
    old.deliver(refund, order_id="o1", cents=-5, tenant="eu-acme")
    with engines["eu"].connect() as connection:
        letter = connection.execute(text("SELECT id FROM idempotency.dead_letters")).scalar_one()
    edit(app, letter, json.dumps({"kwargs": {"order_id": "o1", "cents": 500}}), Change("ann", "typo"))
    replay(app, letter, Change("ann", "corrected"))
    run_all(cells, "eu")
    resend_lost(app)
    assert RAN == [500]
    # who asks as before is answered, as docs/decisions/archive-and-edits.md says
    assert old.deliver(refund, order_id="o1", cents=-5, tenant="eu-acme").value == 500
    close(cells)
    copy(cells)
    monkeypatch.setenv("MOVED", json.dumps({"eu-acme": "us"}))
    serve("us")
    refused = Deliveries(app).deliver(refund, order_id="o1", cents=-5, tenant="eu-acme")
    assert "other arguments" in str(refused.value)
    with engines["us"].connect() as connection:
        assert connection.execute(text("SELECT reason FROM idempotency.dead_letters")).scalars().all() == [
            "fingerprint_mismatch"
        ]
        assert connection.execute(text("SELECT count(*) FROM idempotency.former_fingerprints")).scalar_one() == 0


def test_a_move_is_refused_for_a_letter_that_no_list_shows(
    serve: Serve, cells: Cells, engines: dict[str, Engine]
) -> None:
    """docs/cells.md says to replay, discard or cancel what is counted, and nothing of the archive."""
    from pathlib import Path

    import psycopg

    from idempotency.operate.archive import archive
    from idempotency.store import dead_letters

    serve("eu")
    Deliveries(app).deliver(refund, order_id="o2", cents=-5, tenant="eu-acme")
    with engines["eu"].connect() as connection:
        letter = connection.execute(text("SELECT id FROM idempotency.dead_letters")).scalar_one()
        archive(app, letter, Change("ann", "never mind"))
        assert dead_letters.list_letters(connection) == []
    with pytest.raises(psycopg.errors.RaiseException, match="acme has 1 dead letters"):
        close(cells)
    assert "archive" not in Path("docs/cells.md").read_text()
