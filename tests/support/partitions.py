"""A database whose records are in partitions, and a way to make them old."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.pool import NullPool

from idempotency.store import left_alone, partitioning, partitions
from idempotency.store.periods import Partitions
from idempotency.wire.keys import OperationId
from tests.support.operations import wait_for_a_lock

Answer = TypeVar("Answer")

# As the mover does: nothing is new, and nothing is gone.
_AGE = """
SELECT pg_catalog.set_config('idempotency.moving', 'on', true);
CREATE TABLE IF NOT EXISTS idempotency_partitions.records_before PARTITION OF idempotency.records
    FOR VALUES FROM (MINVALUE) TO ('2000-01-02 00:00+00');
UPDATE idempotency.records SET placed_at = '2000-01-01 00:00+00'
"""


def put_into_partitions(database_url: str, width: str = "day") -> None:
    """Partition the records of a migrated database."""
    partitioning.partition(create_engine(database_url, poolclass=NullPool), width)


def fine(many: int, made: Partitions) -> str:
    """What the doctor says of so many where nothing is left to do."""
    assert made.last is not None
    return f"ok {many}, by {made.width}, made until {made.last.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def into_the_past(connection: Connection) -> None:
    """Put all records into a partition that ended long ago. The connection commits each statement."""
    connection.exec_driver_sql(_AGE)
    left_alone.forget()


def while_it_moves(engine: Engine, connection: Connection, id: OperationId, change: Callable[[], Answer]) -> Answer:
    """What a change answers that finds this record just moving to another partition, and has to wait for it.

    The connections commit each statement.
    """
    into_the_past(connection)
    with engine.connect() as mover, ThreadPoolExecutor(1) as threads:
        mover.exec_driver_sql("BEGIN")
        fields = {"partition": "records_before", "tenants": [id.tenant], "tasks": [id.task], "keys": [id.key]}
        assert mover.exec_driver_sql(partitions._MOVE, fields).scalar_one() == 1
        changing = threads.submit(change)
        wait_for_a_lock(connection)
        mover.exec_driver_sql("COMMIT")
        return changing.result(20)


@contextmanager
def purging_drops() -> Iterator[None]:
    """Each purge finds all records in a partition that ended long ago, and takes what stays behind row by row at once."""
    keep_up = partitions.keep_up

    def dropping(connection: Connection, *args: Any, **options: Any) -> tuple[int, bool, float]:
        into_the_past(connection)
        dropped, more, _ = keep_up(connection, *args, **options)
        return dropped, more, 0.0

    partitions.keep_up = dropping
    try:
        yield
    finally:
        partitions.keep_up = keep_up
