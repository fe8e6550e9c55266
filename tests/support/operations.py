"""Operations brought into a given state through the library's own statements, and read back whole.

Time passes by UPDATE: rows are aged instead of sleeping.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from uuid import uuid4

from celery import Celery
from sqlalchemy import Connection, Engine, Row, text

from idempotency.store import claims, ends
from idempotency.store.answers import Answer, Changed, Claimed, error_text
from idempotency.store.ends import FailedEnd
from idempotency.upkeep import maintenance
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from tests.support.processes import eventually

LEASE = 60.0
# of the application in bank.py
SERVICE = "bank"
RETENTION = 3600.0
FINGERPRINT = "v1:same"
MESSAGE = '{"headers": {}, "properties": {}, "route": {}, "body": "[[1e16], {}, {}]"}'
HOLDER = "another-host|boot|namespace|1|1"
ERROR = error_text("no_account", "no such account")
FAILED = FailedEnd("no_account", ERROR)

T = TypeVar("T")
# What the fixtures `record` and `entries` are: the row of a key, and how many entries an account has.
Record = Callable[[str], Any]
Entries = Callable[[str], int]


def new_id(tenant: str = "default", task: str = "tests.support.bank.deposit") -> OperationId:
    return OperationId(tenant, task, uuid4().hex)


# ---------------------------------------------------------------- states


def claim(
    connection: Connection,
    id: OperationId,
    *,
    token: str | None = None,
    fingerprint: str = FINGERPRINT,
    holder: str = HOLDER,
    lease: float = LEASE,
    message: str = MESSAGE,
    queue: str = "",
) -> Answer:
    """Claim until the answer is final: `Changed` means that the row moved meanwhile, ask again."""
    for _ in range(10):
        answer = claims.claim(
            connection,
            id,
            service=SERVICE,
            token=token or uuid4().hex,
            fingerprint=fingerprint,
            message=message,
            holder=holder,
            lease=lease,
            queue=queue,
        )
        if not isinstance(answer, Changed):
            return answer
    raise AssertionError("the row changed ten times between a claim and its explanation")


def started(connection: Connection, id: OperationId | None = None, **options: Any) -> Claimed:
    """Claimed, its lease running."""
    answer = claim(connection, id or new_id(), **options)
    assert isinstance(answer, Claimed), answer
    return answer


def expired(connection: Connection, id: OperationId | None = None, **options: Any) -> Claimed:
    """Claimed, and the lease is over."""
    held = started(connection, id, **options)
    age(connection, held.id, locked_until=-1)
    return held


def early(connection: Connection, id: OperationId | None = None, **options: Any) -> Claimed:
    """Released, and not due yet."""
    held = started(connection, id, **options)
    assert ends.release(connection, held, delay=600.0, error=ERROR)
    return held


def due(connection: Connection, id: OperationId | None = None, **options: Any) -> Claimed:
    """Released, and due."""
    held = early(connection, id, **options)
    age(connection, held.id, available_at=-1)
    return held


def completed(
    connection: Connection, id: OperationId | None = None, *, result: str = '{"b": 1, "a": 2}', **options: Any
) -> Claimed:
    held = started(connection, id, **options)
    ends.complete(connection, held, result, retention=RETENTION, lease=LEASE)
    return held


def failed(connection: Connection, id: OperationId | None = None, **options: Any) -> Claimed:
    held = started(connection, id, **options)
    ends.fail(connection, held, FAILED, retention=RETENTION, lease=LEASE)
    return held


def age(connection: Connection, id: OperationId, **seconds: float) -> None:
    """Put times of a record at so many seconds from now; negative is past."""
    for column, offset in seconds.items():
        changed = connection.execute(
            text(
                f"UPDATE idempotency.records SET {column} = clock_timestamp() + make_interval(secs => :offset) "
                "WHERE tenant = :tenant AND task = :task AND key = :key"
            ),
            {"offset": offset, "tenant": id.tenant, "task": id.task, "key": id.key},
        )
        assert changed.rowcount == 1


def make_due(engine: Engine, key: str, by: str = "-1 second") -> None:
    """Make a released operation due `by` from now."""
    with engine.connect() as connection:
        connection.execute(
            text(
                "UPDATE idempotency.records SET available_at = clock_timestamp() + cast(:by AS interval) "
                "WHERE key = :key AND status = 'released'"
            ),
            {"key": key, "by": by},
        )


def recover_now(app: Celery, connection: Connection) -> None:
    """Let the lease of a started operation be over; a sweep releases it."""
    connection.execute(
        text("UPDATE idempotency.records SET locked_until = clock_timestamp() - interval '1s' WHERE status = 'started'")
    )
    maintenance.recover(app)


def deaths(engine: Engine, key: str, attempts: int, *, spent_at: int | None = None) -> None:
    """So many attempts have been used, and the process of the last one has died; `spent_at` found them used up."""
    with engine.connect() as connection:
        statement = """UPDATE idempotency.records SET attempts = :attempts, spent_at = coalesce(:spent_at, spent_at), status = 'started', available_at = NULL,
            token = 't', locked_by = 'h', locked_until = clock_timestamp() - interval '1s' WHERE key = :key"""
        connection.execute(text(statement), {"attempts": attempts, "spent_at": spent_at, "key": key})


# ---------------------------------------------------------------- what is there


def record(connection: Connection, id: OperationId) -> Any:
    """The record's row, every column; or None, which few tests expect: hence Any."""
    return connection.execute(
        text("SELECT * FROM idempotency.records WHERE tenant = :tenant AND task = :task AND key = :key"),
        {"tenant": id.tenant, "task": id.task, "key": id.key},
    ).one_or_none()


def status(connection: Connection, id: OperationId) -> str | None:
    row = record(connection, id)
    return None if row is None else str(row.status)


def code(row: Row[Any]) -> tuple[str, str | None]:
    """The code that the operation ended with, and the code of what ended it."""
    error = json.loads(row.error)
    assert error["code"] == row.error_code
    return error["code"], error.get("cause", {}).get("code")


def operation(task: Any, key: str = "a") -> OperationId:
    """The operation of this task and key."""
    return OperationId("default", task.name, key)


def seconds_from_now(connection: Connection, id: OperationId, column: str) -> float:
    """How far ahead a time of the record is."""
    value: float = connection.execute(
        text(
            f"SELECT extract(epoch FROM {column} - clock_timestamp())::float8 FROM idempotency.records "
            "WHERE tenant = :tenant AND task = :task AND key = :key"
        ),
        {"tenant": id.tenant, "task": id.task, "key": id.key},
    ).scalar_one()
    return value


def outbox(connection: Connection, id: OperationId | None = None) -> Sequence[Row[Any]]:
    """The outbox rows of an operation, or all."""
    return connection.execute(
        text("""
            SELECT * FROM idempotency.outbox
            WHERE cast(:key AS text) IS NULL OR (tenant, task, key) = (:tenant, :task, :key) ORDER BY id
        """),
        {
            "tenant": id and id.tenant,
            "task": id and id.task,
            "key": id and id.key,
        },
    ).all()


def sent(connection: Connection, id: OperationId) -> dict[str, Any]:
    """Mark the newest outbox row of an operation as published, to the queue of the others; returns the marks of its message."""
    row = connection.execute(
        text("""
            UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp(), relayed_until = NULL,
                queue = coalesce(nullif(queue, ''), (SELECT max(queue) FROM idempotency.outbox))
            WHERE id = (SELECT max(id) FROM idempotency.outbox
                        WHERE (tenant, task, key) = (:tenant, :task, :key))
            RETURNING message_id, generation, origin
        """),
        {"tenant": id.tenant, "task": id.task, "key": id.key},
    ).one()
    return (
        Message({}, "", {}, {}).marked(origin=row.origin, outbox_id=row.message_id, generation=row.generation).headers
    )


def dead_letters(connection: Connection, id: OperationId | None = None) -> Sequence[Row[Any]]:
    """The dead letters of an operation, or all."""
    return connection.execute(
        text("""
            SELECT * FROM idempotency.dead_letters
            WHERE cast(:key AS text) IS NULL OR (tenant, task, key) = (:tenant, :task, :key) ORDER BY id
        """),
        {
            "tenant": id and id.tenant,
            "task": id and id.task,
            "key": id and id.key,
        },
    ).all()


def at_once(number: int, work: Callable[[int], T]) -> list[T]:
    """Run the work so many times, released together by a barrier; the results in the order of the numbers."""
    barrier = threading.Barrier(number, timeout=30)

    def run(index: int) -> T:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(run, range(number)))


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run the work in another thread."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def wait_for_a_lock(connection: Connection) -> None:
    """Return once a session of this database waits for a lock."""
    waiting = text("""
        SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
    """)

    def seen() -> int:
        connection.execute(text("SELECT pg_stat_clear_snapshot()"))  # or a transaction sees what it has seen first
        return int(connection.execute(waiting).scalar_one())

    eventually(seen, what="a session that waits for a lock")
