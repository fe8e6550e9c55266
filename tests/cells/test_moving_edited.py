"""A tenant whose letters people have edited or archived is moved as docs/cells.md says."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency import IdempotentTask, PermanentError
from idempotency.errors import ChangeRefused
from idempotency.letters import storing
from idempotency.operate.archive import archive, restore
from idempotency.operate.change import Change
from idempotency.operate.edit import edit
from idempotency.operate.replay import replay
from idempotency.store import dead_letters
from tests.cells.conftest import Cells, Serve
from tests.cells.test_page import close, copy, run_all, run_sql
from tests.support.celled import app
from tests.support.dead_messages import dead
from tests.support.deliveries import Deliveries

ANN = Change("ann", "a typing error")
RAN: list[int] = []


@app.task(name="celled.refund", base=IdempotentTask, bind=True, key="{order_id}", max_attempts=1, shared=False)
def refund(self: Any, order_id: str, cents: int) -> int:
    if cents < 0:
        raise PermanentError("below zero", "invalid_amount")
    RAN.append(cents)
    return cents


@pytest.fixture(autouse=True)
def ran() -> list[int]:
    RAN.clear()
    return RAN


def refused(engine: Engine, order_id: str) -> int:
    """The letter of a refund that failed."""
    Deliveries(app).deliver(refund, order_id=order_id, cents=-5, tenant="eu-acme")
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT id FROM idempotency.dead_letters")).scalar_one())


def corrected(order_id: str) -> str:
    return json.dumps({"kwargs": {"order_id": order_id, "cents": 500}})


@pytest.mark.long
def test_a_moved_tenants_request_of_before_an_edit_is_answered(
    serve: Serve, cells: Cells, engines: dict[str, Engine], ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve("eu")
    letter = refused(engines["eu"], "o1")
    edit(app, letter, corrected("o1"), ANN)
    replay(app, letter, ANN)
    run_all(cells, "eu")
    assert ran == [500]
    close(cells)
    with engines["eu"].connect() as connection, pytest.raises(Exception, match="acme_has_moved"):
        connection.execute(text("UPDATE idempotency.former_fingerprints SET became = fingerprint"))
    copy(cells)
    monkeypatch.setenv("MOVED", json.dumps({"eu-acme": "us"}))
    serve("us")
    for cents in (-5, 500):
        assert Deliveries(app).deliver(refund, order_id="o1", cents=cents, tenant="eu-acme").value == 500
    with engines["us"].connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM idempotency.dead_letters")).scalar_one() == 0
    assert ran == [500]
    run_sql(cells, "eu", "delete")
    with engines["eu"].connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM idempotency.former_fingerprints")).scalar_one() == 0


def test_closing_says_that_what_is_left_is_archived(serve: Serve, cells: Cells, engines: dict[str, Engine]) -> None:
    """No list shows it but that of the archive."""
    serve("eu")
    letter = refused(engines["eu"], "o2")
    archive(app, letter, ANN)
    with engines["eu"].connect() as connection:
        assert dead_letters.list_letters(connection) == []
    with pytest.raises(psycopg.errors.RaiseException, match="acme has 1 archived dead letters"):
        close(cells)
    with engines["eu"].connect() as connection:
        assert [row.id for row in dead_letters.list_letters(connection, archived=True, tenant="eu-acme")] == [letter]
    restore(app, letter, ANN)
    with pytest.raises(psycopg.errors.RaiseException, match="acme has 1 dead letters"):
        close(cells)


@pytest.mark.long
@pytest.mark.parametrize("has_begun", [False, True])
def test_in_a_closed_cell_an_edit_is_refused_by_name_of_the_constraint(
    serve: Serve, cells: Cells, engines: dict[str, Engine], has_begun: bool
) -> None:
    """As of a call that was still in the cell's broker when it was closed, while `cell_of` names the old cell."""
    serve("eu")
    if has_begun:
        letter = refused(engines["eu"], "o3")
    else:
        with Session(engines["eu"].execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
            refund.using(tenant="eu-acme").enqueue(session, order_id="o3", cents=-5)
        with engines["eu"].connect() as connection:
            row = connection.execute(text("SELECT * FROM idempotency.outbox")).one()
            storing.store_unhandled(app, dead(row, "deposits"))
            letter = connection.execute(text("SELECT id FROM idempotency.dead_letters")).scalar_one()
    close_it = "UPDATE idempotency.dead_letters SET status = 'discarded', closed_at = clock_timestamp()"
    open_it = "UPDATE idempotency.dead_letters SET status = 'open', closed_at = NULL"
    settle = "UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp(), settled_at = clock_timestamp()"
    with engines["eu"].connect() as connection:
        for statement in (close_it, settle):
            connection.execute(text(statement))
        close(cells)
        connection.execute(text(open_it))
        with pytest.raises(
            ChangeRefused, match=rf"dead letter {letter}: the constraint acme_has_moved .* in records; .*docs/cells"
        ):
            edit(app, letter, corrected("o3"), ANN)
        if has_begun:
            with pytest.raises(
                ChangeRefused, match=rf"dead letter {letter}: the constraint acme_has_moved .* in records"
            ):
                replay(app, letter, ANN)
        assert connection.execute(text("SELECT count(*) FROM idempotency.letter_edits")).scalar_one() == 0
