"""Runs a program in this process, delivery by delivery, while its faults strike; time passes when the runner says so."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import psycopg
from psycopg.rows import namedtuple_row
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from idempotency import publish
from idempotency.application import close_runtime, runtime_of
from idempotency.attempt.effects import DidNotHappen, Happened
from idempotency.operate.change import Change
from idempotency.operate.resolve import resolve_effect_of_saga
from idempotency.operate.saga import retry_saga
from idempotency.store import sagas, schema
from idempotency.store.answers import error_text
from idempotency.upkeep.maintenance import recover
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from idempotency.worker import waiting
from tests.sagas.programs import application, facts, faults, oracle
from tests.sagas.programs.application import EVENT, SAGA, app, channel_of
from tests.sagas.programs.facts import Facts
from tests.sagas.programs.faults import Fault, Killed, Striking
from tests.sagas.programs.program import Nested, Wait, draw, nodes_of
from tests.search.world import Sleep as NoSleep
from tests.support.deliveries import Deliveries, deliver_row

PERSON = Change("programs", "asked by the program")
# Deliveries and rests, of which a program has a few dozen.
MOST_TURNS = 500
# Seconds that what happens beside an attempt is given; after them it waits for a lock, and the attempt goes on.
BESIDE = 0.15
# Connections of one pass that may have been cut.
CUTS = 4
STUCK = 20.0
# The number of an event that no wait may use.
STALE = 9

_EMPTY = """
WITH a AS (DELETE FROM idempotency.outbox), b AS (DELETE FROM idempotency.dead_letters),
     c AS (DELETE FROM idempotency.saga_events), d AS (DELETE FROM idempotency.sagas), e AS (DELETE FROM entries)
DELETE FROM idempotency.records
"""
_DUE = """
SELECT id FROM idempotency.outbox WHERE status = 'pending' AND available_at <= clock_timestamp()
ORDER BY available_at, id
"""
_SEND = """
UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()
WHERE id = %s AND status = 'pending' RETURNING *
"""
_EXPIRE = "UPDATE idempotency.records SET locked_until = clock_timestamp() - interval '1 s' WHERE status = 'started'"
# What is tried again soon; a saga's own waits are longer than this.
_SOON = """
WITH soon AS (
    UPDATE idempotency.records SET available_at = clock_timestamp()
    WHERE status = 'released' AND available_at < clock_timestamp() + interval '50 s'
)
UPDATE idempotency.outbox SET available_at = clock_timestamp()
WHERE status = 'pending' AND available_at < clock_timestamp() + interval '50 s' RETURNING id
"""
_WAITING = """
SELECT g.id, g.entity_id AS thing, s.name, s.kind, extract(epoch FROM s.due_at - s.begun_at)::float8 AS seconds
FROM idempotency.sagas g JOIN idempotency.saga_steps s
    ON s.saga_id = g.id AND s.generation = g.generation AND s.kind IN ('wait', 'timer') AND s.state = 'begun'
WHERE g.status = 'RUNNING' ORDER BY g.entity_id
"""
# Time passes for one saga alone, so that each wait ends as its program says.
_PASS = """
WITH waits AS (
    UPDATE idempotency.saga_steps SET due_at = due_at - make_interval(secs => %(seconds)s)
    WHERE saga_id = %(saga)s AND state = 'begun'
), of AS (
    SELECT tenant, task, key FROM idempotency.sagas WHERE id = %(saga)s
), record AS (
    UPDATE idempotency.records r SET available_at = r.available_at - make_interval(secs => %(seconds)s)
    FROM of WHERE (r.tenant, r.task, r.key) = (of.tenant, of.task, of.key) AND r.status = 'released'
)
UPDATE idempotency.outbox o SET available_at = o.available_at - make_interval(secs => %(seconds)s)
FROM of WHERE (o.tenant, o.task, o.key) = (of.tenant, of.task, of.key) AND o.status = 'pending'
"""
_STOPPED = (
    "SELECT id, key, entity_id AS thing, stopped FROM idempotency.sagas WHERE stopped IS NOT NULL ORDER BY entity_id"
)
_OPEN_EFFECTS = """
SELECT name, entry ->> 'key' AS key FROM idempotency.saga_steps
WHERE saga_id = %s AND kind = 'effect' AND state = 'begun'
"""
_OPEN_SAGAS = "SELECT task, key, entity_id AS thing FROM idempotency.sagas WHERE status = 'RUNNING' ORDER BY entity_id"
_FORWARD = """
SELECT position, kind, s.name, state FROM idempotency.saga_steps s JOIN idempotency.sagas g ON g.id = s.saga_id
WHERE g.task = %s AND g.key = %s AND kind <> 'undo' ORDER BY position
"""


@dataclass(slots=True)
class Run:
    """What became of a program."""

    seed: int
    program: Nested
    struck: list[Fault]
    facts: Facts
    wrong: list[str]

    @property
    def is_void(self) -> bool:
        return not self.struck


class Stage:
    """One program and its world."""

    def __init__(self, admin: psycopg.Connection[Any], program: Nested, seed: int, planned: list[Fault]) -> None:
        self._admin, self._program = admin, program
        self._random = random.Random(f"order {seed}")
        self._deliveries = Deliveries(app)
        self.script = application.begin(program)
        self.striking = Striking(planned, self._beside)
        self._rows: list[Any] = []  # what was sent, for duplicates
        self._returned: list[Any] = []  # what a broker has back from processes that have died
        self._sent: set[str] = set()  # sagas
        self._late: list[str] = []  # events for the next rest
        self._threads: list[threading.Thread] = []
        self._cancelled: dict[str, list[str]] = {}
        self._seen: list[str] = []
        self._lock = threading.Lock()

    def run(self) -> Facts:
        self._admin.execute(_EMPTY)
        for saga in self.script.sagas.values():
            for node in nodes_of(saga.body):
                if isinstance(node, Wait):  # of an earlier process: it ends no wait
                    self._publish(saga.thing, node, STALE)
        with Session(runtime_of(app).engine) as session:
            application.conduct.enqueue(session, self._program.thing)
            session.commit()
        for _ in range(MOST_TURNS):
            if not (self._deliver() or self._rest()):
                break
        else:
            self._seen.append(f"it does not come to an end in {MOST_TURNS} turns")
        found = facts.read(self._admin, self.script)
        found.cancelled, found.seen = self._cancelled, self._seen
        return found

    # ------------------------------------------------------------ deliveries

    def _deliver(self) -> bool:
        if self._returned and self._random.random() < 0.5:
            self._attempt(self._returned.pop(0))
            return True
        due = [row.id for row in self._admin.execute(_DUE)]
        row = self._send(self._random.choice(due)) if due else None
        if row is None:
            if self._returned:
                self._attempt(self._returned.pop(0))
                return True
            return False
        self._rows.append(row)
        self._attempt(row)
        if self._random.random() < 0.05:  # a broker delivers at least once
            self._attempt(self._random.choice(self._rows))
        return True

    def _send(self, id: int) -> Any:
        """What is due. Before a saga is sent for the first time, the events come that its waits find there."""
        row = self._admin.execute(_SEND, [id]).fetchone()
        if row is not None and row.task == SAGA and row.key not in self._sent:
            self._sent.add(row.key)
            args, kwargs, _ = json.loads(Message.from_text(row.message).body)
            thing = [*args, *kwargs.values()][0]
            for node in nodes_of(self.script.sagas[thing].body):
                if isinstance(node, Wait) and node.comes == "before":
                    self._publish(thing, node, 0)
        return row

    def _attempt(self, row: Any) -> None:
        faults.use(self.striking)
        try:
            with faults.alive():
                deliver_row(self._deliveries, app.tasks[row.task], row)
        except (Killed, SystemExit):
            self._returned.append(row)
        except Exception as error:
            self._seen.append(f"a delivery of {row.task} {row.key} raised {type(error).__name__}: {error}")
        finally:
            faults.use(None)
            self._join()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(STUCK)
            if thread.is_alive():
                self._seen.append(f"{thread.name} is stuck")
        self._threads.clear()

    # ------------------------------------------------------------ what happens beside an attempt

    def _beside(self, action: str) -> bool:
        """Do something in another thread, while the attempt stands still. If it waits for a lock, the attempt goes on."""
        doing: dict[str, Callable[[], object]] = {
            "takeover": self._take_over,
            "copy": self._copy,
            "cancel": self._cancel,
        }
        self._beside_it(action, doing[action])
        return True

    def _beside_it(self, name: str, do: Callable[[], object]) -> None:
        def run() -> None:
            try:
                do()
            except Exception as error:
                self._seen.append(f"{name} raised {type(error).__name__}: {error}")

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        thread.join(BESIDE)

    def _take_over(self) -> None:
        """The lease is over, although the attempt lives; all that is due then runs."""
        with self._lock:
            self._admin.execute(_EXPIRE)
        _recover()
        for _ in range(4):
            with self._lock:
                due = self._admin.execute(_DUE).fetchone()
                row = None if due is None else self._send(due.id)
            if row is None:
                return
            deliver_row(Deliveries(app), app.tasks[row.task], row)

    def _copy(self) -> None:
        row = self._rows[-1]
        deliver_row(Deliveries(app), app.tasks[row.task], row)

    def _cancel(self) -> None:
        """A person cancels the saga, or one that it has called."""
        with self._lock:
            known = self._admin.execute(_OPEN_SAGAS).fetchall()
        chosen = [(row.key, row.thing) for row in known] or [(self._program.thing, self._program.thing)]
        key, thing = chosen[0] if self._random.random() < 0.7 else self._random.choice(chosen)
        with runtime_of(app).engine.begin() as connection:
            done = sagas.cancel(connection, OperationId("default", SAGA, key), error_text("cancelled", "by a person"))
        if done:
            with self._lock:
                rows = self._admin.execute(_FORWARD, [SAGA, key]).fetchall()
            self._cancelled[thing] = facts.names_of(rows)

    # ------------------------------------------------------------ when nothing is due

    def _rest(self) -> bool:
        """Nothing is due: whatever comes next happens. False: nothing is left."""
        if self._admin.execute(_EXPIRE).rowcount:
            _recover()
            return True
        if self._admin.execute(_SOON).rowcount:
            return True
        if self._late:
            thing, _, number = self._late.pop(0).partition(" ")
            self._publish_number(thing, number)
            return True
        if stopped := self._admin.execute(_STOPPED).fetchone():
            return self._ask_a_person(stopped)
        if waiting := self._admin.execute(_WAITING).fetchall():
            self._end_wait(self._random.choice(waiting))
            return True
        return False

    def _end_wait(self, row: Any) -> None:
        if row.kind == "timer":
            self._pass(row)
            return
        node = self.script.waits[row.thing, row.name]
        if node.comes in ("after", "twice"):
            for number in range(1 if node.comes == "after" else 2):
                self._publish(row.thing, node, number)
        elif node.comes == "raced":
            self._race(row, node)
        else:
            if node.comes == "late":
                self._late.append(f"{channel_of(row.thing, node.channel)} {node.thing}/0")
            self._pass(row)

    def _race(self, row: Any, node: Wait) -> None:
        """The event comes when its time is about over: before, just after, or while the saga decides."""
        order = self._random.randrange(3)
        if order == 0:
            self._publish(row.thing, node, 0)
        self._admin.execute(_PASS, {"saga": row.id, "seconds": node.seconds + 1})
        if order == 1:
            self._publish(row.thing, node, 0)
        if order != 2:
            return
        point = self._random.choice(("claimed", "wait.decided", faults.STATEMENT))
        fault = Fault(
            "event", point, self.striking.passed[point] + self._random.randint(1, 8 if point == faults.STATEMENT else 1)
        )
        before, published = self.striking._beside, []

        def beside(action: str) -> bool:
            if action != "event":
                return before(action)
            published.append(action)
            self._beside_it("an event", lambda: self._publish(row.thing, node, 0))
            return True

        self.striking.left.append(fault)
        self.striking._beside = beside
        while self._deliver() and not published:
            pass
        self.striking._beside = before
        if fault in self.striking.left:
            self.striking.left.remove(fault)
        if not published:
            self._publish(row.thing, node, 0)

    def _pass(self, row: Any) -> None:
        """Time passes for one saga: almost as much as it waits for first, by which nothing may end."""
        self._admin.execute(_PASS, {"saga": row.id, "seconds": max(row.seconds - 30, 0)})
        while self._deliver():
            pass
        left = [each.thing for each in self._admin.execute(_WAITING)]
        if row.thing not in left and row.thing not in self._cancelled:
            self._seen.append(f"{row.thing}: its wait for {row.seconds} s was over too early")
        self._admin.execute(_PASS, {"saga": row.id, "seconds": 31})

    def _publish(self, thing: str, node: Wait, number: int) -> None:
        self._publish_number(channel_of(thing, node.channel), f"{node.thing}/{number}")

    def _publish_number(self, channel: str, number: str) -> None:
        with Session(runtime_of(app).engine) as session:
            publish(session, EVENT, {"channel": channel, "number": number}, app=app)
            session.commit()

    def _ask_a_person(self, stopped: Any) -> bool:
        """What has stopped is seen to: an undo that is broken, or an effect of unknown outcome."""
        id = OperationId("default", SAGA, stopped.key)
        if stopped.stopped == "compensation_failed":
            self.script.mended |= set(self.script.things)
            retry_saga(app, id, PERSON)
            return True
        if stopped.stopped == "effect_unknown":
            for row in self._admin.execute(_OPEN_EFFECTS, [stopped.id]).fetchall():
                acted = next((thing for thing, key in self.script.provider.acts if key == row.key), None)
                outcome = DidNotHappen() if acted is None else Happened(f"charged {acted}")
                resolve_effect_of_saga(app, id, row.name, outcome, PERSON)
            return True
        self._seen.append(f"{stopped.thing} has stopped: {stopped.stopped}")
        return False


def run(admin: psycopg.Connection[Any], seed: int) -> Run:
    """Carry out the program of a seed, and compare."""
    program = draw(seed)
    stage = Stage(admin, program, seed, faults.draw(seed))
    found = stage.run()
    return Run(seed, program, stage.striking.struck, found, oracle.compare(program, found))


@contextmanager
def opened(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """Prepare an empty database for programs. One at a time in a process."""
    engine = create_engine(database_url)
    schema.migrate(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(application.TABLES)
    engine.dispose()
    application.configure(database_url)
    plain = make_url(database_url).set(drivername="postgresql").render_as_string(hide_password=False)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            faults.possible(),
            mock.patch.object(waiting, "time", NoSleep()),
            psycopg.connect(plain, autocommit=True, row_factory=namedtuple_row) as admin,
        ):
            runtime_of(app).heartbeat._thread = -1  # nothing is renewed on a timer
            try:
                yield admin
            finally:
                close_runtime(app)
    finally:
        logging.disable(before)


def _recover() -> None:
    """As a relay does: a connection that was cut meanwhile costs a pass, and the next one may meet another."""
    for _ in range(CUTS):
        with suppress(OperationalError):
            recover(app)
            return
    recover(app)
