"""The world of one schedule: a database, a broker and a provider in this process, and processes that may die.

The database is one for all schedules and is emptied in between. The broker is a queue in memory that delivers at least
once. Time is a sequence in the database, and passes when an actor says so.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Any
from unittest import mock
from uuid import uuid4

import psycopg
from celery.app.task import Context
from kombu import Message as BrokerMessage
from kombu.serialization import prepare_accept_content
from psycopg import sql
from psycopg.rows import namedtuple_row
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

import idempotency.application as celery_application
from idempotency.application import close_runtime, runtime_of, settings_of
from idempotency.attempt.effects import DidNotHappen, Happened
from idempotency.attempt.runtime import Runtime
from idempotency.letters import storing
from idempotency.observe import crash_points
from idempotency.operate.change import Change, Shown, read
from idempotency.operate.resolve import resolve_effect
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.store import schema, undelivered
from idempotency.store.undelivered import GivenUp, UndeliveredMessage
from idempotency.upkeep import maintenance
from idempotency.wire.headers import KEY_HEADER, TENANT_HEADER
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from idempotency.worker import waiting
from idempotency.worker.revocation import revoke_terminated
from tests.search import application, connections
from tests.search.broker import Broker, Envelope
from tests.search.connections import stopping
from tests.search.scheduler import EVERYTHING, Actor, Scheduler, current, note, passed, stop_before, touched
from tests.support.deliveries import Deliveries, Outcome

PAYMENT, REFUND = "p1", "r1"
CAPTURED = 1000
TENANT = "default"
# Rounds of recovery, relay and deliveries after which whatever has not ended never will.
ROUNDS = 12
# Dead rows of so many schedules are removed at once.
VACUUM_EVERY = 200
PERSON = Change("search", "asked by the search")

# A row that a relay holds at this moment is the message in hand: it died before its confirm was noted.
_PENDING = """
SELECT origin FROM idempotency.outbox WHERE status = 'pending'
    AND (message_id IS DISTINCT FROM %s OR relayed_until IS NULL OR relayed_until < clock_timestamp())
"""
_give_up = undelivered.give_up
_EMPTY = """
WITH a AS (DELETE FROM idempotency.records), b AS (DELETE FROM idempotency.outbox),
     c AS (DELETE FROM idempotency.discards), h AS (DELETE FROM idempotency.audit),
     i AS (DELETE FROM idempotency.dead_letter_tries), j AS (DELETE FROM idempotency.set_aside),
     k AS (DELETE FROM idempotency.markers), l AS (UPDATE idempotency.settled SET until = 'epoch'), d AS (DELETE FROM payments), e AS (DELETE FROM refunds),
     f AS (DELETE FROM failures), g AS (DELETE FROM virtual.trespasses)
DELETE FROM idempotency.dead_letters
"""
_VACUUM = "VACUUM idempotency.records, idempotency.outbox, idempotency.dead_letters, payments, refunds, failures"
# A clock that the search moves: found before the server's own, by the library and by the tables' defaults. A sequence
# is outside any transaction, so that time passes for all actors at once, even for one that holds a row.
CLOCK = """
CREATE SCHEMA virtual;
CREATE SEQUENCE virtual.seconds START 100000000;
CREATE FUNCTION virtual.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
    'SELECT pg_catalog.clock_timestamp() + make_interval(secs => last_value) FROM virtual.seconds';
"""
# Migrations run by a path of their own, and so do the functions that they make.
USE_CLOCK = """
DO $$
DECLARE
    ours regprocedure;
    place record;
BEGIN
    FOR ours IN SELECT oid FROM pg_proc WHERE pronamespace = 'idempotency'::regnamespace LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = virtual, pg_catalog, pg_temp', ours);
    END LOOP;
    FOR place IN
        SELECT d.adrelid::regclass AS of_table, a.attname AS name FROM pg_attrdef d
        JOIN pg_attribute a ON (a.attrelid, a.attnum) = (d.adrelid, d.adnum)
        JOIN pg_class c ON c.oid = d.adrelid AND c.relnamespace = 'idempotency'::regnamespace
        WHERE pg_get_expr(d.adbin, d.adrelid) IN ('clock_timestamp()', 'pg_catalog.clock_timestamp()')
    LOOP
        EXECUTE format('ALTER TABLE %s ALTER %I SET DEFAULT virtual.clock_timestamp()', place.of_table, place.name);
    END LOOP;
END $$
"""
# The witness of every write to a record that another attempt held, under the fence that this holder has.
WITNESS = """
CREATE TABLE virtual.trespasses (writer text, holder text, became text);
CREATE FUNCTION virtual.witness() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO virtual.trespasses VALUES (current_setting('application_name'), OLD.locked_by, NEW.status);
    RETURN NULL;
END $$;
CREATE TRIGGER witness AFTER UPDATE ON idempotency.records FOR EACH ROW
WHEN (OLD.status = 'started' AND NEW.fence = OLD.fence AND OLD.locked_by <> current_setting('application_name')
      AND (NEW.status, NEW.effects) IS DISTINCT FROM (OLD.status, OLD.effects))
EXECUTE FUNCTION virtual.witness();
"""
_TRESPASSES = "DELETE FROM virtual.trespasses WHERE writer = ANY(%s) RETURNING writer, holder, became"
_PASS = "SELECT setval('virtual.seconds', last_value + %s) FROM virtual.seconds"
# Longer than a lease and any delay, and short enough for a dozen of them within the day that a provider keeps a key.
A_WHILE = application.LEASE + 100
A_DAY = 25 * 3600
# What the next schedule of a scenario begins with, and what two schedules have to have in common to go on alike.
_TABLES = {
    "idempotency.records": "key",
    "idempotency.outbox": "created_at",
    "idempotency.dead_letters": "id",
    "idempotency.discards": "letter",
    "idempotency.audit": "id",
    "idempotency.dead_letter_tries": "1",
    "idempotency.set_aside": "1",
    "idempotency.markers": "sent_at",
    "idempotency.settled": "1",
    "payments": "id",
    "refunds": "id",
    "failures": "id",
}
_ROWS = "(SELECT jsonb_agg(to_jsonb(t) || jsonb_build_object({0}) ORDER BY {1}) FROM {2} t)"
_EVERYTHING = "SELECT clock_timestamp() AS now, concat_ws('\n', {}) AS tables".format(
    ", ".join(
        _ROWS.format("'letter', id" if table == "idempotency.dead_letters" else "", order, table)
        for table, order in _TABLES.items()
    )
)
_KEEP_CLOCK = """
CREATE TABLE {0}.clock AS SELECT last_value AS seconds, pg_catalog.clock_timestamp() AS at FROM virtual.seconds
"""
# A second and a bit later than it was, so that what was due is.
_TURN_BACK = """
SELECT setval('virtual.seconds', seconds + 2 - extract(epoch FROM pg_catalog.clock_timestamp() - at)::bigint)
FROM {0}.clock
"""
_IDENTITY = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32,}")
# A row's number is its place among the others; what refers to one is a discard, to its letter.
_NUMBER = re.compile(r'"(?P<what>id|(?:dead_)?letter|fence)(?:_before|_after)?": (?P<number>\d+)')
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:[+-]\d\d:\d\d|Z)?|\b\d{10}\.\d+")
# Seconds that count as no difference: schedules take less, and nothing waits for less than a lease when all is at rest.
SAME_TIME = 100
_STATE = """
SELECT (SELECT count(*) FROM idempotency.records WHERE status IN ('started', 'released')) AS open,
       (SELECT count(*) FROM idempotency.records) AS records,
       (SELECT count(*) FROM idempotency.outbox WHERE status = 'pending') AS pending
"""


class Sleep:
    """The library's own pauses: over at once, and as long as they were asked to be."""

    def __init__(self) -> None:
        self._slept = 0.0

    def monotonic(self) -> float:
        return self._slept

    def sleep(self, seconds: float) -> None:
        self._slept += seconds


@dataclass(frozen=True)
class Scenario:
    """What there is before the actors start."""

    name: str
    # or "asked": after a doubt the provider is asked; or "closed": it is asked, and closes the key
    task: str = "bare"
    sent: str = "outbox"  # or "direct": past the outbox, as delay() does
    plan: Sequence[str] = ()  # what the provider's calls will meet
    before: Sequence[str] = ()  # what has happened already, without a switch
    broken: Sequence[str] = ()  # "undo" and "on_failed": the application's own functions that raise


@dataclass
class Violation:
    """A rule that was broken."""

    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}"


@dataclass
class _Kept:
    """What a scenario begins with, to be put back in one statement."""

    put_back: str
    first: Envelope
    ready: deque[Envelope]
    numbers: count[int]
    provider: dict[str, Any]
    bodies: set[tuple[str, int, int]]


@dataclass
class World:
    """Use `opened(...)`."""

    admin: psycopg.Connection[Any]
    broker: Broker = field(default_factory=Broker)
    scenario: Scenario = field(default_factory=lambda: Scenario("fresh"))
    is_accepted: bool = True  # not, when all there is is an eager call: its caller is told
    seen: list[Violation] = field(default_factory=list)  # what was wrong while the actors ran
    elsewhere: dict[Actor | None, str] = field(default_factory=dict)  # by consumer: what else would deliver
    dead: set[str] = field(default_factory=set)  # holders that were killed
    scheduler: Scheduler | None = None  # while actors run
    first: Envelope = field(init=False)
    _processes: list[Runtime] = field(default_factory=list)
    _resets: int = 0
    _kept: dict[Any, _Kept] = field(default_factory=dict)

    @property
    def task(self) -> Any:
        return getattr(application, self.scenario.task)

    @property
    def id(self) -> OperationId:
        return OperationId(TENANT, self.task.name, REFUND)

    # ------------------------------------------------------------ a schedule's beginning

    def reset(self, scenario: Scenario, copies: int = 1, dead_copies: int = 0) -> None:
        """Empty everything, accept one refund, and bring it where the scenario begins."""
        self.scenario, self.broker, self.seen, self.dead = scenario, Broker(), [], set()
        self.elsewhere.clear()
        application.broken = set(scenario.broken)
        self.is_accepted = scenario.sent == "outbox" or copies > 0
        self._resets += 1
        if self._resets % VACUUM_EVERY == 0:
            self.admin.execute(_VACUUM)
        if (kept := self._kept.get((scenario, copies))) is None:
            self._begin(scenario, copies)
            kept = self._kept[scenario, copies] = self._keep()
        self.admin.execute(kept.put_back)
        self.first = kept.first
        self.broker.ready, self.broker._numbers = deque(kept.ready), copy.copy(kept.numbers)
        application.provider.__dict__.update(copy.deepcopy(kept.provider))
        application.bodies.clear()
        application.bodies.update(kept.bodies)
        self.broker.dead.extend([(self.first, "delivery_limit")] * dead_copies)

    def _begin(self, scenario: Scenario, copies: int) -> None:
        application.provider.reset(scenario.plan)
        application.bodies.clear()
        self.admin.execute(_EMPTY)
        self.admin.execute("INSERT INTO payments VALUES (%s, %s, 0, 0)", [PAYMENT, CAPTURED])
        self.admin.execute("INSERT INTO refunds VALUES (%s, %s, %s, 'pending')", [REFUND, PAYMENT, CAPTURED])
        self.first = first = self._accept()
        self.broker.ready.extend([first] * (copies + scenario.before.count("attempt")))
        for step in scenario.before:
            getattr(self, step)()

    def _keep(self) -> _Kept:
        kept = f"kept_{len(self._kept)}"
        self.admin.execute(f"CREATE SCHEMA {kept}")
        self.admin.execute(_KEEP_CLOCK.format(kept))
        put_back = [_EMPTY, _TURN_BACK.format(kept)]
        for table in _TABLES:
            copied = f"{kept}.{table.rpartition('.')[2]}"
            if table != "idempotency.settled" and self.admin.execute(f"SELECT FROM {table}").rowcount:
                self.admin.execute(f"CREATE TABLE {copied} AS TABLE {table}")
                put_back.append(f"INSERT INTO {table} OVERRIDING SYSTEM VALUE TABLE {copied}")
        return _Kept(
            ";".join(put_back),
            self.first,
            deque(self.broker.ready),
            copy.copy(self.broker._numbers),
            copy.deepcopy(application.provider.__dict__),
            set(application.bodies),
        )

    def state(self) -> str:
        """All that what follows depends on, without the names and the times that differ from run to run."""
        row = self.admin.execute(_EVERYTHING).fetchone()
        assert row is not None
        messages = [(e.message.headers, e.message.body) for e in self.broker.ready]
        dead = [(e.message.headers, e.message.body, why) for e, why in self.broker.dead]
        text = "\n".join(map(str, [row.tables, messages, dead]))
        names: dict[str, str] = {}
        named = _IDENTITY.sub(lambda found: names.setdefault(found[0], f"#{len(names)}"), text)
        numbers: dict[tuple[str, str], int] = {}
        for what, number in _NUMBER.findall(named):
            numbers.setdefault((what, number), sum(each[0] == what for each in numbers))
        named = _NUMBER.sub(
            lambda found: (
                found["what"] + ("" if found["what"] == "id" else f"#{numbers[found['what'], found['number']]}")
            ),
            named,
        )
        ages = _TIME.sub(lambda found: _age(found[0], row.now), named)
        gone = sorted(names[each] for holder in self.dead if (each := holder.rpartition("|")[2]) in names)
        return f"{ages}\n{gone}\n{application.provider.__dict__}\n{sorted(application.bodies)}\n{application.broken}"

    def _accept(self) -> Envelope:
        if self.scenario.sent == "outbox":
            with Session(runtime_of(application.app).engine) as session:
                self.task.enqueue(session, REFUND)
                session.commit()
            self.relay()
            return self.broker.ready.popleft()
        headers = {KEY_HEADER: REFUND, TENANT_HEADER: TENANT}
        message = Message.composed(
            application.app, self.task.name, (REFUND,), {}, task_id=str(uuid4()), headers=headers
        )
        return Envelope(message, 0)

    def take_process(self) -> Runtime:
        """A process with its own connections."""
        if not self._processes:
            self._processes.append(_process())
        return self._processes.pop()

    def return_process(self, process: Runtime) -> None:
        self._processes.append(process)

    # ------------------------------------------------------------ what happens in it

    def attempt(self) -> Outcome | None:
        """A worker takes the next message, runs it, and answers it."""
        stop_before("message delivered")
        touched("w:queues")
        if not self.broker.ready:
            note("the queue is empty")
            return None
        envelope = self.broker.ready.popleft()
        note(str(envelope))
        try:
            outcome = self.run(envelope)
            stop_before(f"acknowledge: {outcome.state}")
        except BaseException:
            touched("w:queues")
            self.broker.ready.appendleft(envelope)  # its worker is gone: redelivered
            raise
        self.broker.answer(envelope, outcome)
        return outcome

    def run(self, envelope: Envelope) -> Outcome:
        message = envelope.message
        args, kwargs, _ = json.loads(message.body)
        return Deliveries(application.app).deliver(
            self.task, *args, headers=dict(message.headers), task_id=message.headers["id"], **kwargs
        )

    def relay(self) -> None:
        relay = Relay(application.app)
        relay.publisher = self.broker  # type: ignore[assignment]
        relay.run_once()

    def recover(self) -> None:
        maintenance.recover(application.app)

    def resend(self) -> None:
        def depth(_: object) -> int:
            touched("r:queues")
            return len(self.broker.ready)

        resend_lost(application.app, depth=depth)

    def a_while(self) -> None:
        """So much time passes that no lease holds, and what was to be later is due."""
        self._pass(A_WHILE)

    def a_day(self) -> None:
        """So much time passes that the provider keeps no key any more."""
        self._pass(A_DAY)

    def _pass(self, seconds: float) -> None:
        touched(EVERYTHING)
        if self.scheduler is not None:
            self.scheduler.evict(current())
        self.admin.execute(_PASS, [int(seconds)])

    def bury(self) -> int | None:
        """The dead-letter consumer takes one message."""
        touched("w:queues")
        envelope, why = self.broker.dead.popleft()
        self.elsewhere[current()] = ""
        try:
            message = envelope.message
            letter = storing.store(
                application.app,
                BrokerMessage(
                    body=message.body.encode(),
                    headers=message.headers | {"x-death": [{"queue": application.QUEUE, "reason": why}]},
                    content_type="application/json",
                    content_encoding="utf-8",
                    delivery_info={"exchange": "", "routing_key": application.QUEUE},
                    accept=prepare_accept_content(["json"]),
                    channel=None,
                ),
            )
            if letter is not None and (others := self.elsewhere[current()]):
                note(f"ended an operation that {others} would deliver")
                self.seen.append(Violation("I29", f"a dead copy ended what is to be delivered by {others}"))
            stop_before("acknowledge the dead letter")
        except BaseException:
            touched("w:queues")
            self.broker.dead.appendleft((envelope, why))
            raise
        return letter

    def give_up(self, connection: Any, dead: UndeliveredMessage, **options: Any) -> Any:
        """The library's own, and a look at what else would deliver the operation at the moment that it ends.

        Later is too late to judge by: what is sent again until the end is committed meets an operation that has ended.
        """
        answer = _give_up(connection, dead, **options)
        if isinstance(answer, GivenUp):
            touched("r:outbox", "r:queues")
            pending = self.admin.execute(_PENDING, [dead.message_id]).fetchall()
            others = [f"an outbox row ({row.origin})" for row in pending]
            others += [f"{each} in the queue" for each in self.broker.ready if each.outbox_id != dead.message_id]
            self.elsewhere[current()] = ", ".join(others)
        return answer

    # ------------------------------------------------------------ operators

    def shown(self) -> Shown:
        with runtime_of(application.app).autocommit() as connection:
            return read(connection, self.id, "search")

    def letters(self) -> list[int]:
        touched("r:dead_letters")
        rows = self.admin.execute("SELECT id FROM idempotency.dead_letters WHERE status = 'open' ORDER BY id DESC")
        return [row.id for row in rows]

    def truth(self, effect: dict[str, Any]) -> Happened | DidNotHappen:
        """What a person learns from the provider, which then closes the key."""
        charge = application.provider.close(effect["key"])
        return DidNotHappen() if charge is None else Happened({"id": charge.id})

    def resolve(self, shown: Shown, change: Change, *, end: bool = False) -> None:
        touched("r:records")
        record = self.record()
        effect = {} if record is None else record.effects.get("refund", {})
        if effect.get("state") == "begun" or effect.get("resolved"):
            resolve_effect(application.app, shown, "refund", self.truth(effect), change, end=end)

    def revoke(self) -> None:
        """What a worker's main process does when it has terminated an attempt."""
        message = self.first.message
        args, kwargs, _ = json.loads(message.body)
        delivered = {"exchange": application.QUEUE, "routing_key": application.QUEUE}
        request = {**message.headers, "args": args, "kwargs": kwargs, "headers": dict(message.headers)}
        revoke_terminated(self.task, Context(request, is_eager=False, delivery_info=delivered))

    # ------------------------------------------------------------ a schedule's end

    def record(self) -> Any | None:
        return self.admin.execute("SELECT * FROM idempotency.records").fetchone()

    def trespasses(self, runners: Sequence[Runtime]) -> list[Violation]:
        """What these processes have written to a record that another one held."""
        rows = self.admin.execute(_TRESPASSES, [[process.holder for process in runners]]).fetchall()
        return [Violation("I4", f"a former holder's write made a held record {row.became}") for row in rows]

    def drain(self) -> None:
        """Recover, relay and deliver until nothing moves, or it has gone round often enough."""
        for _ in range(ROUNDS):
            state = self.admin.execute(_STATE).fetchone()
            assert state is not None
            if not (state.open or state.pending or self.broker.ready or self.broker.dead) and state.records:
                return
            self.a_while()
            if state.open:
                self.recover()
            self.relay()
            while self.broker.dead:
                self.bury()
            if not self.broker.ready:
                self.resend()
            for _ in range(len(self.broker.ready)):
                self.attempt()


def _age(time: str, now: datetime) -> str:
    when = datetime.fromtimestamp(float(time), UTC) if "-" not in time else datetime.fromisoformat(time)
    if when.year < now.year - 1:
        return "never"
    age = now - (when if when.tzinfo else when.replace(tzinfo=UTC))
    return f"@{round(age.total_seconds() / SAME_TIME)}"


def _plain(database_url: str) -> str:
    return make_url(database_url).set(drivername="postgresql").render_as_string(hide_password=False)


def _process() -> Runtime:
    """Another process: its own connections, opened before an actor is scheduled."""
    runtime = Runtime(settings_of(application.app))
    runtime.heartbeat._thread = -1  # nothing is renewed on a timer
    runtime.holder = f"search|{uuid4().hex}"
    with mock.patch.object(connections, "opening", runtime.holder):
        for engine in (runtime.engine, runtime._autocommit_engine, runtime._heartbeat_engine):
            with engine.connect() as connection:
                connection.exec_driver_sql("SELECT 1")
    return runtime


class OfActors(dict[Any, Runtime]):
    """The open runtimes: each actor is a separate process."""

    def get(self, app: Any, default: Any = None) -> Any:
        actor = current()
        return super().get(app, default) if actor is None else actor.process


@contextmanager
def opened(database_url: str) -> Iterator[World]:
    """Prepare an empty database and hand out the world. One at a time in a process."""
    with psycopg.connect(_plain(database_url), autocommit=True) as first:
        first.execute(CLOCK)
        path = sql.SQL("ALTER DATABASE {0} SET search_path = virtual, pg_catalog, public")
        first.execute(path.format(sql.Identifier(first.info.dbname)))
    engine = create_engine(database_url)
    schema.migrate(engine)
    with engine.begin() as connection:
        connection.execute(text(USE_CLOCK))
        connection.exec_driver_sql(application.TABLES)
        # each schedule begins with an empty table
        connection.exec_driver_sql("ALTER TABLE idempotency.audit DISABLE TRIGGER USER")
        connection.exec_driver_sql(WITNESS)
    engine.dispose()
    application.configure(database_url)
    with ExitStack() as stack:
        stack.enter_context(stopping())
        stack.enter_context(mock.patch.object(celery_application, "_open", OfActors()))
        stack.enter_context(mock.patch.object(waiting, "time", Sleep()))
        admin = stack.enter_context(psycopg.connect(_plain(database_url), autocommit=True, row_factory=namedtuple_row))
        world = World(admin)

        def is_dead(holder: str) -> bool:
            """The host knows who has died."""
            touched(EVERYTHING)
            return holder in world.dead

        stack.enter_context(mock.patch.object(maintenance, "is_provably_dead", is_dead))
        stack.enter_context(mock.patch.object(undelivered, "give_up", world.give_up))
        crash_points.install(passed)
        stack.callback(crash_points.install, None)
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, before)
        runtime_of(application.app).heartbeat._thread = -1
        try:
            yield world
        finally:
            for runtime in world._processes:
                for engine in (runtime.engine, runtime._autocommit_engine, runtime._heartbeat_engine):
                    engine.dispose()
            close_runtime(application.app)
