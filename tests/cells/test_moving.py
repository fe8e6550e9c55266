"""A tenant that is moved as docs/cells.md says: what is refused from closing on, and the way back."""

from __future__ import annotations

import json
import threading
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from idempotency.application import runtime_of
from idempotency.errors import ChangeRefused
from idempotency.operate import api_keys
from idempotency.operate import webhooks as operate_webhooks
from idempotency.operate.rename import rename_service
from idempotency.sagas import observe
from idempotency.store import asleep, webhooks
from idempotency.store.tenants import authenticate
from idempotency.webhooks.signing import Scheme
from tests.cells.conftest import Cells, Count, Serve
from tests.cells.test_page import call, close, copy, run_all, run_sql
from tests.support.celled import app, deposit
from tests.support.operators import ANN
from tests.support.partitions import put_into_partitions
from tests.support.processes import eventually

COPIED = ("records", "former_fingerprints", "saga_events", "api_keys", "webhook_endpoints", "webhook_secrets")
# Types whose text is the same in every session, apart from what the script sets; bytea is read in each of its forms.
SAME_EVERYWHERE = {"text", "integer", "smallint", "bigint", "boolean", "uuid", "bytea", "jsonb", "text[]"}


def scalar(engine: Engine, query: str) -> Any:
    with engine.connect() as connection:
        return connection.execute(text(query)).scalar_one()


@pytest.mark.long
@pytest.mark.parametrize("partitioned", [("eu", "us"), ("eu",), ("us",)])
def test_a_tenant_moves_between_cells_of_which_either_is_in_partitions(
    serve: Serve,
    cells: Cells,
    engines: dict[str, Engine],
    count: Count,
    monkeypatch: pytest.MonkeyPatch,
    partitioned: tuple[str, ...],
) -> None:
    for each in partitioned:
        put_into_partitions(cells[each]["database_url"])
    serve("eu")
    call(engines["eu"], "spent")
    run_all(cells, "eu")
    close(cells)
    copy(cells)
    monkeypatch.setenv("MOVED", json.dumps({"eu-acme": "us"}))
    serve("us")
    call(engines["us"], "spent")
    run_all(cells, "us")
    assert (count("eu", "spent"), count("us", "spent")) == (1, 0)


FILL = """
INSERT INTO idempotency.records (tenant, task, key, status, fence, fingerprint, message, result, response_code,
                                 completed_at, service, expires_at)
SELECT 'eu-acme', 'charge', n::text, 'completed', n, 'f', '{}', '1', 200, clock_timestamp(), 'celled',
       clock_timestamp() + interval '3 days' FROM generate_series(1, %s) n
"""


@pytest.mark.long
@pytest.mark.parametrize("many", [250, 30_000])
def test_more_operations_than_a_server_has_locks_are_copied_into_partitions(
    cells: Cells, engines: dict[str, Engine], many: int
) -> None:
    put_into_partitions(cells["us"]["database_url"])
    with engines["eu"].connect() as connection:
        connection.exec_driver_sql(FILL % many)
    copy(cells)
    copy(cells)  # again, as after one that has stopped in between
    assert scalar(engines["us"], "SELECT count(*) FROM idempotency.records WHERE tenant = 'eu-acme'") == many


@pytest.mark.long
@pytest.mark.parametrize("partitioned", [False, True])
def test_a_key_that_has_another_operation_in_the_new_cell_stops_the_copy(
    cells: Cells, engines: dict[str, Engine], partitioned: bool
) -> None:
    """Of a call that came there too early, which would be carried out there, although it was in the old cell."""
    if partitioned:
        put_into_partitions(cells["us"]["database_url"])
    with engines["eu"].connect() as connection:
        connection.exec_driver_sql(FILL % 3)
    with engines["us"].connect() as connection:
        connection.exec_driver_sql("""
            INSERT INTO idempotency.records (tenant, task, key, status, fence, fingerprint, message, service, available_at, queue)
            VALUES ('eu-acme', 'charge', '2', 'released', 1, 'f', '{}', 'celled', clock_timestamp(), 'q')
        """)
    with pytest.raises(AssertionError, match="the new cell has another operation charge 2"):
        copy(cells)


@pytest.mark.long
def test_what_is_copied_cannot_be_changed_any_more_once_it_is_closed(
    serve: Serve, cells: Cells, engines: dict[str, Engine]
) -> None:
    """Else a key that was revoked meanwhile would be valid in the new cell, and a new one unknown."""
    serve("eu")
    runtime = runtime_of(app)
    with runtime.engine.begin() as connection:
        key = api_keys.create_api_key(connection, ANN, "eu-acme", name="n", scopes=["*"])
    endpoint = operate_webhooks.add_endpoint(
        runtime, ANN, "eu-acme", url="https://example.com/hook", events=["*"], scheme=Scheme.SHARED
    )
    close(cells)
    with engines["eu"].connect() as connection:
        for statement in (
            "UPDATE idempotency.api_keys SET revoked_at = now()",
            "UPDATE idempotency.webhook_endpoints SET status = 'disabled'",
            "UPDATE idempotency.webhook_secrets SET expires_at = now()",
            f"INSERT INTO idempotency.webhook_secrets (endpoint_id, tenant, secret) VALUES ('{endpoint.id}', 'eu-acme', 's')",
        ):
            with pytest.raises(IntegrityError, match="acme_has_moved"):
                connection.execute(text(statement))
    for change in (
        lambda connection: api_keys.revoke_api_key(connection, ANN, key.id),
        lambda connection: api_keys.create_api_key(connection, ANN, "eu-acme", name="m", scopes=["*"]),
        lambda connection: observe(Session(connection), "return", "r1", "received", {}, tenant="eu-acme", app=app),
        lambda connection: webhooks.add_endpoint(
            connection, "ep_1", tenant="eu-acme", service="celled", url="https://x.org", events=["*"], secret="s"
        ),
    ):
        with runtime.engine.connect() as connection, pytest.raises(IntegrityError, match="acme_has_moved"):
            change(connection)
    # of another tenant, all goes on
    with runtime.engine.begin() as connection:
        api_keys.create_api_key(connection, ANN, "eu-other", name="n", scopes=["*"])
    # as the page says: in the new cell, after the copy
    copy(cells)
    serve("us")
    with runtime_of(app).engine.begin() as connection:
        assert authenticate(connection, key.text) is not None
        api_keys.revoke_api_key(connection, ANN, key.id)
        assert authenticate(connection, key.text) is None


@pytest.mark.long
def test_closing_counts_what_was_accepted_while_it_waited_for_its_locks(
    serve: Serve, cells: Cells, engines: dict[str, Engine]
) -> None:
    """Also where the role's transactions would look at the database as of their beginning."""
    serve("eu")
    found: list[BaseException] = []

    def close_there() -> None:
        try:
            run_sql(cells, "eu", "close", options="-c default_transaction_isolation=repeatable\\ read")
        except psycopg.Error as error:
            found.append(error)

    closing = threading.Thread(target=close_there)
    with Session(engines["eu"].execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
        deposit.using(tenant="eu-acme").enqueue(session, "late")
        closing.start()
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'"
        eventually(lambda: scalar(engines["us"], waits), what="closing waits for the caller")
    closing.join(20)
    assert [str(error).partition("\n")[0] for error in found] == ["acme has 1 messages"]
    run_all(cells, "eu")
    close(cells)


def test_closing_waits_for_events_that_sagas_have_not_been_told_of(
    serve: Serve, cells: Cells, engines: dict[str, Engine]
) -> None:
    """They are marked by one statement for all tenants, which a row that cannot be changed would stop."""
    serve("eu")
    with engines["eu"].connect() as connection:
        connection.execute(text("ALTER TABLE idempotency.saga_events DISABLE TRIGGER signal_waiting"))
        event = "INSERT INTO idempotency.saga_events (tenant, service, event_type, match, event_id, event) VALUES (:tenant, 'celled', 'paid', 'a', 'e', '{}')"
        connection.execute(text(event), {"tenant": "eu-acme"})
    with pytest.raises(psycopg.errors.RaiseException, match="acme has 1 new events"):
        close(cells)
    with engines["eu"].connect() as connection:
        asleep.wake(connection)
    close(cells)
    with engines["eu"].connect() as connection:
        connection.execute(text(event), {"tenant": "eu-other"})
        asleep.wake(connection)
    assert scalar(engines["eu"], "SELECT count(*) FROM idempotency.saga_events WHERE NOT signalled") == 0


@pytest.mark.long
def test_after_a_move_the_old_cells_application_is_renamed_once_the_rows_are_deleted(
    serve: Serve, cells: Cells, engines: dict[str, Engine]
) -> None:
    serve("eu")
    for tenant in ("eu-acme", "eu-other"):
        call(engines["eu"], "a1", tenant)
    run_all(cells, "eu")
    operate_webhooks.add_endpoint(
        runtime_of(app), ANN, "eu-acme", url="https://example.com/hook", events=["*"], scheme=Scheme.SHARED
    )
    close(cells)
    copy(cells)
    app.conf.idempotency_service = "renamed"
    try:
        serve("eu")
        with pytest.raises(ChangeRefused, match=r"acme_has_moved forbids changes of rows in .*delete its rows first"):
            rename_service(app, "celled", "renamed", ANN)
        run_sql(cells, "eu", "delete")
        renamed = rename_service(app, "celled", "renamed", ANN)
    finally:
        app.conf.changes.pop("idempotency_service", None)
    assert renamed["records"] > 0
    with engines["eu"].connect() as connection:
        rows = connection.execute(text("SELECT DISTINCT tenant, service FROM idempotency.records")).all()
        left = [
            connection.execute(text(f"SELECT count(*) FROM idempotency.{table} WHERE tenant = 'eu-acme'")).scalar_one()
            for table in (*COPIED, "outbox", "sagas")
        ]
    assert [tuple(row) for row in rows] == [("eu-other", "renamed")]
    assert left == [0] * 8


@pytest.mark.long
def test_a_move_between_databases_of_other_date_styles_changes_no_time(
    serve: Serve, cells: Cells, engines: dict[str, Engine]
) -> None:
    serve("eu")
    call(engines["eu"], "a1")
    run_all(cells, "eu")
    with engines["eu"].connect() as connection:
        day = "'2026-11-09 00:00+00'"
        columns = ("opened_at", "created_at", "updated_at", "completed_at")
        change = ", ".join(f"{column} = {day}" for column in columns)
        connection.execute(text(f"UPDATE idempotency.records SET {change}, expires_at = '2031-12-01 00:00+00'"))
        name = connection.execute(text("SELECT current_database()")).scalar_one()
        connection.execute(text(f"ALTER DATABASE {name} SET datestyle = 'SQL, DMY'"))
        connection.execute(text(f"ALTER DATABASE {name} SET client_encoding = 'LATIN1'"))
    copy(cells)
    query = "SELECT to_char(expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD') FROM idempotency.records WHERE key = 'a1'"
    assert scalar(engines["us"], query) == "2031-12-01"


def test_what_is_copied_has_no_type_whose_text_depends_on_another_setting(engines: dict[str, Engine]) -> None:
    query = text(
        "SELECT DISTINCT format_type(atttypid, NULL) FROM pg_attribute WHERE attrelid = :table ::regclass AND attnum > 0 AND NOT attisdropped"
    )
    with engines["eu"].connect() as connection:
        types = {
            each for table in COPIED for each in connection.execute(query, {"table": f"idempotency.{table}"}).scalars()
        }
    assert types - SAME_EVERYWHERE == {"timestamp with time zone"}


@pytest.mark.long
def test_a_tenant_that_is_moved_there_and_back_is_charged_nothing_twice(
    serve: Serve, cells: Cells, engines: dict[str, Engine], count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step of the way back, a process that still has the first `cell_of` is refused, until the keys are there."""

    def refused() -> None:
        serve("eu")
        monkeypatch.delenv("MOVED")
        with pytest.raises(IntegrityError, match="acme_has_moved"):
            call(engines["eu"], "first")
        monkeypatch.setenv("MOVED", json.dumps({"eu-acme": "us"}))

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
    refused()
    serve("us")
    close(cells, "us")
    refused()
    run_sql(cells, "eu", "delete")
    refused()
    run_sql(cells, "eu", "open")
    copy(cells, "us", "eu")
    monkeypatch.delenv("MOVED")
    serve("eu")
    for account in ("first", "second", "third"):
        call(engines["eu"], account)
    run_all(cells, "eu")
    assert [(count("eu", each), count("us", each)) for each in ("first", "second", "third")] == [(1, 0), (0, 1), (1, 0)]
    serve("us")
    monkeypatch.setenv("MOVED", json.dumps({"eu-acme": "us"}))
    with pytest.raises(IntegrityError, match="acme_has_moved"):
        call(engines["us"], "fourth")
    # and there again: the names of the constraints are free
    run_sql(cells, "us", "delete")
    monkeypatch.delenv("MOVED")
    serve("eu")
    close(cells)
    run_sql(cells, "us", "open")
    copy(cells)
