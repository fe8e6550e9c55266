"""Recovery: what it releases, what it leaves alone, and many at once; and bad rows, which stop no sweep."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from prometheus_client import REGISTRY
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import DataError, OperationalError, ProgrammingError

from idempotency.application import runtime_of
from idempotency.attempt import liveness
from idempotency.attempt.liveness import is_provably_dead, process_identity
from idempotency.settings import Settings
from idempotency.store import ends as ending
from idempotency.store import outbox, sweeps
from idempotency.store.answers import Claimed
from idempotency.store.recover import SPARE_CLAIMS
from idempotency.store.sweeps import BATCH
from idempotency.upkeep.maintenance import purge, recover
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from tests.support import operations as op
from tests.support.operations import age, at_once, completed, due, early, expired, failed, record, started, status
from tests.support.processes import eventually


def used(connection: Connection, id: OperationId, attempts: int) -> None:
    """Let so many attempts have been used, and the settings' own number have been found used up by the next one."""
    statement = "UPDATE idempotency.records SET attempts = :attempts, spent_at = :spent_at WHERE key = :key"
    most = Settings.model_fields["max_attempts"].default
    connection.execute(text(statement), {"attempts": attempts, "spent_at": most + 1, "key": id.key})


# ---------------------------------------------------------------- what recovery takes


@pytest.mark.parametrize(("short", "ends"), [(1, "released"), (0, "failed")])
def test_what_dies_in_every_claim_is_ended_with_a_letter_in_time(
    bank: Celery, connection: Connection, short: int, ends: str
) -> None:
    held = expired(connection)
    bound = runtime_of(bank).settings.max_attempts + SPARE_CLAIMS
    used(connection, held.id, bound - short)
    assert recover(bank) == 1
    row = record(connection, held.id)
    assert row is not None
    letters = connection.execute(
        text("SELECT reason, attempts, payload, headers, status FROM idempotency.dead_letters")
    ).all()
    assert row.status == ends
    if ends == "failed":
        assert [tuple(letter) for letter in letters] == [
            ("on_failed_error", bound, op.MESSAGE, "{}", "open")
        ]  # which was not run
        assert not ending.release(connection, held, delay=0.0, error=None)  # its last process changes nothing any more
        assert op.outbox(connection, held.id) == []
    else:
        assert letters == []


def test_a_spent_operation_that_was_locked_is_not_released(
    bank: Celery, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = expired(connection)
    bound = runtime_of(bank).settings.max_attempts + SPARE_CLAIMS
    used(connection, held.id, bound)
    monkeypatch.setattr(sweeps, "find", lambda *_: [])  # what a look finds that skips every locked row
    assert recover(bank) == 0
    assert (status(connection, held.id), op.outbox(connection, held.id)) == ("started", [])
    monkeypatch.undo()
    assert recover(bank) == 1
    assert status(connection, held.id) == "failed"


def test_an_operation_past_its_lease_is_released_with_its_next_delivery(bank: Celery, connection: Connection) -> None:
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
        ending.complete(holder, held, "1", retention=60.0, lease=60.0)
        assert recover(bank) == 0
        holder.commit()
    assert status(connection, held.id) == "completed"
    assert recover(bank) == 0
    assert op.outbox(connection, held.id) == []


def test_a_holder_that_was_recovered_finishes_nothing(bank: Celery, connection: Connection) -> None:
    held = expired(connection)
    assert recover(bank) == 1
    with pytest.raises(DataError):
        ending.complete(connection, held, "1", retention=60.0, lease=60.0)
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
                (tenant, task, key, status, fence, token, locked_until, locked_by, fingerprint, message, service)
            SELECT 'default', 'o', n::text, 'started', nextval('idempotency.fence'), n::text,
                   clock_timestamp() - interval '1 s', 'h', 'v1:f', '{}', 'bank'
            FROM generate_series(1, :number) AS n
        """),
        {"number": number},
    )


# ---------------------------------------------------------------- proof of death


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """A real process that prints its holder name and lives until its input ends."""
    script = "import sys; from idempotency.attempt.liveness import process_identity as i; print(i(), flush=True); sys.stdin.read()"
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
    assert holder.stdout.read() == ""  # its end is closed: it is gone, and a zombie until its parent waits
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


def recovered(cause: str) -> float:
    return REGISTRY.get_sample_value("idempotency_recovered_total", {"cause": cause}) or 0.0


@pytest.mark.parametrize("refused", [False, True])
def test_each_recovered_operation_counts_under_its_own_cause(
    bank: Celery, connection: Connection, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """Also where a row is refused, and each is handled alone."""
    host, boot, namespace, pid, started_at = process_identity().split("|")
    started(connection, holder="|".join([host, boot, namespace, pid, str(int(started_at) - 1)]))
    for _ in range(2):
        expired(connection)
    if refused:
        bad = expired(connection).id.key
        connection.exec_driver_sql(
            f"ALTER TABLE idempotency.records ADD CHECK (key <> '{bad}' OR status = 'started') NOT VALID"
        )
    before = {cause: recovered(cause) for cause in ("dead_holder", "lease_over")}
    assert recover(bank) == 3
    assert {cause: recovered(cause) - before[cause] for cause in before} == {"dead_holder": 1, "lease_over": 2}


# A private /proc: to remount the one that is there would hide the processes of the whole machine.
SAYS = "import os, sys; from idempotency.attempt.liveness import is_provably_dead as dead; os.setgid(65534); os.setuid(65534);"
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


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a private /proc")
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
    read = liveness._read
    monkeypatch.setattr(liveness, "_read", lambda path: "" if path.endswith("/stat") else read(path))
    assert not is_provably_dead(earlier)


# Linux cuts a process's name after fifteen bytes; 15 is PR_SET_NAME.
RENAMES_ITSELF = """
import ctypes
from idempotency.attempt.liveness import is_provably_dead, process_identity
ctypes.CDLL(None).prctl(15, b"cut inside \\xc3")
name = process_identity()
print(name, is_provably_dead(name), is_provably_dead(name.rpartition("|")[0] + "|1"), sep="\\n")
"""


def test_a_process_whose_name_is_cut_inside_a_character_can_be_named() -> None:
    done = subprocess.run([sys.executable, "-c", RENAMES_ITSELF], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    name, itself, earlier = done.stdout.splitlines()
    assert len(name.split("|")) == 5
    assert (itself, earlier) == ("False", "True")


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
            return sum(isinstance(op.claim(own, orphan.id), Claimed) for orphan in orphans)

    recovered, taken = at_once(2, race)
    # what was recovered is due, so it may have been claimed after that; nothing was claimed and then released
    assert recovered + taken >= len(orphans)
    assert taken == sum(status(connection, orphan.id) == "started" for orphan in orphans)
    assert recovered == len(op.outbox(connection))


@pytest.mark.direct
@pytest.mark.parametrize("sweep", [recover, purge])
def test_a_sweep_whose_connection_breaks_says_that_postgres_is_away(
    sweep: Callable[[Celery], int], bank: Celery, connection: Connection
) -> None:
    """At its end, when its settings are put back."""
    expired(connection)
    engine = runtime_of(bank)._autocommit_engine

    def ended(conn: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> tuple[str, Any]:
        return (
            "SELECT pg_terminate_backend(pg_backend_pid())" if statement.startswith("RESET") else statement
        ), parameters

    event.listen(engine, "before_cursor_execute", ended, retval=True)
    try:
        with pytest.raises(OperationalError):  # which a relay waits for, and a command explains
            sweep(bank)
    finally:
        event.remove(engine, "before_cursor_execute", ended)
    sweep(bank)


# ---------------------------------------------------------------- one bad row


def message(headers: str) -> str:
    return f'{{"headers": {headers}, "properties": {{}}, "route": {{}}, "body": "[[], {{}}, {{}}]"}}'


def spent(bank: Celery, connection: Connection, id: OperationId | None = None, **options: Any) -> OperationId:
    """An operation whose process died in every claim."""
    held = expired(connection, id, **options)
    used(connection, held.id, runtime_of(bank).settings.max_attempts + SPARE_CLAIMS)
    return held.id


@pytest.mark.parametrize(
    ("stored", "kept"),
    [
        (message(r'{"task": "t", "note": "\u0000"}'), r'{"task": "t", "note": "\u0000"}'),
        (message(r'{"note": "\ud800"}'), r'{"note": "\ud800"}'),
        (message("[1, 2]"), "{}"),
        ('{"headers": {', "{}"),
        ("", "{}"),
        ("[" * 100_000, "{}"),
    ],
    ids=["NUL", "half a pair", "no object", "cut", "empty", "nested"],
)
def test_headers_that_postgres_cannot_read_stop_no_recovery(
    bank: Celery, connection: Connection, stored: str, kept: str
) -> None:
    bad, other, orphan = spent(bank, connection, message=stored), spent(bank, connection), expired(connection)
    assert recover(bank) == 3
    assert [status(connection, id) for id in (bad, other, orphan.id)] == ["failed", "failed", "released"]
    (letter,) = op.dead_letters(connection, bad)
    assert (letter.reason, letter.headers, letter.payload) == ("on_failed_error", kept, stored)


RAISING = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.key = 'bad' THEN RAISE EXCEPTION 'not this one'; END IF;
    RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
END $$;
"""
# Ways in which Postgres refuses one row, and how that comes to an end.
REFUSALS = {
    "trigger": (
        RAISING
        + "CREATE TRIGGER bad BEFORE UPDATE OR DELETE ON idempotency.records FOR EACH ROW EXECUTE FUNCTION refuse()",
        "DROP FUNCTION refuse CASCADE",
    ),
    "trigger at COMMIT": (
        RAISING
        + "CREATE CONSTRAINT TRIGGER bad AFTER UPDATE OR DELETE ON idempotency.records DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION refuse()",
        "DROP FUNCTION refuse CASCADE",
    ),
    "foreign key": (
        "CREATE TABLE kept (tenant text, task text, key text, FOREIGN KEY (tenant, task, key) "
        "REFERENCES idempotency.records ON UPDATE RESTRICT);"
        "INSERT INTO kept SELECT tenant, task, key FROM idempotency.records WHERE key = 'bad'",
        "DROP TABLE kept",
    ),
    "CHECK": (
        "ALTER TABLE idempotency.outbox ADD CONSTRAINT bad CHECK (key <> 'bad') NOT VALID;"
        "ALTER TABLE idempotency.dead_letters ADD CONSTRAINT bad CHECK (key <> 'bad') NOT VALID",
        "ALTER TABLE idempotency.outbox DROP CONSTRAINT bad; ALTER TABLE idempotency.dead_letters DROP CONSTRAINT bad",
    ),
    "unique": (
        "CREATE UNIQUE INDEX one_of_many ON idempotency.outbox (key) WHERE key = 'bad';"
        "INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, origin, settled_at)"
        " VALUES ('there', 'default', 'other', 'bad', 'f', '{}', 'enqueue', clock_timestamp())",
        "DROP INDEX idempotency.one_of_many",
    ),
    "index entry": (
        """CREATE FUNCTION large(text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
               SELECT CASE WHEN $1 = 'bad' THEN (SELECT string_agg(md5(n::text), '') FROM generate_series(1, 300) n) END
           $$;
           CREATE INDEX large_rows ON idempotency.outbox (large(key));
           CREATE INDEX large_letters ON idempotency.dead_letters (large(key))""",
        "DROP FUNCTION large CASCADE",
    ),
}


def states(bank: Celery, connection: Connection, sweep: str, key: str) -> OperationId:
    """An operation that this sweep handles."""
    id = OperationId("default", "tests.support.bank.deposit", key)
    match sweep:
        case "recover":
            expired(connection, id)
        case "exhaust":
            spent(bank, connection, id)
        case "purge":
            completed(connection, id)
            age(connection, id, expires_at=-1)
    return id


DONE = {"recover": "released", "exhaust": "failed", "purge": None}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("sweep", "refusal"),
    [
        *[(sweep, refusal) for sweep in DONE for refusal in ("trigger", "trigger at COMMIT")],
        *[(sweep, refusal) for sweep in ("recover", "exhaust") for refusal in ("CHECK", "index entry")],
        ("recover", "unique"),
        ("purge", "foreign key"),
    ],
)
@pytest.mark.plain
def test_a_row_that_raises_is_set_aside_and_tried_again(
    bank: Celery, connection: Connection, sweep: str, refusal: str
) -> None:
    bad = states(bank, connection, sweep, "bad")
    others = [states(bank, connection, sweep, f"good {number}") for number in range(3)]
    begin, end = REFUSALS[refusal]
    connection.exec_driver_sql(begin)
    before = record(connection, bad)
    assert recover(bank) + purge(bank) == 3
    assert {status(connection, id) for id in others} == {DONE[sweep]}
    assert record(connection, bad) == before
    (aside,) = set_aside(connection)
    assert (aside.sweep, aside.key, aside.times) == (sweep, "bad", 1)
    connection.exec_driver_sql(end)
    assert recover(bank) + purge(bank) == 0  # its pause is not over
    later(connection)
    assert recover(bank) + purge(bank) == 1
    assert status(connection, bad) == DONE[sweep]


def set_aside(connection: Connection) -> list[Any]:
    query = "SELECT *, extract(epoch FROM until - clock_timestamp()) AS seconds FROM idempotency.set_aside ORDER BY id"
    return list(connection.execute(text(query)))


def later(connection: Connection) -> None:
    connection.execute(text("UPDATE idempotency.set_aside SET until = clock_timestamp()"))


def test_more_bad_rows_than_a_batch_stop_nothing(
    bank: Celery, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "BATCH", 20)
    fill_with_orphans(connection, 60)
    connection.exec_driver_sql("ALTER TABLE idempotency.outbox ADD CONSTRAINT bad CHECK (key::int > 50) NOT VALID")
    connection.execute(text("UPDATE idempotency.records SET locked_until = '2020-01-01'::date + key::int"))
    assert recover(bank) == 10
    assert len(set_aside(connection)) == 50
    assert recover(bank) == 0


def test_a_bad_row_is_tried_again_after_longer_and_longer(bank: Celery, connection: Connection) -> None:
    states(bank, connection, "recover", "bad")
    connection.exec_driver_sql(REFUSALS["CHECK"][0])
    pauses = []
    for _ in range(9):
        assert recover(bank) == 0
        pauses.append(round(set_aside(connection)[0].seconds, -1))
        later(connection)
    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]


def test_a_row_that_someone_else_has_locked_holds_up_no_other(
    bank: Celery, engine: Engine, connection: Connection
) -> None:
    bad, good = states(bank, connection, "purge", "bad"), states(bank, connection, "purge", "good")
    for id in (bad, good):
        outbox.insert(connection, id, op.FINGERPRINT, Message.from_text(op.MESSAGE), service=op.SERVICE)
    connection.execute(
        text("UPDATE idempotency.outbox SET status = 'published', published_at = now() - interval '25 hours'")
    )
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as other:
        other.execute(text("SELECT FROM idempotency.outbox WHERE key = 'bad' FOR UPDATE"))
        assert purge(bank) == 1
        assert (status(connection, bad), status(connection, good)) == ("completed", None)
    later(connection)
    assert purge(bank) == 1


def test_what_is_refused_to_everyone_sets_no_row_aside(bank: Celery, connection: Connection) -> None:
    expired(connection)
    connection.exec_driver_sql("ALTER TABLE idempotency.outbox RENAME origin TO other")
    with pytest.raises(ProgrammingError):
        recover(bank)
    assert set_aside(connection) == []


def test_a_holder_with_an_impossible_name_stops_no_recovery(bank: Celery, connection: Connection) -> None:
    host, boot, namespace, _, begun = process_identity().split("|")
    odd = started(connection, holder="|".join([host, boot, namespace, "no number", begun]))
    orphan = expired(connection)
    assert recover(bank) == 1
    assert (status(connection, odd.id), status(connection, orphan.id)) == ("started", "released")
