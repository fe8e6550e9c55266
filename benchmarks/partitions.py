"""Records in partitions beside a plain table: what claim and end cost, and what it costs to remove what is past its retention.

Databases of one server take turns. The same rows are in all of them: by day of creation in partitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from sqlalchemy import Connection, Engine, text

import services
from idempotency.attempt.runtime import Runtime
from idempotency.store import partitioning, partitions, purge
from idempotency.store.sweeps import AT_ONCE

from .backlog import COMPLETED
from .scale import PASS, SERVICE, Beside, attempts, database, fill
from .wal import written

# How many past partitions there are, beside the present one and those made ahead.
MANY = (7, 30, 90)
# Removed: a day's rows in each of so many partitions, which ended after the retention.
DAYS = 7
RETENTION = 3 * 86400.0
_PLACED = COMPLETED.replace("service)", "service, placed_at)").replace(
    "'benchmarks'\nFROM", "'benchmarks', clock_timestamp() - make_interval(days => {first} + (n % {days})::int)\nFROM"
)
_PAST = "clock_timestamp() - interval '1 day'"


@dataclass
class Removed:
    """By round: seconds, bytes of WAL, and bytes of the table that were left."""

    seconds: list[float] = field(default_factory=list)
    wal: list[float] = field(default_factory=list)
    left: list[float] = field(default_factory=list)


@contextmanager
def partitioned(running: services.Services, name: str, first: int, days: int) -> Iterator[tuple[Engine, Runtime]]:
    """A database with partitions of so many days, of which the last was `first` days ago, today's, tomorrow's and the default."""
    with database(running, name) as (engine, runtime):
        partitioning.partition(engine, "day")
        with engine.connect() as connection:
            for each in connection.execute(
                text("SELECT name FROM idempotency_partitions.bounds() WHERE NOT is_default")
            ):
                connection.execute(text(f"DROP TABLE idempotency_partitions.{each.name}"))
            for day in range(-1, first + days + 1):
                connection.execute(text(f"""
                    DO $$ BEGIN EXECUTE format('CREATE TABLE idempotency_partitions.day_{day + 1} PARTITION OF idempotency.records '
                        'FOR VALUES FROM (%L) TO (%L)', date_trunc('day', now(), 'UTC') - interval '{day} days',
                        date_trunc('day', now(), 'UTC') - interval '{day - 1} days'); END $$
                """))  # fmt: skip
        yield engine, runtime


def fill_partitions(engine: Engine, rows: int, *, first: int, days: int, is_past: bool = False) -> None:
    """So many completed operations, as many of each day."""
    statement = _PLACED.format(first=first, days=days)
    with engine.connect() as connection:  # that each key is new is known
        connection.execute(text("ALTER TABLE idempotency.records DISABLE TRIGGER insert_once"))
    fill(engine, rows, _as_past(statement) if is_past else statement)
    with engine.connect() as connection:
        connection.execute(text("ALTER TABLE idempotency.records ENABLE TRIGGER insert_once"))


def _as_past(statement: str) -> str:
    return statement.replace("clock_timestamp() + interval '3 days'", _PAST)


def claims(running: services.Services, *, rounds: int, many: int, rows: int) -> dict[int, Beside]:
    """Seconds of attempts by round in a plain table of `rows`, and in partitions by how many there are."""
    with ExitStack() as stack:
        engine, plain = stack.enter_context(database(running, "plain"))
        fill(engine, rows, COMPLETED)
        sides = {}
        for days in MANY:
            engine, runtime = stack.enter_context(partitioned(running, f"parts_{days}", 0, days))
            fill_partitions(engine, rows, first=0, days=days)
            sides[days] = (runtime, Beside())
        for round_ in range(rounds + 1):
            alone = attempts(plain, many)
            for runtime, beside in sides.values():
                took = attempts(runtime, many)
                if round_:  # the first is a warm-up
                    beside.without.append(alone)
                    beside.beside.append(took)
        return {days: beside for days, (_, beside) in sides.items()}


def removing(running: services.Services, *, rounds: int, rows: int) -> tuple[Removed, Removed]:
    """Delete `rows` that are past their retention in batches, and drop as many with their partitions, in turns."""
    plain, dropped = Removed(), Removed()
    for _ in range(rounds):
        with database(running, "deletes") as (engine, _runtime):
            fill(engine, rows, _as_past(COMPLETED))
            with engine.connect() as connection:
                _measure(connection, plain, _delete)
        with partitioned(running, "drops", 5, DAYS) as (engine, _runtime):
            fill_partitions(engine, rows, first=5, days=DAYS, is_past=True)
            with engine.connect() as connection:
                _measure(connection, dropped, _drop)
    return plain, dropped


def _delete(connection: Connection) -> int:
    # without the rests of a purge in a relay, which a drop does not need
    return purge.operations(connection, SERVICE, horizon=0.0, limit=PASS, pace=AT_ONCE)[0]


def _drop(connection: Connection) -> int:
    return partitions.keep_up(connection, SERVICE, retention=RETENTION, horizon=0.0, limit=PASS)[0]


def _measure(connection: Connection, into: Removed, remove: Callable[[Connection], int]) -> None:
    before, began = written(connection), time.perf_counter()
    while remove(connection):
        pass
    into.seconds.append(time.perf_counter() - began)
    left = connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one()
    if left:
        raise RuntimeError(f"{left} operations were left")
    connection.execute(text("VACUUM idempotency.records"))  # part of what it costs, though not of the time
    into.wal.append(written(connection) - before)
    into.left.append(connection.execute(_SIZE).scalar_one())


_SIZE = text("""
SELECT sum(pg_total_relation_size(c.oid))::bigint FROM pg_class c
WHERE c.relkind = 'r' AND (c.oid = 'idempotency.records'::regclass
    OR c.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = 'idempotency.records'::regclass))
""")
