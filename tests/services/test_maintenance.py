"""Recovery and the purge: what they take, what they leave alone, and any number of them at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DataError

from idempotency import IdempotentTask, maintenance, outbox, records
from idempotency import runtime as runtime_module
from idempotency.keys import OperationId
from idempotency.maintenance import BATCH, SPARE_CLAIMS, purge, recover
from idempotency.message import Message
from idempotency.runtime import Runtime, is_provably_dead, process_identity
from tests import bank as b
from tests import operations as op
from tests.deliveries import Deliveries
from tests.operations import age, at_once, completed, due, early, expired, failed, new_id, record, started
from tests.processes import eventually

DAY = 24 * 3600.0


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection


def status(connection: Connection, id: OperationId) -> str | None:
    row = record(connection, id)
    return None if row is None else str(row.status)


def used(connection: Connection, id: OperationId, attempts: int) -> None:
    """Let so many attempts have been used."""
    statement = "UPDATE idempotency.records SET attempts = :attempts WHERE key = :key"
    connection.execute(text(statement), {"attempts": attempts, "key": id.key})


# ---------------------------------------------------------------- what recovery takes


@pytest.mark.parametrize(("short", "ends"), [(1, "released"), (0, "failed")])
def test_an_operation_whose_process_dies_in_every_claim_is_ended_with_a_dead_letter_but_not_before(
    bank: Celery, connection: Connection, short: int, ends: str
) -> None:
    held = expired(connection)
    bound = Runtime.of(bank).settings.max_attempts + SPARE_CLAIMS
    used(connection, held.id, bound - short)
    assert recover(bank) == 1
    row = record(connection, held.id)
    assert row is not None
    letters = connection.execute(
        text("SELECT reason, attempts, payload, headers, status FROM idempotency.dead_letters")
    ).all()
    assert row.status == ends
    if ends == "failed":
        assert [tuple(letter) for letter in letters] == [("attempts_exhausted", bound, op.MESSAGE, "{}", "open")]
        assert row.fence > held.fence  # what the last process may still send matches nothing
        assert op.outbox(connection, held.id) == []
    else:
        assert letters == []


def test_what_is_to_be_ended_is_not_released_because_somebody_had_it_locked_when_it_was_looked_for(
    bank: Celery, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = expired(connection)
    bound = Runtime.of(bank).settings.max_attempts + SPARE_CLAIMS
    used(connection, held.id, bound)
    monkeypatch.setattr(maintenance, "_EXHAUST", "SELECT 0")  # what a look finds that skips every locked row
    assert recover(bank) == 0
    assert (status(connection, held.id), op.outbox(connection, held.id)) == ("started", [])
    monkeypatch.undo()
    assert recover(bank) == 1
    assert status(connection, held.id) == "failed"


def test_an_operation_whose_lease_is_over_is_released_with_its_next_delivery(
    bank: Celery, connection: Connection
) -> None:
    held = expired(connection)
    assert recover(bank) == 1
    row = record(connection, held.id)
    assert row is not None
    assert (row.status, row.token, row.locked_by, row.locked_until) == ("released", None, None, None)
    # a poison message that kills its worker must come to an end: the attempt stays used
    assert (row.attempts, row.fence) == (1, held.fence)
    (delivery,) = op.outbox(connection, held.id)
    assert (delivery.origin, delivery.status) == ("recover", "pending")
    assert (delivery.fingerprint, delivery.message) == (op.FINGERPRINT, op.MESSAGE)
    again = started(connection, held.id)
    assert again.attempts == 2
    assert again.fence > held.fence


@pytest.mark.parametrize("state", [started, early, due, completed, failed])
def test_what_is_held_waits_or_has_ended_is_left_alone(
    bank: Celery, connection: Connection, state: Callable[[Connection], Any]
) -> None:
    untouched, orphan = state(connection), expired(connection)
    before, rows = record(connection, untouched.id), op.outbox(connection, untouched.id)
    assert recover(bank) == 1
    assert record(connection, untouched.id) == before
    assert op.outbox(connection, untouched.id) == rows
    assert status(connection, orphan.id) == "released"


def test_recovering_again_finds_nothing(bank: Celery, connection: Connection) -> None:
    expired(connection)
    assert recover(bank) == 1
    assert recover(bank) == 0
    assert len(op.outbox(connection)) == 1


def test_a_holder_that_finishes_in_this_moment_is_not_recovered(
    bank: Celery, engine: Engine, connection: Connection
) -> None:
    held = expired(connection)
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as holder:
        records.complete(holder, held, "1", retention=60.0, lease=60.0)
        assert recover(bank) == 0
        holder.commit()
    assert status(connection, held.id) == "completed"
    assert recover(bank) == 0
    assert op.outbox(connection, held.id) == []


def test_a_holder_that_was_recovered_finishes_nothing(bank: Celery, connection: Connection) -> None:
    held = expired(connection)
    assert recover(bank) == 1
    with pytest.raises(DataError):
        records.complete(connection, held, "1", retention=60.0, lease=60.0)
    assert status(connection, held.id) == "released"


def test_more_than_one_batch_is_recovered_in_one_sweep(bank: Celery, connection: Connection) -> None:
    number = 2 * BATCH + 1
    fill_with_orphans(connection, number)
    assert recover(bank) == number
    assert len(op.outbox(connection)) == number


def test_a_sweep_may_be_bounded(bank: Celery, connection: Connection) -> None:
    fill_with_orphans(connection, BATCH + 1)
    assert recover(bank, limit=BATCH) == BATCH
    assert recover(bank, limit=BATCH) == 1


def fill_with_orphans(connection: Connection, number: int) -> None:
    connection.execute(
        text("""
            INSERT INTO idempotency.records
                (tenant, operation, key, status, fence, token, locked_until, locked_by, fingerprint, message)
            SELECT 'default', 'o', n::text, 'started', nextval('idempotency.fence'), n::text,
                   clock_timestamp() - interval '1 s', 'h', 'v1:f', '{}'
            FROM generate_series(1, :number) AS n
        """),
        {"number": number},
    )


# ---------------------------------------------------------------- proof of death


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """A real process that says its name and lives until its input ends."""
    script = (
        "import sys; from idempotency.runtime import process_identity as i; print(i(), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        if process.poll() is None:
            process.kill()


def identity(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_live_process_is_never_taken_for_dead_and_a_dead_one_is_at_once(
    bank: Celery, connection: Connection, holder: subprocess.Popen[str]
) -> None:
    held = started(connection, holder=identity(holder))
    assert recover(bank) == 0
    assert status(connection, held.id) == "started"
    holder.kill()
    holder.wait(10)
    assert recover(bank) == 1
    assert status(connection, held.id) == "released"
    (delivery,) = op.outbox(connection, held.id)
    assert delivery.origin == "recover"


def test_a_process_that_ended_but_was_not_waited_for_is_dead(
    bank: Celery, connection: Connection, holder: subprocess.Popen[str]
) -> None:
    held = started(connection, holder=identity(holder))
    assert holder.stdout is not None
    holder.kill()
    assert holder.stdout.read() == ""  # its end is closed: it is gone, and a zombie until somebody waits
    eventually(lambda: recover(bank), timeout=10, what="the zombie's operation")
    assert status(connection, held.id) == "released"


@pytest.mark.parametrize(("part", "what"), [(0, "host"), (1, "boot"), (2, "pid namespace")])
def test_a_process_elsewhere_is_never_proven_dead(
    bank: Celery, connection: Connection, holder: subprocess.Popen[str], part: int, what: str
) -> None:
    name = identity(holder).split("|")
    holder.kill()
    holder.wait(10)
    name[part] = f"another {what}"
    held = started(connection, holder="|".join(name))
    assert recover(bank) == 0
    assert status(connection, held.id) == "started"
    age(connection, held.id, locked_until=-1)
    assert recover(bank) == 1


def test_another_process_under_a_used_pid_does_not_keep_the_operation(bank: Celery, connection: Connection) -> None:
    host, boot, namespace, pid, started_at = process_identity().split("|")
    mine = started(connection, holder=process_identity())
    earlier = started(connection, holder="|".join([host, boot, namespace, pid, str(int(started_at) - 1)]))
    assert recover(bank) == 1
    assert status(connection, earlier.id) == "released"
    assert status(connection, mine.id) == "started"


# A /proc of its own: to remount the one that is there would hide the processes of the whole machine.
SAYS = "import os, sys; from idempotency.runtime import is_provably_dead as dead; os.setgid(65534); os.setuid(65534);"
SAYS += "print(os.path.exists(f'/proc/{sys.argv[1].split(chr(124))[3]}'), dead(sys.argv[1]))"


def seen_under_hidepid(name: str) -> str:
    """What a process of another user, from which /proc hides this one, says: is it to be seen, and is it dead?"""
    script = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", SAYS, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if done.returncode != 0 and "Traceback" not in done.stderr:
        pytest.skip(f"/proc cannot be mounted here: {done.stderr.strip()[:100]}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a /proc of its own")
def test_a_process_that_proc_hides_is_not_dead_until_it_is_gone(holder: subprocess.Popen[str]) -> None:
    name = identity(holder)
    assert seen_under_hidepid(name) == "False False"
    holder.kill()
    holder.wait(10)
    assert seen_under_hidepid(name) == "False True"


def test_a_used_pid_whose_start_cannot_be_compared_proves_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    name = process_identity()
    assert not is_provably_dead(name.rpartition("|")[0] + "|")
    earlier = name.rpartition("|")[0] + "|1"
    assert is_provably_dead(earlier)
    read = runtime_module._read
    monkeypatch.setattr(runtime_module, "_read", lambda path: "" if path.endswith("/stat") else read(path))
    assert not is_provably_dead(earlier)


@pytest.mark.parametrize("name", ["", "?", "a|b|c", "a|b|c|d|e|f"])
def test_a_holder_without_a_readable_name_keeps_its_lease(bank: Celery, connection: Connection, name: str) -> None:
    held = started(connection, holder=name)
    assert recover(bank) == 0
    age(connection, held.id, locked_until=-1)
    assert recover(bank) == 1


# ---------------------------------------------------------------- several at once


def test_recoveries_at_once_release_each_operation_once(bank: Celery, connection: Connection) -> None:
    orphans = [expired(connection) for _ in range(30)]
    live = [started(connection) for _ in range(5)]
    assert sum(at_once(4, lambda _: recover(bank))) == len(orphans)
    for orphan in orphans:
        assert status(connection, orphan.id) == "released"
        assert [row.origin for row in op.outbox(connection, orphan.id)] == ["recover"]
    assert {status(connection, held.id) for held in live} == {"started"}
    assert len(op.outbox(connection)) == len(orphans)


def test_a_recovery_and_takeovers_at_once_leave_each_operation_to_one(
    bank: Celery, engine: Engine, connection: Connection
) -> None:
    orphans = [expired(connection) for _ in range(20)]

    def race(index: int) -> int:
        if index == 0:
            return recover(bank)
        with engine.connect() as own:
            return sum(isinstance(op.claim(own, orphan.id), records.Claimed) for orphan in orphans)

    recovered, taken = at_once(2, race)
    # what was recovered is due, so it may have been claimed after that; nothing was claimed and then released
    assert recovered + taken >= len(orphans)
    assert taken == sum(status(connection, orphan.id) == "started" for orphan in orphans)
    assert recovered == len(op.outbox(connection))


# ---------------------------------------------------------------- the purge


def past_its_time(connection: Connection, state: Callable[..., Any] = completed) -> OperationId:
    held = state(connection)
    age(connection, held.id, expires_at=-1)
    return held.id


def deliver_again(
    connection: Connection, id: OperationId, *, fingerprint: str = op.FINGERPRINT, **columns: str
) -> None:
    """An outbox row of the operation, in the state that the columns say."""
    event_id = outbox.insert(connection, id, fingerprint, Message.from_text(op.MESSAGE))
    changes = ", ".join(f"{column} = {value}" for column, value in columns.items())
    if changes:
        connection.execute(text(f"UPDATE idempotency.outbox SET {changes} WHERE event_id = :id"), {"id": event_id})


PUBLISHED = {"status": "'published'", "published_at": "clock_timestamp()"}


@pytest.mark.parametrize("state", [completed, failed])
def test_an_ended_operation_past_its_retention_is_deleted_with_its_outbox_rows(
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
    assert purge(bank) == 1
    assert op.outbox(connection) == []


def test_an_operation_with_an_open_dead_letter_is_kept_until_it_is_settled(
    bank: Celery, connection: Connection
) -> None:
    id = past_its_time(connection, failed)
    connection.execute(
        text("""
            INSERT INTO idempotency.dead_letters (source, tenant, operation, key, generation, reason, payload)
            VALUES ('operation', :tenant, :operation, :key, 1, 'no_account', '{}')
        """),
        {"tenant": id.tenant, "operation": id.operation, "key": id.key},
    )
    assert purge(bank) == 0
    assert status(connection, id) == "failed"
    connection.execute(text("UPDATE idempotency.dead_letters SET status = 'discarded', settled_at = clock_timestamp()"))
    assert purge(bank) == 1
    # the letter itself is a person's business
    assert len(op.dead_letters(connection, id)) == 1


@pytest.mark.parametrize("state", [completed, failed])
def test_another_tenant_s_rows_keep_nothing_and_are_kept(
    bank: Celery, connection: Connection, state: Callable[..., Any]
) -> None:
    id = past_its_time(connection, state)
    theirs = OperationId("another", id.operation, id.key)
    deliver_again(connection, theirs)
    deliver_again(connection, id, **PUBLISHED)
    assert purge(bank) == 1
    assert record(connection, id) is None
    assert len(op.outbox(connection, theirs)) == 1


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
    assert again.first_claim
    assert again.fence > held.fence


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
