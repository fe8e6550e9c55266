"""The purge: what it deletes, what it leaves alone, what it costs, and any number at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency import IdempotentTask, events
from idempotency.application import runtime_of
from idempotency.store import forgetting, sweeps
from idempotency.store import purge as past
from idempotency.store.purge import BATCH
from idempotency.upkeep.maintenance import Purged, purge, purge_once
from idempotency.wire.keys import OperationId
from tests.support import bank as b
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.operations import (
    age,
    at_once,
    completed,
    due,
    early,
    expired,
    failed,
    new_id,
    record,
    started,
    status,
)
from tests.support.plans import explain
from tests.support.purging import PUBLISHED, SETTLED, a_retention_later, deliver_again, past_its_time

DAY = 24 * 3600.0


# ---------------------------------------------------------------- operations


def an_hour_later(connection: Connection) -> None:
    """What had to stay is looked at again."""
    connection.execute(text("UPDATE idempotency.records SET kept_until = kept_until - interval '1 hour'"))


@pytest.mark.parametrize("state", [completed, failed])
def test_an_operation_past_its_retention_is_deleted_with_its_outbox_rows(
    bank: Celery, connection: Connection, state: Callable[..., Any]
) -> None:
    id = past_its_time(connection, state)
    deliver_again(connection, id, **PUBLISHED)
    deliver_again(connection, id, **PUBLISHED)
    other = completed(connection).id
    deliver_again(connection, other, **PUBLISHED)
    assert purge(bank) == 1
    assert record(connection, id) is None
    assert op.outbox(connection, id) == []
    assert status(connection, other) == "completed"
    assert len(op.outbox(connection, other)) == 1


@pytest.mark.parametrize("state", [started, expired, early, due, completed, failed])
@pytest.mark.plain
def test_what_has_not_ended_or_is_young_is_kept(
    bank: Celery, connection: Connection, state: Callable[..., Any]
) -> None:
    kept = state(connection).id
    before = record(connection, kept)
    gone = past_its_time(connection)
    assert purge(bank) == 1
    assert record(connection, kept) == before
    assert record(connection, gone) is None


@pytest.mark.parametrize(
    ("unsettled", "settled"),
    [
        ({}, PUBLISHED),
        ({"status": "'failed'", "last_error": "'too large'"}, PUBLISHED | {"last_error": "NULL"}),
        (PUBLISHED | {"fingerprint": "'v1:other'"}, {"fingerprint": f"'{op.FINGERPRINT}'"}),
    ],
    ids=["not published", "never to be published", "of another request"],
)
def test_an_operation_with_an_outbox_row_that_is_not_settled_is_kept(
    bank: Celery, connection: Connection, unsettled: dict[str, str], settled: dict[str, str]
) -> None:
    id = past_its_time(connection)
    deliver_again(connection, id, **PUBLISHED)
    deliver_again(connection, id, **unsettled)
    assert purge(bank) == 0
    assert status(connection, id) == "completed"
    assert len(op.outbox(connection, id)) == 2
    changes = ", ".join(f"{column} = {value}" for column, value in settled.items())
    connection.execute(text(f"UPDATE idempotency.outbox SET {changes}"))
    an_hour_later(connection)
    assert purge(bank) == 1
    assert op.outbox(connection) == []


def test_an_operation_with_an_open_dead_letter_is_kept_until_it_is_closed(bank: Celery, connection: Connection) -> None:
    id = past_its_time(connection, failed)
    connection.execute(
        text("""
            INSERT INTO idempotency.dead_letters (source, tenant, task, key, generation, reason, payload)
            VALUES ('operation', :tenant, :task, :key, 1, 'no_account', '{}')
        """),
        {"tenant": id.tenant, "task": id.task, "key": id.key},
    )
    assert purge(bank) == 0
    assert status(connection, id) == "failed"
    connection.execute(text("UPDATE idempotency.dead_letters SET status = 'discarded', closed_at = clock_timestamp()"))
    an_hour_later(connection)
    assert purge(bank) == 1
    # a person decides about the letter itself
    assert len(op.dead_letters(connection, id)) == 1


@pytest.mark.parametrize("settled_at", ["NULL", "clock_timestamp()"], ids=["not settled", "settled"])
@pytest.mark.parametrize("state", [completed, failed])
def test_a_record_outlives_every_message_that_may_still_be_delivered(
    bank: Celery, connection: Connection, state: Callable[..., Any], settled_at: str
) -> None:
    id = past_its_time(connection, state)
    deliver_again(connection, id, **PUBLISHED, settled_at="clock_timestamp()")
    deliver_again(connection, id, **PUBLISHED | {"published_at": "clock_timestamp()"}, settled_at=settled_at)
    before = record(connection, id)
    assert purge(bank) == 0
    kept = record(connection, id)
    assert kept is not None
    assert before is not None
    assert (kept.status, len(op.outbox(connection, id))) == (before.status, 2)
    # not every hour: until the last of them has become too old, by the setting
    (published_at,) = {row.published_at for row in op.outbox(connection, id)[1:]}
    assert (kept.kept_until - published_at).total_seconds() == pytest.approx(DAY)
    connection.execute(
        text("""UPDATE idempotency.outbox SET published_at = published_at - interval '1 day';
                UPDATE idempotency.records SET kept_until = kept_until - interval '1 day'""")
    )
    assert purge(bank) == 1
    assert (record(connection, id), op.outbox(connection, id)) == (None, [])


@pytest.mark.parametrize("state", [completed, failed])
def test_another_tenant_s_rows_keep_nothing_and_are_kept(
    bank: Celery, connection: Connection, state: Callable[..., Any]
) -> None:
    id = past_its_time(connection, state)
    theirs = OperationId("another", id.task, id.key)
    deliver_again(connection, theirs)
    deliver_again(connection, id, **PUBLISHED)
    assert purge(bank) == 1
    assert record(connection, id) is None
    assert len(op.outbox(connection, theirs)) == 1


@pytest.mark.plain
def test_purges_at_once_delete_each_operation_once(bank: Celery, connection: Connection) -> None:
    gone = [past_its_time(connection) for _ in range(30)]
    kept = [completed(connection).id for _ in range(5)]
    for id in gone + kept:
        deliver_again(connection, id, **PUBLISHED)
    assert sum(at_once(4, lambda _: purge(bank))) == len(gone)
    assert all(record(connection, id) is None for id in gone)
    assert all(record(connection, id) is not None for id in kept)
    assert len(op.outbox(connection)) == len(kept)


def test_a_purged_key_is_new_again_under_a_higher_fence(bank: Celery, connection: Connection) -> None:
    held = completed(connection)
    age(connection, held.id, expires_at=-1)
    assert purge(bank) == 1
    again = started(connection, held.id, fingerprint="v1:another request")
    assert again.attempts == 1
    assert again.fence > held.fence


# ---------------------------------------------------------------- rows without a record

# Ways in which a row is settled without a record.
SETTLED_ALONE = {
    "an external event": SETTLED | {"task": "'idempotency.external_event'"},
    "discarded": SETTLED,
    "never to be published": SETTLED | {"status": "'failed'", "last_error": "'too large'", "published_at": "NULL"},
    "sent by a replay": SETTLED | {"origin": "'replay'"},
}


def letter(connection: Connection, id: OperationId, *, of_row: bool, closed_days_ago: int | None = None) -> None:
    """A dead letter that names the operation or only its outbox row."""
    connection.execute(
        text("""
            INSERT INTO idempotency.dead_letters
                (source, outbox_id, tenant, task, key, reason, payload, status, closed_at)
            SELECT 'broker', CASE WHEN :of_row THEN (SELECT id FROM idempotency.outbox WHERE key = :key) END,
                   CASE WHEN NOT :of_row THEN :tenant END, CASE WHEN NOT :of_row THEN :task END,
                   CASE WHEN NOT :of_row THEN :key END, 'unpublishable', '{}',
                   CASE WHEN cast(:days AS int) IS NULL THEN 'open' ELSE 'discarded' END,
                   clock_timestamp() - make_interval(days => :days)
        """),
        {
            "of_row": of_row,
            "tenant": id.tenant,
            "task": id.task,
            "key": id.key,
            "days": closed_days_ago,
        },
    )


@pytest.mark.parametrize("columns", SETTLED_ALONE.values(), ids=SETTLED_ALONE)
def test_a_settled_row_without_a_record_is_purged(
    bank: Celery, connection: Connection, columns: dict[str, str]
) -> None:
    deliver_again(connection, new_id(), **columns)
    young = new_id()
    deliver_again(connection, young, **columns | {"settled_at": "clock_timestamp() - interval '2 days'"})
    assert purge_once(bank, limit=BATCH) == Purged(operations=0, rows=1, letters=0, more=False)
    assert [row.key for row in op.outbox(connection)] == [young.key]


@pytest.mark.parametrize(("status", "days"), [("published", 3), ("failed", 30)])
def test_a_settled_row_is_kept_as_long_as_an_operation_would_be(
    bank: Celery, connection: Connection, status: str, days: int
) -> None:
    columns = PUBLISHED | {"status": f"'{status}'", "last_error": "'too large'"}
    for hours in (-1, 1):
        deliver_again(
            connection,
            new_id(),
            **columns | {"settled_at": f"clock_timestamp() - interval '{days * 24 + hours} hours'"},
        )
    assert purge_once(bank, limit=BATCH).rows == 1
    assert len(op.outbox(connection)) == 1


@pytest.mark.parametrize(
    "columns",
    [
        {"status": "'pending'", "published_at": "NULL"},
        {"settled_at": "NULL"},
        {"settled_at": "NULL", "status": "'failed'", "last_error": "'too large'"},
    ],
    ids=["not published", "not settled", "failed and not settled"],
)
def test_a_row_that_is_not_published_or_not_settled_is_never_purged(
    bank: Celery, connection: Connection, columns: dict[str, str]
) -> None:
    id = new_id()
    deliver_again(connection, id, **SETTLED | columns)
    connection.execute(text("UPDATE idempotency.outbox SET created_at = '2020-01-01', available_at = '2020-01-01'"))
    assert purge_once(bank, limit=BATCH).rows == 0
    # nor with a record: it keeps that
    completed(connection, id)
    age(connection, id, expires_at=-1)
    expected = 1 if columns == {"settled_at": "NULL"} else 0  # published, and its operation has ended
    assert purge(bank) == expected
    assert len(op.outbox(connection, id)) == 1 - expected


@pytest.mark.few(3)
@pytest.mark.parametrize("of_row", [False, True], ids=["of its operation", "of the row"])
@pytest.mark.parametrize("columns", SETTLED_ALONE.values(), ids=SETTLED_ALONE)
def test_an_open_dead_letter_keeps_its_row(
    bank: Celery, connection: Connection, columns: dict[str, str], of_row: bool
) -> None:
    id = new_id(task=columns.get("task", "'tests.support.bank.deposit'").strip("'"))
    deliver_again(connection, id, **columns)
    letter(connection, id, of_row=of_row)
    assert purge_once(bank, limit=BATCH).rows == 0
    connection.execute(text("UPDATE idempotency.dead_letters SET status = 'discarded', closed_at = clock_timestamp()"))
    assert purge_once(bank, limit=BATCH).rows == 0  # it was looked at a moment ago
    a_retention_later(connection)
    assert purge_once(bank, limit=BATCH).rows == 1


def test_a_record_keeps_its_rows_until_it_has_ended_or_is_gone(bank: Celery, connection: Connection) -> None:
    id = due(connection).id
    deliver_again(connection, id, **SETTLED)
    assert purge_once(bank, limit=BATCH).rows == 0
    a_retention_later(connection)
    assert purge_once(bank, limit=BATCH).rows == 0
    connection.execute(text("DELETE FROM idempotency.records"))
    a_retention_later(connection)
    assert purge_once(bank, limit=BATCH).rows == 1


def test_a_row_published_long_after_it_was_settled_keeps_its_record(bank: Celery, connection: Connection) -> None:
    """The broker was away; another delivery ended the operation meanwhile, and this one is still on its way."""
    id = past_its_time(connection)
    deliver_again(connection, id, **SETTLED | {"published_at": "clock_timestamp()"})
    a_retention_later(connection)
    assert purge_once(bank, limit=BATCH).rows == 0
    an_hour_later(connection)
    assert (purge(bank), status(connection, id)) == (0, "completed")


def test_an_external_event_is_purged_once_published_and_not_before(
    bank: Celery, connection: Connection, engine: Engine
) -> None:
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as publisher, publisher.begin():
        events.publish(publisher, "order.paid", {"id": 1}, exchange="events", app=bank)
    connection.execute(text("UPDATE idempotency.outbox SET settled_at = settled_at - interval '4 days'"))
    assert purge_once(bank, limit=BATCH).rows == 0
    connection.execute(text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()"))
    assert purge_once(bank, limit=BATCH).rows == 1


# ---------------------------------------------------------------- letters, alerts, what was set aside


def test_a_closed_letter_goes_with_the_request_to_discard_it(bank: Celery, connection: Connection) -> None:
    for days in (31, 29, None):
        letter(connection, new_id(), of_row=False, closed_days_ago=days)
    connection.execute(
        text("""INSERT INTO idempotency.discards (letter, requested_by, reason)
                SELECT id, 'eve', 'closed' FROM idempotency.dead_letters""")
    )
    assert purge_once(bank, limit=BATCH).letters == 1
    assert [letter.status for letter in op.dead_letters(connection)] == ["discarded", "open"]
    assert connection.execute(text("SELECT count(*) FROM idempotency.discards")).scalar_one() == 2


def test_what_alerts_and_sweeps_remember_is_forgotten_in_time(bank: Celery, connection: Connection) -> None:
    connection.exec_driver_sql("""
        INSERT INTO idempotency.alerts VALUES
            ('old', clock_timestamp() - interval '31 days'), ('report', clock_timestamp() - interval '8 days');
        INSERT INTO idempotency.set_aside (sweep, id, error, until) VALUES
            ('recover', 'old', 'e', clock_timestamp() - interval '25 hours'), ('recover', 'new', 'e', clock_timestamp())
    """)
    purge(bank)
    assert connection.execute(text("SELECT kind FROM idempotency.alerts")).scalars().all() == ["report"]
    assert connection.execute(text("SELECT id FROM idempotency.set_aside")).scalars().all() == ["new"]


@pytest.mark.parametrize("table", ["outbox", "dead_letters"])
def test_a_row_or_letter_that_cannot_be_deleted_keeps_no_other(
    bank: Celery, connection: Connection, table: str
) -> None:
    for key in ("bad", "good"):
        id = OperationId("default", "tests.support.bank.deposit", key)
        if table == "outbox":
            deliver_again(connection, id, **SETTLED)
        else:
            letter(connection, id, of_row=False, closed_days_ago=31)
    connection.exec_driver_sql(f"""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN IF OLD.key = 'bad' THEN RAISE EXCEPTION 'not this one'; END IF; RETURN OLD; END $$;
        CREATE TRIGGER bad BEFORE DELETE ON idempotency.{table} FOR EACH ROW EXECUTE FUNCTION refuse()
    """)
    purged = purge_once(bank, limit=BATCH)
    assert (purged.rows, purged.letters) == ((1, 0) if table == "outbox" else (0, 1))
    left = connection.execute(text(f"SELECT key FROM idempotency.{table}")).scalars().all()
    aside = connection.execute(text("SELECT key FROM idempotency.set_aside")).scalars().all()
    assert (left, aside) == (["bad"], ["bad"])


# ---------------------------------------------------------------- what it costs

# In each table: so many that stay, of every kind there is, and so many that go.
STAY, GO = 5_000, 100
MANY = f"""
INSERT INTO idempotency.records (tenant, task, key, status, fence, fingerprint, message, result, response_code,
                                 error, error_code, completed_at, service, expires_at)
SELECT 'default', 'o', kind || n, CASE kind WHEN 'letter' THEN 'failed' ELSE 'completed' END, n, 'f', '{{}}',
       CASE kind WHEN 'letter' THEN NULL ELSE '1' END, 200, CASE kind WHEN 'letter' THEN '{{}}' END,
       CASE kind WHEN 'letter' THEN 'no' END, clock_timestamp(), 'bank',
       clock_timestamp() + CASE kind WHEN 'young' THEN interval '1 day' WHEN 'gone' THEN interval '-1 hour'
                                     ELSE interval '-2 days' END
FROM unnest(ARRAY['young', 'letter', 'unsent', 'sent', 'gone']) kind,
     generate_series(1, CASE kind WHEN 'gone' THEN {GO} ELSE {STAY} END) n;

INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, origin, status, published_at,
                                settled_at, service)
SELECT 'r' || key, tenant, task, key, fingerprint, message, 'enqueue',
       CASE WHEN starts_with(key, 'unsent') THEN 'pending' ELSE 'published' END,
       clock_timestamp() - CASE WHEN starts_with(key, 'sent') THEN interval '0' ELSE interval '40 days' END,
       CASE WHEN NOT starts_with(key, 'unsent') THEN clock_timestamp() - interval '40 days' END, service
FROM idempotency.records;
INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, origin, status, published_at,
                                settled_at, last_error, service)
SELECT kind || n, 'default', 'alone', kind || n, 'f', '{{}}', 'enqueue',
       CASE kind WHEN 'failed' THEN 'failed' ELSE 'published' END, clock_timestamp(),
       CASE kind WHEN 'unsettled' THEN NULL WHEN 'young' THEN clock_timestamp()
                 ELSE clock_timestamp() - interval '40 days' END, 'too large', 'bank'
FROM unnest(ARRAY['young', 'unsettled', 'failed', 'gone']) kind,
     generate_series(1, CASE kind WHEN 'gone' THEN {GO} ELSE {STAY} END) n;

INSERT INTO idempotency.dead_letters (source, tenant, task, key, generation, reason, payload, status, closed_at)
SELECT 'operation', tenant, task, key, 1, 'no', '{{}}', 'open', NULL::timestamptz FROM idempotency.outbox
WHERE starts_with(key, 'letter') OR starts_with(key, 'failed')
UNION ALL
SELECT 'operation', 'default', 'o', 'closed' || n, 1, 'no', '{{}}', 'discarded',
       clock_timestamp() - CASE WHEN n <= {GO} THEN interval '90 days' ELSE interval '1 day' END
FROM generate_series(1, {STAY} + {GO}) n;
ANALYZE
"""
# Of another application, whose relay is gone.
OTHERS = f"""
INSERT INTO idempotency.records (tenant, task, key, status, fence, fingerprint, message, result, response_code,
                                 completed_at, expires_at, service)
SELECT 'default', 'place', n::text, 'completed', n, 'f', '{{}}', '1', 200, clock_timestamp(),
       clock_timestamp() - interval '90 days', 'orders' FROM generate_series(1, {STAY}) n;
INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, origin, status, published_at,
                                settled_at, last_error, service)
SELECT 'orders' || status || n, 'default', 'place', n::text, 'f', '{{}}', 'enqueue', status, clock_timestamp(),
       clock_timestamp() - interval '90 days', 'e', 'orders'
FROM generate_series(1, {STAY}) n, unnest(ARRAY['published', 'failed']) status
"""
SWEEPS: dict[str, tuple[sweeps.Sweep, dict[str, Any], str]] = {
    "letters": (past.LETTERS, {"retention": 30 * DAY}, "dead_letters_closed"),
    "operations": (past.OPERATIONS, {"keep": 3600.0, "horizon": DAY}, "records_purgeable"),
    "published rows": (
        past.ROWS,
        {"status": "published", "retention": 3 * DAY, "horizon": DAY},
        "outbox_settled",
    ),
    "failed rows": (past.ROWS, {"status": "failed", "retention": 30 * DAY, "horizon": DAY}, "outbox_settled"),
    "events": (forgetting.EVENTS, {"retention": 30 * DAY}, "saga_events_received"),
    "observed": (forgetting.OBSERVED, {"retention": 30 * DAY}, "sagas_over"),
    "deliveries": (forgetting.DELIVERIES, {"retention": 30 * DAY}, "webhook_deliveries_ended"),
    "former requests": (forgetting.FORMER, {}, "former_fingerprints_pkey"),
}


@pytest.fixture
def many(bank: Celery, connection: Connection) -> Celery:
    connection.exec_driver_sql(MANY)
    return bank


@pytest.mark.long
def test_the_purge_deletes_the_right_rows_among_many_that_stay(many: Celery, connection: Connection) -> None:
    rows, letters = len(op.outbox(connection)), len(op.dead_letters(connection))
    assert purge_once(many, limit=100_000) == Purged(operations=GO, rows=GO + STAY, letters=GO, more=False)
    assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 4 * STAY
    assert len(op.outbox(connection)) == rows - 2 * GO - STAY  # those of young records, too
    assert len(op.dead_letters(connection)) == letters - GO


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize("planned_while", ["empty", "full"])
@pytest.mark.plain
def test_a_purge_finds_its_rows_by_index_in_order(
    bank: Celery, connection: Connection, name: str, planned_while: str
) -> None:
    if planned_while == "full":
        connection.exec_driver_sql(MANY)
    sweep, _, index = SWEEPS[name]
    with runtime_of(bank).autocommit() as planning, sweeps.sweep_settings(planning):
        plan = explain(planning, sweep.batch)
    assert f"Index Scan using {index}" in plan, plan
    due = plan[: plan.index("->  Index Scan using " + index)]
    assert "Sort" not in due, plan  # sorting reads everything that is due, for each batch
    assert "Seq Scan" not in plan.replace("Seq Scan on set_aside", ""), plan


@pytest.mark.parametrize(
    ("statement", "index"),
    [(forgetting._ALERTS, "alerts_sent"), (forgetting._SET_ASIDE, "set_aside_until")],
)
def test_what_is_forgotten_is_found_by_index(bank: Celery, statement: str, index: str) -> None:
    with runtime_of(bank).autocommit() as planning:
        assert index in explain(planning, statement)


@pytest.mark.long
def test_what_stays_costs_the_next_purge_nothing(many: Celery, connection: Connection) -> None:
    purge_once(many, limit=100_000)
    connection.exec_driver_sql(OTHERS)
    connection.exec_driver_sql("VACUUM ANALYZE idempotency.records, idempotency.outbox, idempotency.dead_letters")
    for name, (sweep, parameters, _) in SWEEPS.items():
        with runtime_of(many).autocommit() as planning, sweeps.sweep_settings(planning):
            explained = planning.exec_driver_sql(
                f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sweep.batch}",
                {**parameters, "service": op.SERVICE, "batch": BATCH},
            ).scalar_one()
        plan = explained[0]["Plan"]
        # a few pages of an index; the tables have hundreds
        assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 20, (name, explained)


def test_a_pass_of_the_purge_is_bounded_and_says_that_there_is_more(bank: Celery, connection: Connection) -> None:
    connection.execute(
        text("""INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, origin, status,
                                                published_at, settled_at)
                SELECT n::text, 'default', 'o', n::text, 'f', '{}', 'enqueue', 'published', clock_timestamp(),
                       clock_timestamp() - interval '40 days' FROM generate_series(1, :number) n"""),
        {"number": 2 * BATCH + 1},
    )
    passes = [purge_once(bank, limit=BATCH) for _ in range(3)]
    assert [(purged.rows, purged.more) for purged in passes] == [(BATCH, True), (BATCH, True), (1, False)]


# ---------------------------------------------------------------- retention


@b.app.task(base=IdempotentTask, bind=True, key="{account}", name="tests.brief", retention_completed=2 * DAY)
def brief(self: IdempotentTask, account: str) -> str:
    return account


@b.app.task(
    base=IdempotentTask,
    bind=True,
    key="{account}",
    name="tests.briefly_failing",
    max_attempts=1,
    retention_failed=3 * DAY,
)
def briefly_failing(self: IdempotentTask, account: str) -> None:
    raise ValueError(account)


@pytest.mark.parametrize(
    ("task", "arguments", "seconds"),
    [
        (b.deposit, ("a1", 5), 3 * DAY),
        (b.failing, ("a1", "permanent"), 30 * DAY),
        (brief, ("a1",), 2 * DAY),
        (briefly_failing, ("a1",), 3 * DAY),
    ],
    ids=["completed", "failed", "completed, of the task", "failed, of the task"],
)
def test_an_operation_is_kept_as_long_as_its_end_and_its_task_say(
    deliveries: Deliveries, connection: Connection, task: Any, arguments: tuple[Any, ...], seconds: float
) -> None:
    deliveries.deliver(task, *arguments)
    row = record(connection, OperationId("default", task.name, "a1"))
    assert row is not None
    assert (row.expires_at - row.completed_at).total_seconds() == pytest.approx(seconds, abs=5)


def test_a_new_operation_is_not_purged_however_often_the_purge_runs(
    deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(b.deposit, "a1", 5)
    assert [purge(deliveries.app) for _ in range(3)] == [0, 0, 0]
    id = OperationId("default", b.deposit.name, "a1")
    age(connection, id, expires_at=-0.001)
    assert purge(deliveries.app) == 1
    assert record(connection, new_id()) is None
