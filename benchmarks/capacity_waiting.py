"""The relay and the sweeps beside very many that wait: real tables with real indexes, filled by generate_series.

A tenth of what waits is to be published, the rest is published and its operations have not ended, a tenth of those
released. Up to a million each has a whole message, fingerprint and id; beyond that those have short ones that nothing timed
here publishes, or a hundred million would need 140 GB. Timed are the relay's pass, with a real broker that confirms, and the sweeps' own statements.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from idempotency.application import runtime_of
from idempotency.relay.relay import BATCH, Relay
from idempotency.store import lost, outbox, recover
from idempotency.store.overview import monitoring_connection
from idempotency.upkeep import overview

SIZES = (100_000, 1_000_000, 10_000_000, 100_000_000)
# Rows for each statement that fills a table.
AT_ONCE = 500_000
# Passes of each kind that are timed, after one that is not.
PASSES = 11
# One in so many is to be published; of the others, one in so many is released.
PENDING, RELEASED = 10, 10
QUEUE, SERVICE, TASK = "unique", "benchmarks", "benchmarks.jobs.unique"
# The most that are whole; beyond it, the first of those to be published are: as many as the passes take.
WHOLE = 1_000_000
WHOLE_PUBLISHED = 2 * PASSES * BATCH * PENDING
# Bytes of a waiting row with its indexes, whole and short, before any is measured; what sorting an index takes beside them; and
# the log, with the rest of the servers.
GUESS, GUESS_SHORT, ROOM, OWED = 1400.0, 380.0, 1.15, 4 << 30

_FILL = """
INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, origin, status, available_at,
                                published_at, service)
SELECT CASE WHEN n <= :whole THEN md5(n::text) ELSE 'm' || n END, 'default', :task, 'w' || n,
       CASE WHEN n <= :whole THEN 'v1:' || repeat('f', 64) ELSE 'v1:f' END,
       CASE WHEN n <= :whole THEN :message ELSE '{}' END, :queue, 'enqueue',
       CASE WHEN n % :pending = 0 THEN 'pending' ELSE 'published' END,
       now() - interval '1 day' + n * interval '1 microsecond',
       CASE WHEN n % :pending > 0 THEN now() - interval '1 day' + n * interval '1 microsecond' END, :service
FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) n"""
_RELEASED = """
INSERT INTO idempotency.records (tenant, task, key, status, fence, available_at, fingerprint, message, queue, service)
SELECT 'default', :task, 'w' || n, 'released', n, clock_timestamp() + interval '1 hour',
       CASE WHEN n <= :whole THEN 'v1:' || repeat('f', 64) ELSE 'v1:f' END, CASE WHEN n <= :whole THEN :message ELSE '{}' END,
       :queue, :service
FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) n WHERE n % (:pending * :released) = 1"""
_INDEXES = text("""
SELECT i.indexrelid::regclass::text AS name, pg_get_indexdef(i.indexrelid) AS made, k.conname,
       pg_get_constraintdef(k.oid) AS bound, i.indrelid::regclass::text AS on_table
FROM pg_index i LEFT JOIN pg_constraint k ON k.conindid = i.indexrelid
WHERE i.indrelid IN ('idempotency.outbox'::regclass, 'idempotency.records'::regclass) ORDER BY 1""")
_BYTES = text("SELECT pg_total_relation_size('idempotency.outbox') + pg_total_relation_size('idempotency.records')")


class NoRoom(RuntimeError):
    """The disk has not what a size needs; the message says how much that is."""


@dataclass(frozen=True)
class Waiting:
    """With so many waiting: seconds of a pass, medians. `relay`: of `BATCH` messages; `judge`: of `judged` rows."""

    waiting: int
    is_whole: bool
    bytes: float
    fill_seconds: float
    relay: float
    reserve: float
    settle: float
    judge: float
    judged: int
    recover: float
    look: float


def room_needed(waiting: int, bytes_each: float) -> int:
    """Bytes of disk, as far as is known before."""
    return int(waiting * bytes_each * ROOM) + OWED


def check_room(directory: Path, waiting: int, found: Sequence[Waiting] = ()) -> None:
    """Raise `NoRoom` if the disk with the servers' data has too little. `found`: what was measured before."""
    like = [each.bytes for each in found if each.is_whole == (waiting <= WHOLE)]
    bytes_each = like[-1] if like else GUESS if waiting <= WHOLE else GUESS_SHORT
    free, needed = shutil.disk_usage(directory).free, room_needed(waiting, bytes_each)
    if free < needed:
        raise NoRoom(
            f"{waiting:,} waiting: need {needed / 1e9:.0f} GB of disk at {directory} ({bytes_each:.0f} bytes a row with its "
            f"indexes, measured or guessed, {ROOM - 1:.0%} for sorting, {OWED / 1e9:.0f} GB for the log and the servers), have "
            f"{free / 1e9:.0f} GB; set WAITING to less, or TMPDIR to a directory on a larger disk"
        )


def measure(engine: Engine, directory: Path, app: Any, *, most: int) -> tuple[list[Waiting], str | None]:
    """Every size up to `most`, each in the same tables; and why the largest are left out, if so."""
    found: list[Waiting] = []
    message = _message(engine, app)
    for size in (each for each in SIZES if each <= most):
        try:
            check_room(directory, size, found)
        except NoRoom as error:
            return found, str(error)
        found.append(_measure(engine, app, size, message))
    return found, None


def _message(engine: Engine, app: Any) -> str:
    """A message as `enqueue` writes it; all that wait have the same."""
    with Session(engine.execution_options(isolation_level="READ COMMITTED")) as session:
        app.tasks[TASK].enqueue(session, 1)
        found = session.execute(text("SELECT message FROM idempotency.outbox ORDER BY id DESC LIMIT 1")).scalar_one()
        session.rollback()
    return str(found)


def _measure(engine: Engine, app: Any, size: int, message: str) -> Waiting:
    with engine.connect() as connection:
        began = time.monotonic()
        _fill(connection, size, message)
        filled = time.monotonic() - began
        bytes_each = float(connection.execute(_BYTES).scalar_one()) / size
    relay = Relay(app)
    try:
        published = _median(lambda: _published(relay))
    finally:
        relay.close()
    _purge_queue(app)
    with runtime_of(app).autocommit() as connection:
        reserve = _median(lambda: outbox.reserve_rows(connection, SERVICE, batch=BATCH, seconds=30.0))
        settle = _median(lambda: lost.settle(connection))
        until = connection.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
        lost.queues(connection, SERVICE, [QUEUE], after=60.0)
        judge = _median(lambda: lost.judge(connection, QUEUE, until, 60.0, SERVICE))
        bounds = recover.Bounds(SERVICE, [], [TASK], [], [], [QUEUE], 5)
        again = _median(lambda: recover.release(connection, bounds, limit=1000))
    settings = runtime_of(app).settings
    with monitoring_connection(settings) as connection:
        look = _median(lambda: overview.take_snapshot(connection, app, settings))
    judged = lost.BATCH * lost.BATCHES
    return Waiting(size, size <= WHOLE, bytes_each, filled, published, reserve, settle, judge, judged, again, look)


def _fill(connection: Connection, size: int, message: str) -> None:
    """Write the rows without the indexes, and then make these as they were: so each is as small as it can be."""
    connection.execute(text("TRUNCATE idempotency.outbox, idempotency.records"))
    indexes = connection.execute(_INDEXES).all()
    for row in indexes:
        what = f"ALTER TABLE {row.on_table} DROP CONSTRAINT {row.conname}" if row.conname else f"DROP INDEX {row.name}"
        connection.execute(text(what))
    whole = size if size <= WHOLE else WHOLE_PUBLISHED
    given = {"whole": whole, "task": TASK, "message": message, "queue": QUEUE, "service": SERVICE, "pending": PENDING}
    try:
        for first in track(range(1, size + 1, AT_ONCE), description=f"{size:,} waiting"):
            some = {"first": first, "last": min(first + AT_ONCE - 1, size)}
            connection.execute(text(_FILL), given | some)
            connection.execute(text(_RELEASED), given | some | {"released": RELEASED})
    finally:
        connection.execute(text("SET maintenance_work_mem = '1GB'"))
        for row in track(indexes, description="indexes"):
            what = f"ALTER TABLE {row.on_table} ADD CONSTRAINT {row.conname} {row.bound}" if row.conname else row.made
            connection.execute(text(what))
    connection.execute(text("VACUUM ANALYZE idempotency.outbox, idempotency.records"))


def _published(relay: Relay) -> None:
    done = relay.run_once().published
    if done != BATCH:
        raise RuntimeError(f"a pass has published {done} of {BATCH}")


def _median(call: Callable[[], object]) -> float:
    call()
    took = []
    for _ in range(PASSES):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def _purge_queue(app: Any) -> None:
    with app.connection_for_write() as broker:
        broker.default_channel.queue_purge(QUEUE)
