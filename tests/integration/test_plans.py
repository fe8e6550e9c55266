"""How Postgres finds the rows of our statements, by plans made while the tables are empty, as kept ones are.

And by plans made when much more waits than at the last ANALYZE. A plan by the wrong index is right and slow, so no other test
notices it.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterator
from importlib import import_module

import psycopg
import pytest
from celery import Celery
from sqlalchemy import Connection

from idempotency import store
from idempotency.application import runtime_of, settings_of
from idempotency.store import (
    archive,
    batches,
    claims,
    edits,
    effects,
    ends,
    objects,
    outbox,
    overview,
    recover,
    sharers,
)
from idempotency.store.overview import monitoring_connection
from idempotency.store.statements import execute
from idempotency.store.sweeps import Sweep
from tests.support.plans import explain

Plan = Callable[..., str]


@pytest.fixture
def planned(bank: Celery) -> Plan:
    """Explain a statement on a connection like the one it runs on."""

    def planned(statement: str, *, in_session: bool) -> str:
        runtime = runtime_of(bank)
        with runtime.engine.connect() if in_session else runtime.autocommit() as connection:
            return explain(connection, statement)

    return planned


@pytest.mark.parametrize(
    ("name", "in_session"),
    [
        ("_BEGIN_EFFECT", False),
        ("_CHANGE_EFFECT", False),
        ("_COUNT_DUPLICATE", False),
        ("_RELEASE", False),
        ("_RECORD_STEP", True),
        ("_COMPLETE", True),
        ("_COMPLETE", False),
        ("_FAIL", True),
    ],
)
@pytest.mark.plain
def test_a_fenced_write_finds_its_record_by_key(planned: Plan, name: str, in_session: bool) -> None:
    plan = planned((vars(claims) | vars(effects) | vars(ends))[name], in_session=in_session)
    assert "using records_pkey" in plan or "on records_pkey" in plan, plan
    # Small, and so cheap in the planner's eyes: but it holds a dead entry for each operation that has ended.
    assert "records_held" not in plan


@pytest.mark.plain
def test_the_sweep_of_large_results_finds_what_refers_to_one_by_its_index(planned: Plan) -> None:
    plan = planned(objects._UNUSED, in_session=False)
    assert "using records_objects" in plan, plan
    assert "using saga_steps_objects" in plan, plan
    conditions = [line for line in plan.splitlines() if "Index Cond" in line]
    assert len(conditions) == 2, plan
    assert all('"left"(result, 42) = ' in each for each in conditions), plan


@pytest.mark.plain
@pytest.mark.parametrize("statement", [batches._COMPLETE, batches._COMPLETE_TRACED], ids=["plain", "traced"])
def test_the_end_of_a_batch_finds_its_records_by_key(bank: Celery, statement: str) -> None:
    with runtime_of(bank).engine.connect() as connection:
        execute(connection, batches._SETTINGS, {"idle_ms": "1000"})
        plan = explain(connection, statement)
    conditions = [line for line in plan.splitlines() if "Index Cond" in line]
    assert len(conditions) == 2, plan
    assert all("(key = " in each for each in conditions), plan


@pytest.mark.plain
def test_the_answers_of_a_batch_are_found_by_key(planned: Plan) -> None:
    plan = planned(batches._COMPLETED, in_session=False)
    (condition,) = [line for line in plan.splitlines() if "Index Cond" in line]
    assert "(key = " in condition, plan


@pytest.mark.parametrize(
    "statement",
    [recover.RECOVER.batch, recover.EXHAUST.find, recover._HOLDERS],
    ids=["recover", "exhaust", "holders"],
)
def test_a_sweep_reads_only_what_is_held(planned: Plan, statement: str) -> None:
    plan = planned(statement, in_session=False)
    assert "records_held" in plan, plan
    assert "Seq Scan on records" not in plan


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("_ACCEPTED", "outbox_waiting"),
        ("_LIST_ACCEPTED", "outbox_waiting"),
        ("_RELEASED", "records_released"),
        ("_RUNNING", "records_held"),
        ("_UNPUBLISHED", "outbox_pending"),
        ("_UNPUBLISHED", "outbox_failed"),
        ("_OPEN_LETTERS", "dead_letters_open"),
    ],
)
def test_a_count_reads_a_window_of_an_index(bank: Celery, name: str, index: str) -> None:
    with monitoring_connection(settings_of(bank)) as connection:
        query = getattr(overview, name).replace("{listed}", archive.condition(connection, "outside"))
        plan = explain(connection, query.replace("{waits}", edits.waits_for_person(connection)))
    assert index in plan, plan
    assert "Seq Scan" not in plan, plan


def test_the_relay_reads_only_what_is_pending(planned: Plan) -> None:
    plan = planned(outbox._RESERVE_ROWS, in_session=False)
    # A bitmap scan never learns which entries are dead, and reads them in every pass.
    assert "Index Scan using outbox_pending" in plan, plan
    assert "Seq Scan on outbox" not in plan


@pytest.mark.parametrize("name", ["_MARK_PUBLISHED", "_RETURN_ROWS", "_NOTE_ERROR", "_GIVE_UP"])
def test_the_relay_finds_the_rows_it_has_published_by_id(planned: Plan, name: str) -> None:
    plan = planned(getattr(outbox, name), in_session=False)
    assert "outbox_message_id_key" in plan, plan
    assert "outbox_pending" not in plan


def test_the_gauges_read_only_what_is_pending(planned: Plan) -> None:
    plan = planned(overview._UNPUBLISHED, in_session=False)
    assert "outbox_pending" in plan, plan
    assert "outbox_ordered" in plan, plan


def test_who_shares_the_tables_is_read_from_indexes(bank: Celery) -> None:
    with monitoring_connection(settings_of(bank)) as connection:
        plan = explain(connection, sharers._SHARERS)
    for index in ("outbox_pending", "outbox_unnamed", "lanes_due"):
        assert index in plan, plan
    assert "Seq Scan on outbox" not in plan, plan
    assert "Seq Scan on lanes" not in plan, plan


# ---------------------------------------------------------------- after an ANALYZE while nothing waited


# What reads all that waits, runs or is open, because it lists, counts or sweeps it, or asks for it in one statement.
READ_ALL = {
    "approvals._OPEN",
    "archive._COUNT",
    "doubts._LAST",
    "doubts._OF_SAGAS",
    "doubts._OPEN",
    "edits._OPEN_REQUESTS",
    "erasure._COMING",
    "erasure._OBSTACLE",
    "flow._SENT",
    "letter_operations._WITH_OPEN_LETTERS",
    "letter_pages._GROUPS",
    # by a digest, which only an index of open letters has
    "letters._ADOPT",
    "lost._WAITING",
    "lost.SETTLE_ANY",
    "operation_pages._ACCEPTED",
    "operation_pages._LAST_ACCEPTED",
    "overview._ACCEPTED",
    "overview._LIST_ACCEPTED",
    "overview._UNPUBLISHED",
    "testing._OF_SAGAS",
}
OF_WHAT_WAITS = (
    r"outbox_(?:waiting|unsettled|failed)|dead_letters_(?:open|one_message|one_open|one_row|listed)|sagas_running"
)


def statements() -> Iterator[tuple[str, str]]:
    """All statements of the store that stand as a whole in its modules, and some parts of others."""
    for found in pkgutil.iter_modules(store.__path__):
        if found.ispkg:
            continue
        for name, value in vars(import_module(f"{store.__name__}.{found.name}")).items():
            each = [value.unlocked, value.find, value.single] if isinstance(value, Sweep) else [value]
            for statement in each:
                if isinstance(statement, str) and re.match(
                    r"\s*(\(?SELECT|WITH|INSERT|UPDATE|DELETE)\b.*idempotency\.", statement, re.DOTALL
                ):
                    yield f"{found.name}.{name}", statement


def test_one_operation_is_found_without_reading_all_that_waits(bank: Celery, connection: Connection) -> None:
    """The planner takes an index of what waits for the smallest one, if nothing waited when it last looked."""
    rows = """INSERT INTO idempotency.outbox
        (message_id, tenant, task, key, fingerprint, message, queue, origin, available_at, status, published_at, settled_at, service)
        SELECT 'm' || i, 'default', 'a', 'k' || i, 'v1:f', '', 'q', 'enqueue', now(), 'published', now(), {}, 'bank' FROM generate_series({}) i"""
    letters = """INSERT INTO idempotency.dead_letters
        (tenant, task, key, reason, source, fingerprint, outbox_id, payload, status, closed_at)
        SELECT 'default', 'a', 'k' || i, 'r', 'operation', 'v1:f', i, '', {} FROM generate_series({}) i"""
    sagas = """INSERT INTO idempotency.sagas (tenant, task, key, service, generation, entity_id, status, accepted_at)
        SELECT 'default', 'a', 'k' || i, 'bank', 1, 'k' || i, {}, now() FROM generate_series({}) i"""
    ended, waiting = "1, 20000", "20001, 21000"
    connection.exec_driver_sql(rows.format("now()", ended))
    connection.exec_driver_sql(letters.format("'discarded', now()", ended))
    connection.exec_driver_sql(sagas.format("'COMPLETED'", ended))
    connection.exec_driver_sql("VACUUM ANALYZE idempotency.outbox, idempotency.dead_letters, idempotency.sagas")
    connection.exec_driver_sql(rows.format("NULL", waiting))
    connection.exec_driver_sql(letters.format("'open', NULL", waiting))
    connection.exec_driver_sql(sagas.format("'RUNNING'", waiting))
    whole, reads_all = 0, {}
    for name, statement in statements():
        with runtime_of(bank).autocommit() as own:
            try:
                plan = explain(own, statement)
            except psycopg.errors.Error:  # a part of others
                continue
        whole += 1
        lines = plan.splitlines()
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            if re.search(f"Scan (using|on) ({OF_WHAT_WAITS}) ", line) and "Index Cond" not in following:
                reads_all[name] = plan
    assert whole > 100
    assert {name for name, _ in statements()} >= READ_ALL
    assert set(reads_all) <= READ_ALL, "\n".join(reads_all[name] for name in set(reads_all) - READ_ALL)
