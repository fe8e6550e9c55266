"""The page docs/cells.md: its examples, and a tenant that is moved as it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency import WrongCell, runtime_for
from idempotency.application import close_runtime, runtime_of
from idempotency.relay.resend import resend_lost
from idempotency.testing.inline import Outbox
from tests.cells.conftest import Cells, Count, Serve
from tests.support.celled import app, deposit
from tests.support.deliveries import Deliveries
from tests.support.documents import blocks, python_blocks

PAGE = "docs/cells.md"


def plain(cells: Cells, cell: str) -> str:
    """A cell's address as psql and psycopg take it."""
    return cells[cell]["database_url"].replace("+psycopg", "")


def moving(text: str) -> str:
    """What the page says of acme, for the tenant of this test."""
    return text.replace("'acme'", "'eu-acme'")


def run_sql(cells: Cells, cell: str, name: str, options: str = "") -> None:
    """One of the page's scripts, by what it does: close, delete or open."""
    script = dict(zip(("close", "delete", "open"), blocks(PAGE, "sql"), strict=True))[name]
    with psycopg.connect(plain(cells, cell), autocommit=True, options=options) as connection:
        connection.execute(moving(script))


def close(cells: Cells, cell: str = "eu") -> None:
    run_sql(cells, cell, "close")


def copy(cells: Cells, old: str = "eu", new: str = "us") -> None:
    (script,) = blocks(PAGE, "sh")
    environment = {**os.environ, "OLD": plain(cells, old), "NEW": plain(cells, new)}
    done = subprocess.run(
        ["bash", "-c", moving(script)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def call(engine: Engine, account: str, tenant: str = "eu-acme") -> None:
    with Session(engine.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
        deposit.using(tenant=tenant).enqueue(session, account)


def run_all(cells: Cells, cell: str) -> None:
    Outbox(app, allow_database=cells[cell]["database_url"].rpartition("/")[2].partition("?")[0]).run()
    resend_lost(app)  # what a relay does: rows of operations that have ended are settled


@pytest.mark.long
def test_the_examples_run(
    serve: Serve, cells: Cells, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDEMPOTENCY_CELL", "us")
    names: dict[str, Any] = {}
    for cell in ("eu", "us"):
        for what, name in (("database_url", "DATABASE"), ("broker_url", "BROKER"), ("redis_url", "REDIS")):
            names[f"{cell.upper()}_{name}"] = cells[cell][what]
    configuration, caller = python_blocks(PAGE)
    exec(configuration, names)
    assert names["app"].conf.broker_url == cells["us"]["broker_url"]
    assert runtime_of(names["app"]).settings.tenant == "us-house"
    close_runtime(names["app"])
    serve(None)
    exec(caller, names)
    names["capture_payment"] = deposit
    assert names["order"](app, "us-bolt", "a1").status() == "accepted"


def test_a_tenant_that_is_moved_is_charged_nothing_twice(
    serve: Serve, cells: Cells, engines: dict[str, Engine], count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve("eu")
    for tenant, account in (("eu-acme", "spent"), ("eu-other", "other"), ("eu-acme", "left")):
        call(engines["eu"], account, tenant)
    # 2: not while something is left to do; each failure changes nothing
    with pytest.raises(psycopg.errors.RaiseException, match="acme has 2 messages"):
        close(cells)
    call(engines["eu"], "after a refusal")
    run_all(cells, "eu")
    with engines["eu"].connect() as connection:
        connection.execute(text("SELECT setval('idempotency.fence', 3000000)"))  # it has run for longer than the other
        connection.execute(text("UPDATE idempotency.records SET result = '7' WHERE key = 'spent'"))
        letter = text(
            "INSERT INTO idempotency.dead_letters (source, tenant, reason, payload) VALUES ('broker', 'eu-acme', 'x', '') RETURNING id"
        )
        id = connection.execute(letter).scalar_one()
        with pytest.raises(psycopg.errors.RaiseException, match="acme has 1 dead letters"):
            close(cells)
        connection.execute(
            text("UPDATE idempotency.dead_letters SET status = 'discarded', closed_at = now() WHERE id = :id"),
            {"id": id},
        )
    close(cells)

    # closed for this tenant, whatever a process believes, and for no other
    with pytest.raises(Exception, match="acme_has_moved"):
        call(engines["eu"], "late")
    assert Deliveries(app).deliver(deposit, "by delay", tenant="eu-acme").state == "REJECTED"
    call(engines["eu"], "goes on", "eu-other")

    copy(cells)
    monkeypatch.setenv("MOVED", json.dumps({"eu-acme": "us"}))
    with pytest.raises(WrongCell, match="tenant 'eu-acme' is of cell 'us'"):
        call(engines["eu"], "late")
    serve("us")
    for account in ("spent", "new", "new"):
        call(engines["us"], account)
    run_all(cells, "us")
    assert [count("eu", account) for account in ("spent", "new", "late", "by delay", "other")] == [1, 0, 0, 0, 1]
    assert [count("us", account) for account in ("spent", "new", "late", "by delay", "other")] == [0, 1, 0, 0, 0]
    with runtime_for(app, "eu-acme").autocommit() as connection:
        rows = connection.execute(
            text("SELECT key, result FROM idempotency.records WHERE task = 'deposit' ORDER BY key")
        )
        found = [tuple(row) for row in rows]
        fence = connection.execute(text("SELECT fence FROM idempotency.records WHERE key = 'new'")).scalar_one()
    assert found == [("after a refusal", "1"), ("left", "1"), ("new", "1"), ("spent", "7")]
    assert fence > 3000000


def test_the_page_says_of_every_table_with_rows_of_a_tenant_what_becomes_of_it(engines: dict[str, Engine]) -> None:
    """And its scripts do that, so that the next table is not forgotten."""
    said = dict(re.findall(r"^\| ([a-z][^|]*) \| (`[a-z_`, ]+`) \|$", Path(PAGE).read_text(), re.MULTILINE))
    kinds = {what: set(re.findall(r"`(\w+)`", tables)) for what, tables in said.items()}
    moved, left, kept, passing = kinds.values()
    of_tenants = """
        SELECT c.relname FROM pg_class c
        WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition AND EXISTS (
            SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname IN ('tenant', 'letter') AND NOT a.attisdropped)
    """
    cascades = """
        SELECT conrelid::regclass::text, confrelid::regclass::text FROM pg_constraint
        WHERE contype = 'f' AND confdeltype = 'c' AND connamespace = 'idempotency'::regnamespace
    """
    with engines["eu"].connect() as connection:
        tables = set(connection.execute(text(of_tenants)).scalars())
        goes_with = {
            (child.split(".")[1], parent.split(".")[1]) for child, parent in connection.execute(text(cascades))
        }
    assert moved | left | kept | passing == tables
    assert len(moved) + len(left) + len(kept) + len(passing) == len(tables)
    close, delete, reopen = blocks(PAGE, "sql")
    (script,) = blocks(PAGE, "sh")
    closed, deleted = (
        set(re.findall(pattern + r" idempotency\.(\w+)", each))
        for pattern, each in (("ALTER TABLE", close), ("DELETE FROM", delete))
    )
    for _ in range(2):  # a delivery's attempts go with it, and it with its endpoint
        deleted |= {child for child, parent in goes_with if parent in deleted}
    assert set(re.findall(r"^copy[ _](\w+)", script, re.MULTILINE)) == moved
    assert closed == set(re.findall(r"ALTER TABLE idempotency\.(\w+)", reopen))
    assert moved < closed < moved | left
    assert deleted == moved | left
