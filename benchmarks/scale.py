"""Claim and end of an operation beside what else is in the tables: how many records, how many that wait, a purge, and a
transaction that somebody has left open.

Each attempt runs in this process, without a broker, so that nothing else is timed. Two databases of one server take
turns: a small one, and one with so much in it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.progress import track
from sqlalchemy import Engine, create_engine, text

import services
from idempotency.attempt.attempt import Attempt
from idempotency.attempt.endings import Finished
from idempotency.attempt.policy import Policy
from idempotency.attempt.run import run
from idempotency.attempt.runtime import Runtime
from idempotency.settings import Settings
from idempotency.store import purge, schema
from idempotency.wire.delivery import Delivery
from idempotency.wire.keys import OperationId, fingerprint

from .backlog import COMPLETED, RELEASED, WAITING
from .jobs import INSERT, TABLE
from .wal import written

OPERATION, SERVICE = "benchmarks.scale", "benchmarks"
# Rows that one pass of the purge deletes at most, as in maintenance.
PASS = 10_000
FEW = 10_000
# Rows for each statement that fills a table: what is shown moves, and no transaction lasts for minutes.
AT_ONCE = 500_000
_numbers = itertools.count()
_EXPIRED = text(
    "UPDATE idempotency.records SET expires_at = clock_timestamp() - interval '1 day' WHERE key LIKE 'done%'"
)


@dataclass
class Beside:
    """Seconds of each attempt, by round: without, and beside what is measured."""

    without: list[list[float]] = field(default_factory=list)
    beside: list[list[float]] = field(default_factory=list)

    def ratio(self, of: Callable[[list[float]], float] = statistics.mean) -> float:
        """The median round beside it over the median one without."""
        return statistics.median(map(of, self.beside)) / statistics.median(map(of, self.without))


@dataclass
class Held:
    """Beside a transaction that is held open: attempts, and what each has left in the tables and the log."""

    attempts: Beside
    dead_rows: float
    # bytes of an operation, by round
    wal: Beside


def p99(seconds: list[float]) -> float:
    """The time that one attempt in a hundred exceeds."""
    return statistics.quantiles(seconds, n=100)[98]


@contextmanager
def database(running: services.Services, name: str) -> Iterator[tuple[Engine, Runtime]]:
    """A new database with the library's tables and the job's, and a runtime on it."""
    url = running.create_database(name)
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    schema.migrate(engine)
    with engine.connect() as connection:
        connection.execute(TABLE)
    runtime = Runtime(Settings.read({"database_url": url, "service": SERVICE}))
    try:
        yield engine, runtime
    finally:
        runtime.close()
        engine.dispose()
        running.drop_database(name)


def fill(engine: Engine, rows: int, *statements: str) -> None:
    """Write so many rows by each of these statements."""
    with engine.connect() as connection:
        for statement in statements:
            for first in track(range(1, rows + 1, AT_ONCE), description=f"{rows:,} rows"):
                connection.execute(text(statement), {"first": first, "last": min(first + AT_ONCE - 1, rows)})
        connection.execute(text("VACUUM ANALYZE"))


def attempts(runtime: Runtime, many: int) -> list[float]:
    """Run so many operations. Returns the seconds of each."""
    policy = Policy.by_settings(runtime.settings)

    def body(attempt: Attempt) -> dict[str, int]:
        attempt.session.execute(INSERT, {"job": "scale", "number": attempt.delivery.arguments["number"]})
        return {"number": attempt.delivery.arguments["number"]}

    took = []
    for number in itertools.islice(_numbers, many):
        arguments = {"number": number}
        delivery = Delivery(
            OperationId("default", OPERATION, str(number)), fingerprint(arguments), arguments, only_asked=True
        )
        began = time.perf_counter()
        outcome = run(runtime, delivery, policy, body)
        took.append(time.perf_counter() - began)
        if not isinstance(outcome, Finished):
            raise RuntimeError(f"{number}: {outcome}")
    return took


def in_turns(small: Runtime, large: Runtime, *, rounds: int, many: int) -> Beside:
    """Run attempts on both databases in turns; the first round is a warm-up and not counted."""
    seconds = Beside()
    sides = [(small, seconds.without), (large, seconds.beside)]
    for round_ in range(rounds + 1):
        for runtime, of_side in sides if round_ % 2 else reversed(sides):
            took = attempts(runtime, many)
            if round_:
                of_side.append(took)
    return seconds


def records(running: services.Services, *, rounds: int, many: int, rows: int) -> Beside:
    """Beside `rows` completed operations, compared with 10,000."""
    with database(running, "scale_few") as (few, small), database(running, "scale_many") as (lots, large):
        fill(few, FEW, COMPLETED)
        fill(lots, rows, COMPLETED)
        return in_turns(small, large, rounds=rounds, many=many)


def waiting(running: services.Services, *, rounds: int, many: int, rows: int) -> Beside:
    """Beside `rows` accepted operations whose messages wait in the broker, a tenth of them released."""
    with database(running, "waits_none") as (_, small), database(running, "waits_many") as (lots, large):
        fill(lots, rows, WAITING, RELEASED)
        return in_turns(small, large, rounds=rounds, many=many)


def purging(running: services.Services, *, rounds: int, many: int, rows: int) -> tuple[Beside, float]:
    """While `rows` expired operations are purged, compared with none being purged. Also returns how many went, a second."""
    seconds = Beside()
    with database(running, "purges") as (engine, runtime):
        fill(engine, rows, COMPLETED)
        with engine.connect() as connection:
            connection.execute(_EXPIRED)
            connection.execute(text("VACUUM ANALYZE idempotency.records"))
        for round_ in range(rounds + 1):
            took = attempts(runtime, many)
            if round_:
                seconds.without.append(took)
        url, began = engine.url.render_as_string(hide_password=False), time.perf_counter()
        # a process of its own, as beat's is: a thread would take this one's time
        process = multiprocessing.get_context("spawn").Process(target=_purge, args=(url,), daemon=True)
        process.start()
        for _ in range(rounds):
            seconds.beside.append(attempts(runtime, many))
        left, seconds_in_all = _expired(engine), time.perf_counter() - began
        process.terminate()
        process.join(60)
        if not 0 < left < rows:
            raise RuntimeError(f"{left} of {rows} rows were left: no purge has run beside every round")
    return seconds, (rows - left) / seconds_in_all


def _purge(url: str) -> None:
    with create_engine(url, isolation_level="AUTOCOMMIT").connect() as connection:
        while purge.operations(connection, SERVICE, horizon=0.0, limit=PASS)[0]:
            pass


def _expired(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(
            connection.execute(text("SELECT count(*) FROM idempotency.records WHERE key LIKE 'done%'")).scalar_one()
        )


def held_open(running: services.Services, *, rounds: int, many: int) -> Held:
    """Beside a transaction that somebody has left open the whole time, compared with a database without one."""
    with (
        database(running, "held_not") as (_, small),
        database(running, "held") as (engine, large),
        engine.connect() as holder,
        engine.connect() as connection,
    ):
        holder.execution_options(isolation_level="REPEATABLE READ")
        holder.execute(text("SELECT count(*) FROM jobs"))  # its snapshot keeps every dead row
        seconds, wal = Beside(), Beside()
        sides = [(small, seconds.without, wal.without), (large, seconds.beside, wal.beside)]
        for round_ in range(rounds + 1):
            for runtime, of_side, of_log in sides if round_ % 2 else sides[::-1]:
                before = written(connection)
                took = attempts(runtime, many)
                if round_:
                    of_side.append(took)
                    of_log.append([(written(connection) - before) / many])
        holder.rollback()
        connection.execute(text("SELECT pg_stat_force_next_flush()"))
        dead = connection.execute(_DEAD).scalar_one()
    return Held(seconds, dead / ((rounds + 1) * many), wal)


_DEAD = text("SELECT sum(n_dead_tup)::bigint FROM pg_stat_user_tables WHERE schemaname = 'idempotency'")
