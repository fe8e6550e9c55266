"""How Postgres finds the rows of our statements, by plans made while the tables are empty, as kept ones are.

A plan by the wrong index is right and slow, so no other test notices it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import Celery

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
    sharing,
)
from idempotency.store.overview import monitoring_connection
from idempotency.store.statements import execute
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
        plan = explain(connection, sharing._SHARERS)
    for index in ("outbox_pending", "outbox_unnamed", "lanes_due"):
        assert index in plan, plan
    assert "Seq Scan on outbox" not in plan, plan
    assert "Seq Scan on lanes" not in plan, plan
