"""What operations leave behind after their retention: 10,000 first, then many more, in the same database.

Some go through the relay and a worker, the others in waves through the library's own statements, in every possible way:
completed, retried, failed and discarded, never published, events for external consumers. Retentions are next to zero, so
that each wave is purged right after it. VACUUM replaces autovacuum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import redis
from rich.progress import track
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from idempotency.application import close_runtime, runtime_of
from idempotency.relay import resend
from idempotency.store import claims, dead_letters, ends, outbox, record
from idempotency.store import discards as discarding
from idempotency.store import letters as dead_letter_store
from idempotency.store.answers import Claimed, error_text
from idempotency.store.ends import FailedEnd
from idempotency.upkeep import maintenance
from idempotency.wire.delivery import Delivery
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message

from . import jobs

SMALL = 10_000
WAVE = 5_000
# One in fifty goes through the relay and a worker, at most 500.
REAL_SHARE, REAL_MOST = 50, 500
OPERATION = "benchmarks.life"
# of jobs.py
SERVICE = "benchmarks"
# One in so many; the others complete in their first attempt.
RETRIED, FAILED, UNPUBLISHABLE, EXTERNAL = 10, 20, 50, 10
FINGERPRINT = "v1:life"
ERROR = error_text("no_account", "no such account")
SHORT = 0.001


@dataclass(frozen=True)
class Left:
    """What is left after `operations`."""

    operations: int
    tables: dict[str, int]  # bytes with indexes, after VACUUM
    rows: dict[str, int]
    queued: int
    hints: int
    largest: int  # bytes of all tables, during the run
    purged_per_second: float

    @property
    def size(self) -> int:
        return sum(self.tables.values())


def measure(
    database: Engine, workers: Callable[[], AbstractContextManager[Any]], *, operations: int
) -> tuple[Left, Left]:
    """Run 10,000 operations, then `operations`; returns what is left after each."""
    jobs.app.conf.update(
        {
            f"idempotency_{name}": SHORT
            for name in ("redelivery_horizon", "retention_completed", "retention_failed", "retention_dead_letters")
        }
    )
    close_runtime(jobs.app)
    with database.connect() as connection:
        return _live(connection, database, workers, SMALL), _live(connection, database, workers, operations)


def _live(
    connection: Connection, database: Engine, workers: Callable[[], AbstractContextManager[Any]], number: int
) -> Left:
    real = min(number // REAL_SHARE, REAL_MOST)
    with workers():
        _through_a_worker(connection, database, real)
    purged, took, largest = 0, 0.0, 0
    waves = [min(WAVE, number - real - done) for done in range(0, number - real, WAVE)]
    for wave in track(waves, description=f"life: {number:,} operations"):
        _through_sql(wave)
        time.sleep(2 * SHORT)
        largest = max(largest, sum(_sizes(connection).values()))
        began = time.perf_counter()
        purged += _purge()
        took += time.perf_counter() - began
        _vacuum(connection)
    client = redis.Redis.from_url(str(jobs.app.conf.idempotency_redis_url))
    with jobs.app.connection_for_write() as broker:
        queued = sum(
            broker.default_channel.queue_declare(name, passive=True).message_count for name in jobs.app.amqp.queues
        )
    left = Left(
        number,
        _sizes(connection),
        {name: connection.execute(text(f"SELECT count(*) FROM idempotency.{name}")).scalar_one() for name in TABLES},
        queued,
        sum(1 for _ in client.scan_iter("idempotency:*")),
        largest,
        purged / took,
    )
    client.close()
    return left


def _through_a_worker(connection: Connection, database: Engine, number: int) -> None:
    """Run operations through a relay and a worker process."""
    before = connection.execute(text("SELECT count(*) FROM jobs")).scalar_one()
    first = int(time.time() * 1000)  # keys are numbers, and keys of an earlier run may still exist
    with Session(database.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
        for job in range(first, first + number):
            jobs.unique.enqueue(session, job)
    deadline = time.monotonic() + 120
    ended = text("SELECT count(*) FROM idempotency.records WHERE status = 'completed'")
    while connection.execute(ended).scalar_one() < number:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{number} operations were not done within 120 s")
        time.sleep(0.1)
    if connection.execute(text("SELECT count(*) FROM jobs")).scalar_one() != before + number:
        raise RuntimeError("not every operation has written exactly one row")
    resend.resend_lost(jobs.app, lambda _: 0)
    # the worker's own settings retain completed operations for 72 hours
    connection.execute(text("UPDATE idempotency.records SET expires_at = clock_timestamp()"))


def _through_sql(number: int) -> None:
    """Run one wave by executing the library's statements in bulk."""
    ids = [OperationId("default", OPERATION, uuid4().hex) for _ in range(number)]
    message = Message({"task": OPERATION, "id": "0"}, "[[], {}, {}]", {"queue": "idle"}, {}).to_text()
    with runtime_of(jobs.app).autocommit() as connection:
        outside = [OperationId("default", outbox.EXTERNAL, uuid4().hex) for _ in ids[::EXTERNAL]]
        _accept(connection, ids, message, settled=False)
        _accept(connection, outside, message, settled=True)
        _relay(connection, unpublishable={id.key for id in ids[::UNPUBLISHABLE]})
        alive = [id for place, id in enumerate(ids) if place % UNPUBLISHABLE]
        claims = _claim(connection, alive, message)
        _each(
            connection,
            ends._RELEASE,
            claims[::RETRIED],
            delay=0.0,
            after_due=0.0,
            error=ERROR,
            given_back=0,
            deliver=True,
        )
        _relay(connection)
        _claim(connection, [claim.id for claim in claims[::RETRIED]], message)
        claims = _held(connection)
        failing, end = claims[::FAILED], FailedEnd("no_account", ERROR)
        completing = [claim for place, claim in enumerate(claims) if place % FAILED]
        _each(connection, ends._COMPLETE, completing, result="1", retention=SHORT, idle_ms="30000")
        for claim in failing:
            dead_letter_store._store(connection, _delivery(claim.id, message), 1, "no_account", ERROR, 1, SERVICE)
        _each(connection, ends._FAIL, failing, retention=SHORT, idle_ms="30000", **end.parameters())
        resend.resend_lost(jobs.app, lambda _: 0)
        letters = dead_letters.list_letters(connection, limit=number)
        connection.exec_driver_sql(discarding._DISCARD, [{"letter": letter.id} for letter in letters])


def _purge() -> int:
    """Purge everything that is due; returns how many operations and rows without operations."""
    total = 0
    while True:
        purged = maintenance.purge_once(jobs.app, limit=100 * WAVE)
        total += purged.operations + purged.rows
        if not purged.more:
            return total


def _accept(connection: Connection, ids: Sequence[OperationId], message: str, *, settled: bool) -> None:
    rest = {"fingerprint": FINGERPRINT, "message": message, "queue": "idle", "origin": "enqueue", "settled": settled}
    rest["service"] = SERVICE
    when = {"ordering_key": None, "eta": None, "countdown": 0.0, "generation": 1}
    rows = [{**_row(id), "message_id": str(uuid4()), **rest, **when} for id in ids]
    connection.exec_driver_sql(outbox._INSERT, rows)


def _relay(connection: Connection, unpublishable: Set[str] = frozenset()) -> None:
    while rows := connection.exec_driver_sql(
        outbox._RESERVE_ROWS, {"batch": WAVE, "seconds": 30.0, "service": SERVICE, "silent": []}
    ).all():
        ids = [row.message_id for row in rows]
        keys = connection.execute(
            text("SELECT message_id, key FROM idempotency.outbox WHERE message_id = ANY(:ids)"), {"ids": ids}
        ).all()
        refused = {row.message_id for row in keys if row.key in unpublishable}
        connection.exec_driver_sql(
            outbox._MARK_PUBLISHED, outbox.as_sent([row for row in rows if row.message_id not in refused])
        )
        if refused:
            fields = {"error": "not a message", "service": SERVICE}
            gone = [row for row in rows if row.message_id in refused]
            connection.exec_driver_sql(outbox._GIVE_UP, outbox.as_sent(gone) | fields)


def _claim(connection: Connection, ids: Sequence[OperationId], message: str) -> list[Claimed]:
    rest = {"fingerprint": FINGERPRINT, "message": message, "queue": "idle", "holder": "life", "lease": 600.0}
    rest["fingerprints"], rest["service"] = [FINGERPRINT], SERVICE
    rows = [{**_row(id), "token": uuid4().hex, "synchronous": False, **rest} for id in ids]
    connection.exec_driver_sql(claims._CLAIM, rows)
    return _held(connection)


def _held(connection: Connection) -> list[Claimed]:
    rows = connection.execute(
        text("""SELECT tenant, task, key, fence, token, attempts, generation FROM idempotency.records
                WHERE status = 'started' AND locked_until IS NOT NULL ORDER BY key""")
    )
    return [
        Claimed(
            OperationId(row.tenant, row.task, row.key),
            row.fence,
            row.token,
            row.attempts,
            row.generation,
            0.0,
            {},
        )
        for row in rows
    ]


def _each(connection: Connection, statement: str, claims: Sequence[Claimed], **parameters: Any) -> None:
    connection.exec_driver_sql(statement, [record.mine(claim) | parameters for claim in claims])


def _delivery(id: OperationId, message: str) -> Delivery:
    return Delivery(id, FINGERPRINT, {}, "0", message, {}, "idle")


def _row(id: OperationId) -> dict[str, str]:
    return {"tenant": id.tenant, "task": id.task, "key": id.key}


# ---------------------------------------------------------------- sizes

TABLES = ("records", "outbox", "dead_letters", "discards", "audit", "alerts", "set_aside", "relay_sleep")


def _sizes(connection: Connection) -> dict[str, int]:
    return {
        name: connection.execute(text(f"SELECT pg_total_relation_size('idempotency.{name}')")).scalar_one()
        for name in TABLES
    }


def _vacuum(connection: Connection) -> None:
    for name in TABLES:
        connection.execute(text(f"VACUUM idempotency.{name}"))
