"""What 100,000 waiting sagas cost those who do not wait, and how fast 10,000 of them go on that are woken at once.

One saga begins to wait for real; SQL copies its rows. The same passes are timed in an empty database of the same server.
"""

from __future__ import annotations

import itertools
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from celery import Celery
from rich.progress import track
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.orm import Session

from idempotency import publish
from idempotency.application import close_runtime, runtime_of, settings_of
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.store import schema
from idempotency.store.overview import monitoring_connection
from idempotency.upkeep import maintenance, overview
from services.postgres import create_database, drop_database

from . import jobs, saga_tasks

WAITING, WOKEN = 100_000, 10_000
# How often each pass is timed.
TIMES = 50
# Events, or plain rows, in one commit.
BATCH = 100
# The key of the saga that is copied. Its digits are in its message, too, and in no other number there.
FIRST = 91_919_191
_IDS = "CREATE TEMPORARY TABLE copies AS SELECT n, gen_random_uuid() AS id FROM generate_series(:first, :last) n"
_COPIES = (
    """INSERT INTO idempotency.records (tenant, task, key, status, fence, available_at, fingerprint, message, queue, service)
       SELECT r.tenant, r.task, n::text, r.status, nextval('idempotency.fence'), r.available_at, r.fingerprint,
              replace(r.message, :first_key, n::text), r.queue, r.service
       FROM idempotency.records r, copies WHERE r.key = :first_key""",
    """INSERT INTO idempotency.sagas (id, tenant, task, key, service, entity_id, waits_for)
       SELECT copies.id, g.tenant, g.task, n::text, g.service, n::text, g.waits_for
       FROM idempotency.sagas g, copies WHERE g.key = :first_key""",
    """INSERT INTO idempotency.saga_steps
           (saga_id, generation, position, tenant, name, kind, state, args, event_type, match, due_at)
       SELECT copies.id, s.generation, s.position, s.tenant, s.name, s.kind, s.state, s.args, s.event_type,
              replace(s.match, :first_key, n::text), s.due_at
       FROM idempotency.saga_steps s JOIN idempotency.sagas g ON g.id = s.saga_id, copies WHERE g.key = :first_key""",
    """INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, origin, available_at,
                                      generation, service, status, published_at, taken)
       SELECT gen_random_uuid()::text, o.tenant, o.task, n::text, o.fingerprint, replace(o.message, :first_key, n::text),
              o.queue, o.origin, o.available_at, o.generation, o.service, o.status, o.published_at,
              -- as the first pass of resend leaves the message that began it
              o.status = 'published'
       FROM idempotency.outbox o, copies WHERE o.key = :first_key""",
)
_TABLES = "idempotency.records, idempotency.outbox, idempotency.sagas, idempotency.saga_steps, idempotency.saga_events"

_PENDING = """SELECT count(*) FROM idempotency.outbox
    WHERE status = 'pending' AND available_at <= clock_timestamp() AND task = :task"""
# What a relay does all the time, and what a person or a scrape asks.
SWEEPS, PASSES = ("relay", "recover", "resend", "purge"), ("relay", "recover", "resend", "purge", "status")
_numbers = itertools.count(50_000_000)


@dataclass
class Costs:
    """Milliseconds of each pass, by name, without and with waiting sagas; then messages, or events, per second, by round."""

    alone: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PASSES})
    beside: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PASSES})
    events: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    woken: list[float] = field(default_factory=list)
    sweeps: tuple[str, ...] = SWEEPS

    def ratio(self, name: str) -> float:
        """The median of a pass beside waiting sagas over that without."""
        return statistics.median(self.beside[name]) / statistics.median(self.alone[name])

    @property
    def passes(self) -> tuple[tuple[str, dict[str, list[float]]], ...]:
        return ("alone", self.alone), ("beside waiting sagas", self.beside)

    @property
    def pace(self) -> float:
        """The relay's median for the messages of woken sagas over that for plain ones."""
        return statistics.median(self.woken) / statistics.median(self.plain)


def measure(database: Engine, *, rounds: int, waiting: int = WAITING, woken: int = WOKEN) -> Costs:
    """Time the passes in this database and in an empty one, in turns; then wake `woken` of the sagas in each round."""
    jobs.app.finalize()
    costs, relay = Costs(), Relay(jobs.app)
    with database.connect() as connection:
        _wait(connection, relay, max(waiting, rounds * woken))
    with _empty_application(database) as alone:
        other = Relay(alone)
        _time_passes((alone, other, costs.alone), (jobs.app, relay, costs.beside))
        other.close()
    for round_ in track(range(rounds), description=f"saga_waits: {woken} plain rows and woken sagas in turns"):
        keys = range(FIRST + 1 + round_ * woken, FIRST + 1 + (round_ + 1) * woken)
        for is_woken in (False, True) if round_ % 2 else (True, False):
            if is_woken:
                costs.events.append(_wake(keys))
                costs.woken.append(_relayed(database, relay, saga_tasks.waiting.name, woken))
            else:
                _plain(woken)
                costs.plain.append(_relayed(database, relay, jobs.unique.name, woken))
    relay.close()
    with database.connect() as connection:
        _forget(connection)
    return costs


@contextmanager
def _empty_application(beside: Engine) -> Iterator[Celery]:
    """The same application in another database on the same server."""
    server, name = beside.url.render_as_string(hide_password=False), f"alone_{secrets.token_hex(4)}"
    address = create_database(server, name)
    engine = create_engine(address, isolation_level="AUTOCOMMIT")
    schema.migrate(engine)
    engine.dispose()
    app = Celery("benchmarks", set_as_current=False)
    app.conf.update({**jobs.app.conf.changes, "idempotency_database_url": address})
    app.finalize()
    try:
        yield app
    finally:
        close_runtime(app)
        drop_database(server, name)


def _wait(connection: Connection, relay: Relay, count: int) -> None:
    with Session(runtime_of(jobs.app).engine) as session, session.begin():
        saga_tasks.waiting.enqueue(session, FIRST)
    relay.run_once()
    _empty_queues()
    saga_tasks.deliver(saga_tasks.waiting, str(FIRST), FIRST)
    connection.execute(text(_IDS), {"first": FIRST + 1, "last": FIRST + count})
    for copy in _COPIES:
        copied = connection.execute(text(copy), {"first_key": str(FIRST)}).rowcount
        # in the outbox, the message that began it and the delivery that ends its wait
        if copied != count * (1 + ("idempotency.outbox" in copy)):
            raise RuntimeError(f"{copied} rows were copied for {count} sagas: {copy}")
    connection.execute(text("DROP TABLE copies"))
    connection.execute(text(f"VACUUM ANALYZE {_TABLES}"))


def _forget(connection: Connection) -> None:
    name = {"task": saga_tasks.waiting.name}
    connection.execute(
        text("DELETE FROM idempotency.outbox WHERE task IN (:task, :plain)"), {**name, "plain": jobs.unique.name}
    )
    connection.execute(text("DELETE FROM idempotency.sagas WHERE task = :task"), name)
    connection.execute(text("DELETE FROM idempotency.records WHERE task = :task"), name)
    connection.execute(text("TRUNCATE idempotency.saga_events"))
    connection.execute(text(f"VACUUM ANALYZE {_TABLES}"))


def _time_passes(*sides: tuple[Celery, Relay, dict[str, list[float]]]) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(monitoring_connection(settings_of(app))) for app, _, _ in sides]
        for time_ in range(TIMES + 1):
            for (app, relay, milliseconds), connection in zip(sides, connections, strict=True):
                for name, look in _looks(app, relay, connection).items():
                    began = time.perf_counter()
                    look()
                    if time_:  # the first one opens connections
                        milliseconds[name].append(1e3 * (time.perf_counter() - began))


def _looks(app: Celery, relay: Relay, connection: Connection) -> dict[str, Callable[[], object]]:
    return {
        "relay": relay.run_once,
        "recover": lambda: maintenance.recover(app),
        "resend": lambda: resend_lost(app, publisher=relay.publisher),
        "purge": lambda: maintenance.purge_once(app, limit=5000),
        "status": lambda: overview.status(connection, app, settings_of(app)),
    }


def _plain(count: int) -> None:
    for batch in _batches(itertools.islice(_numbers, count)):
        with Session(runtime_of(jobs.app).engine) as session, session.begin():
            for number in batch:
                jobs.unique.enqueue(session, number)


def _wake(keys: range) -> float:
    """Publish the events that the sagas wait for. Returns events per second."""
    began = time.perf_counter()
    for batch in _batches(keys):
        with Session(runtime_of(jobs.app).engine) as session, session.begin():
            for number in batch:
                publish(session, saga_tasks.EVENT, {"number": number}, app=jobs.app)
    return len(keys) / (time.perf_counter() - began)


def _relayed(database: Engine, relay: Relay, task: str, count: int) -> float:
    """Publish what is due, which is `count` messages of a task. Returns messages per second."""
    with database.connect() as connection:
        due = connection.execute(text(_PENDING), {"task": task}).scalar_one()
    if due != count:
        raise RuntimeError(f"{task}: {due} messages are due, not {count}")
    began, published = time.perf_counter(), 0
    while published < count:
        published += relay.run_once().published
    took = time.perf_counter() - began
    _empty_queues()
    return count / took


def _empty_queues() -> None:
    with jobs.app.connection_for_write() as broker:
        for name in ("unique", "idle"):
            broker.default_channel.queue_purge(name)


def _batches(numbers: Iterable[int]) -> Iterable[list[int]]:
    rest = iter(numbers)
    return iter(lambda: list(itertools.islice(rest, BATCH)), [])
