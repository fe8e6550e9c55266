"""Proofs of a breaker about moving a tenant: each test asserts what happens today, and says beside it what would be right."""

from __future__ import annotations

import json
import threading
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency.application import runtime_of
from idempotency.operate import api_keys
from idempotency.operate.change import Change
from idempotency.operate.rename import rename_service
from idempotency.relay.relay import Relay
from idempotency.sagas import observe
from idempotency.store.tenants import authenticate
from tests.cells.conftest import Cells, Count, Serve
from tests.cells.test_page import PAGE, call, close, copy, moving, plain, run_all
from tests.support.celled import app, deposit
from tests.support.documents import blocks
from tests.support.operators import ANN
from tests.support.processes import eventually


def test_a_key_of_the_api_that_is_revoked_during_the_move_is_valid_after_it(
    serve: Serve, cells: Cells, engines: dict[str, Engine]
) -> None:
    """Closing closes operations alone. RIGHT: the old cell refuses changes of what is copied (or the page says when they stop)."""
    serve("eu")
    with runtime_of(app).engine.begin() as connection:
        key = api_keys.create_api_key(connection, Change("ann", "x"), "eu-acme", name="n", scopes=["*"])
    close(cells)
    copy(cells)
    with runtime_of(app).engine.begin() as connection:
        api_keys.revoke_api_key(connection, Change("ann", "it has leaked"), key.id)  # RIGHT: refused
        assert authenticate(connection, key.text) is None
    serve("us")
    with runtime_of(app).engine.connect() as connection:
        assert authenticate(connection, key.text) is not None  # RIGHT: None


def test_a_new_key_and_a_new_secret_of_the_api_are_lost_by_the_move(serve: Serve, cells: Cells) -> None:
    """RIGHT: refused after closing, as operations are."""
    serve("eu")
    close(cells)
    copy(cells)
    with runtime_of(app).engine.begin() as connection:
        key = api_keys.create_api_key(connection, Change("ann", "x"), "eu-acme", name="n", scopes=["*"])
    serve("us")
    with runtime_of(app).engine.connect() as connection:
        assert authenticate(connection, key.text) is None


def test_what_an_observer_notes_after_closing_stays_behind(
    serve: Serve, cells: Cells, engines: dict[str, Engine]
) -> None:
    """RIGHT: refused. "Postgres itself refuses every new operation"; an observer's rows are none, and are not copied either."""
    serve("eu")
    close(cells)
    copy(cells)
    with Session(engines["eu"].execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
        observe(session, "return", "r1", "received", {}, tenant="eu-acme", app=app)
    with engines["eu"].connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM idempotency.sagas")).scalar_one() == 1


def test_closing_in_a_session_of_repeatable_read_leaves_an_accepted_operation_behind(
    serve: Serve, cells: Cells, engines: dict[str, Engine]
) -> None:
    """Where a role or database has default_transaction_isolation: the count looks as of before the lock was waited for.

    RIGHT: the script says BEGIN ISOLATION LEVEL READ COMMITTED, and fails with `acme has 1 messages`.
    """
    serve("eu")
    (script,) = blocks(PAGE, "sql")
    found: list[BaseException] = []

    def close_there() -> None:
        options = "-c default_transaction_isolation=repeatable\\ read"
        try:
            with psycopg.connect(plain(cells, "eu"), autocommit=True, options=options) as connection:
                connection.execute(moving(script))
        except psycopg.Error as error:
            found.append(error)

    closing = threading.Thread(target=close_there)
    with Session(engines["eu"].execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
        deposit.using(tenant="eu-acme").enqueue(session, "late")
        closing.start()
        waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'")
        eventually(lambda: _scalar(engines["us"], waiting), what="closing waits for the caller")
    closing.join(20)
    assert found == []  # RIGHT: RaiseException, acme has 1 messages
    with engines["eu"].connect() as connection:
        pending = text("SELECT count(*) FROM idempotency.outbox WHERE tenant = 'eu-acme' AND status = 'pending'")
        assert connection.execute(pending).scalar_one() == 1
    # and then nothing of this cell is published any more: the row that cannot be changed is in each batch
    call(engines["eu"], "of another", "eu-other")
    relay = Relay(app)
    try:
        published: Any = relay.run_once().published
    except Exception as error:
        published = error
    finally:
        relay.close()
    assert "acme_has_moved" in repr(published)  # RIGHT: 1 row
    with engines["eu"].connect() as connection:
        waits = text("SELECT status FROM idempotency.outbox WHERE tenant = 'eu-other' AND task = 'deposit'")
        assert connection.execute(waits).scalars().all() == ["pending"]  # RIGHT: published


def _scalar(engine: Engine, query: Any) -> Any:
    with engine.connect() as connection:
        return connection.execute(query).scalar_one()


def test_after_a_move_the_old_cells_application_cannot_be_renamed(
    serve: Serve, cells: Cells, engines: dict[str, Engine]
) -> None:
    """RIGHT: the old rows are left out, or the page says that they have to be deleted first. All others keep the old name."""
    serve("eu")
    for tenant in ("eu-acme", "eu-other"):
        call(engines["eu"], "a1", tenant)
    run_all(cells, "eu")
    close(cells)
    copy(cells)
    app.conf.idempotency_service = "renamed"
    try:
        serve("eu")
        with pytest.raises(Exception, match="acme_has_moved"):
            rename_service(app, "celled", "renamed", ANN)
    finally:
        app.conf.changes.pop("idempotency_service", None)
    with engines["eu"].connect() as connection:
        of_other = text("SELECT DISTINCT service FROM idempotency.records WHERE tenant = 'eu-other'")
        assert connection.execute(of_other).scalars().all() == ["celled"]  # RIGHT: renamed


def test_a_move_between_databases_of_other_date_styles_changes_how_long_a_key_stays_spent(
    serve: Serve, cells: Cells, engines: dict[str, Engine]
) -> None:
    """COPY writes days in the order of one database, and reads them in that of the other. RIGHT: PGDATESTYLE=ISO in the script."""
    serve("eu")
    call(engines["eu"], "a1")
    run_all(cells, "eu")
    with engines["eu"].connect() as connection:
        day = "'2026-11-09 00:00+00'"  # any day up to the twelfth of a month; with later ones, the copy fails
        columns = ("opened_at", "created_at", "updated_at", "completed_at")
        change = ", ".join(f"{column} = {day}" for column in columns)
        connection.execute(text(f"UPDATE idempotency.records SET {change}, expires_at = '2031-12-01 00:00+00'"))
        name = connection.execute(text("SELECT current_database()")).scalar_one()
        connection.execute(text(f"ALTER DATABASE {name} SET datestyle = 'SQL, DMY'"))
    copy(cells)
    query = text(
        "SELECT to_char(expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD') FROM idempotency.records WHERE key = 'a1'"
    )
    assert _scalar(engines["us"], query) == "2031-01-12"  # RIGHT: 2031-12-01


def test_a_tenant_that_is_moved_there_and_back_is_charged_nothing_twice(
    serve: Serve, cells: Cells, engines: dict[str, Engine], count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HELD if it passes: as the page says, with the rows of the tenant deleted and the constraints dropped."""
    serve("eu")
    call(engines["eu"], "first")
    run_all(cells, "eu")
    close(cells)
    copy(cells)
    monkeypatch.setenv("MOVED", json.dumps({"eu-acme": "us"}))
    serve("us")
    for account in ("first", "second"):
        call(engines["us"], account)
    run_all(cells, "us")
    with psycopg.connect(plain(cells, "us"), autocommit=True) as connection:
        connection.execute(moving(blocks(PAGE, "sql")[0]))
    with engines["eu"].connect() as connection:
        for table in ("records", "outbox", "saga_events"):
            connection.execute(text(f"DELETE FROM idempotency.{table} WHERE tenant = 'eu-acme'"))
            connection.execute(text(f"ALTER TABLE idempotency.{table} DROP CONSTRAINT acme_has_moved"))
    copy({"eu": cells["us"], "us": cells["eu"]})
    monkeypatch.delenv("MOVED")
    serve("eu")
    for account in ("first", "second", "third"):
        call(engines["eu"], account)
    run_all(cells, "eu")
    assert [(count("eu", each), count("us", each)) for each in ("first", "second", "third")] == [(1, 0), (0, 1), (1, 0)]


def test_back_before_the_other_cell_is_closed_a_process_of_before_charges_twice(
    serve: Serve, cells: Cells, engines: dict[str, Engine], count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "there, first delete the tenant's old rows, and drop the three constraints": done first, as it can be read, a process that
    still has the first `cell_of` spends the key again. RIGHT: the page says that this is done between 2 and 3.
    """
    serve("eu")
    call(engines["eu"], "first")
    run_all(cells, "eu")
    close(cells)
    copy(cells)
    with engines["eu"].connect() as connection:  # before anything else, on the way back
        for table in ("records", "outbox", "saga_events"):
            connection.execute(text(f"DELETE FROM idempotency.{table} WHERE tenant = 'eu-acme'"))
            connection.execute(text(f"ALTER TABLE idempotency.{table} DROP CONSTRAINT acme_has_moved"))
    call(engines["eu"], "first")  # by a process with the mapping of before both moves
    run_all(cells, "eu")
    assert count("eu", "first") == 2  # RIGHT: 1
