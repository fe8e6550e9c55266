"""Two who act on one saga at once, in every order: each is a process of its own, stopped before each statement and commit.

One leads, as far as one of its stops; the other begins there, and goes on until it has ended or waits for a lock of the
leader; then the leader goes on. So it is done with each of the two as the leader, and for each of its stops: both commits of
every race come first and second, and each is between any two statements of the other. The scheduler is that of `tests.search`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import psycopg
from sqlalchemy import text
from sqlalchemy.engine import make_url

import idempotency.application as celery_application
from idempotency.application import close_runtime, settings_of
from idempotency.attempt.runtime import Runtime
from idempotency.errors import ChangeRefused, ReplayRefused
from idempotency.store import saga_steps
from idempotency.upkeep import maintenance
from tests.controls.safeguards import NothingToRemove
from tests.sagas.conftest import Stage
from tests.search.connections import stopping
from tests.search.scheduler import Actor, Event, Scheduler, current, stop_before
from tests.search.world import OfActors
from tests.support.deliveries import deliver_row

Act = Callable[[], object]
# Brings a saga of a new key to where the race begins, and says what each of the two does then.
Begin = Callable[[str], tuple[Act, Act]]
# Days enough for every wait of these sagas.
ROUNDS = 12
# Steps after which one that takes over holds the saga and has read it.
HELD = 4
REFUSED = (ChangeRefused, ReplayRefused)

_AGE = """
UPDATE idempotency.records SET locked_until = 'epoch' WHERE status = 'started' AND (tenant, task, key) IN (
    SELECT tenant, task, key FROM idempotency.records WHERE key = %s FOR UPDATE SKIP LOCKED)
"""
# A wait that has not ended although the saga may use an event that has come.
_OVERSLEPT = text("""
SELECT s.name FROM idempotency.saga_steps s JOIN idempotency.sagas g ON g.id = s.saga_id AND g.status = 'RUNNING'
JOIN idempotency.records r ON (r.tenant, r.task, r.key) = (g.tenant, g.task, g.key)
WHERE g.key = :key AND s.state = 'begun' AND s.kind = 'wait' AND r.available_at > clock_timestamp() AND EXISTS (
    SELECT FROM idempotency.saga_events e
    WHERE (e.tenant, e.event_type, e.match) = (s.tenant, s.event_type, s.match)
      AND NOT EXISTS (SELECT FROM idempotency.saga_steps u WHERE u.saga_id = g.id AND u.event_id = e.id))
""")
_RECORDED = text("""
SELECT s.kind, s.name, s.state, s.event_id, s.begun_at > a.at AS is_after_cancel
FROM idempotency.saga_steps s JOIN idempotency.sagas g ON g.id = s.saga_id AND g.generation = s.generation
LEFT JOIN idempotency.audit a ON (a.tenant, a.task, a.key, a.action) = (g.tenant, g.task, g.key, 'saga_cancel')
WHERE g.key = :key ORDER BY s.position
""")
_END = text("""
SELECT g.status, r.status AS record, coalesce(r.result, r.error_code) AS what, (
        SELECT count(*) FROM idempotency.dead_letters d
        WHERE (d.tenant, d.task, d.key) = (r.tenant, r.task, r.key) AND d.status = 'open') AS letters, (
        SELECT count(*) FROM idempotency.outbox o WHERE o.status = 'pending' AND strpos(o.key, r.key) > 0) AS pending, (
        SELECT count(*) FROM idempotency.audit a
        WHERE (a.tenant, a.task, a.key, a.action) = (r.tenant, r.task, r.key, 'saga_cancel')) AS cancels
FROM idempotency.sagas g JOIN idempotency.records r USING (tenant, task, key) WHERE g.key = :key
""")
_ENTRIES = text("SELECT account FROM entries WHERE account LIKE '%:' || :key || ':%' ORDER BY id")
# Who writes to a saga whose record somebody else holds; as in the search, of the two who act.
_WITNESS = """
CREATE TABLE trespasses (what text);
CREATE FUNCTION witness() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    writer text := current_setting('application_name');
BEGIN
    IF writer LIKE 'racing|%' AND EXISTS (
        SELECT FROM idempotency.records r JOIN idempotency.sagas g USING (tenant, task, key)
        WHERE g.id = CASE TG_TABLE_NAME WHEN 'sagas' THEN to_jsonb(NEW) ->> 'id' ELSE to_jsonb(NEW) ->> 'saga_id' END::uuid
          AND r.status = 'started' AND r.locked_by <> writer)
    THEN
        INSERT INTO trespasses VALUES (concat_ws(' ', TG_TABLE_NAME, to_jsonb(NEW) ->> 'name', to_jsonb(NEW) ->> 'status'));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER witness AFTER INSERT OR UPDATE ON idempotency.saga_steps FOR EACH ROW EXECUTE FUNCTION witness();
-- to find a saga is no write
CREATE TRIGGER witness AFTER UPDATE ON idempotency.sagas FOR EACH ROW
WHEN ((OLD.status, OLD.waits_for, OLD.stopped) IS DISTINCT FROM (NEW.status, NEW.waits_for, NEW.stopped))
EXECUTE FUNCTION witness();
CREATE FUNCTION witness_of_records() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO trespasses VALUES ('records ' || NEW.status);
    RETURN NULL;
END $$;
CREATE TRIGGER witness AFTER UPDATE ON idempotency.records FOR EACH ROW
WHEN (OLD.status = 'started' AND NEW.fence = OLD.fence AND current_setting('application_name') LIKE 'racing|%'
      AND OLD.locked_by <> current_setting('application_name') AND NEW.status <> OLD.status)
EXECUTE FUNCTION witness_of_records();
"""
_TAKE = text("""
UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()
WHERE id = (SELECT min(id) FROM idempotency.outbox
            WHERE status = 'pending' AND available_at <= clock_timestamp() AND task = :task AND strpos(key, :key) > 0)
RETURNING *
""")


@dataclass
class Played:
    """One order, and how it went."""

    key: str
    order: str
    # of each: what it returned, or that it was refused
    answers: list[str] = field(default_factory=lambda: ["", ""])
    broken: list[str] = field(default_factory=list)
    slept: bool = False  # time had to pass before the saga ended
    trace: list[Event] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"{self.order}: {self.answers}", *map(str, self.trace)])


class Ring:
    """Where two meet. Use `ring(...)`."""

    def __init__(self, stage: Stage, admin: psycopg.Connection[Any]) -> None:
        self.stage, self._admin = stage, admin
        self._processes = [self._process(f"racing|{n}") for n in range(2)]
        self._numbers = itertools.count(1)
        self._scheduler: Scheduler | None = None
        self._charged: set[str] = set()
        self._is_watched = False

    def _process(self, holder: str) -> Runtime:
        runtime = Runtime(settings_of(self.stage.app))
        runtime.heartbeat._thread, runtime.holder = -1, holder  # nothing is renewed on a timer
        return runtime

    def close(self) -> None:
        for process in self._processes:
            for engine in process._engines:
                engine.dispose()

    # ------------------------------------------------------------ what the two may do

    def delivery(self, task: Any, key: str) -> Act:
        """A worker gets the message of a saga, or of what it has called, that is due."""
        with self.stage.engine.connect() as connection:
            row = connection.execute(_TAKE, {"task": task.name, "key": key}).one()
        return lambda: deliver_row(self.stage._deliveries, task, row).state

    def takeover(self, delivery: Act, key: str) -> Act:
        """Its lease is over, and another worker gets the message again."""

        def take_over() -> object:
            stop_before("the lease is over")
            assert self._scheduler is not None
            self._scheduler.evict(current())  # as the server does, in half a lease
            self._admin.execute(_AGE, [key])
            return delivery()

        return take_over

    def charge(self, thing: str, *, idempotency_key: str) -> str:
        """A provider that acts once for a key."""
        if idempotency_key not in self._charged:
            self._charged.add(idempotency_key)
            self._admin.execute("INSERT INTO entries (account, amount) VALUES (%s, 1)", [f"make:{thing}"])
        return idempotency_key

    def edit(self, function: str, old: str, new: str) -> None:
        """Replace a piece of text in a function of the database, for the rest of the test."""
        row = self._admin.execute("SELECT pg_get_functiondef(%s::regproc)", [f"idempotency.{function}"]).fetchone()
        assert row is not None
        if old not in row[0]:
            raise NothingToRemove(f"{function} has no {old!r}")
        self._admin.execute(row[0].replace(old, new))

    def watch(self) -> None:
        """From now on it is `broken` if one of the two writes to the saga while the other one holds it."""
        self._admin.execute(_WITNESS)
        self._is_watched = True

    # ------------------------------------------------------------ every order

    def orders(self, begin: Begin) -> Iterator[Played]:
        """Every order of the two; a deadlock or an unexpected error is `broken`."""
        for leader in (0, 1):
            for stops in itertools.count(leader):  # all of the one and then all of the other are played already
                played, has_ended = self._play(begin, leader, stops)
                if has_ended and leader == 1:
                    break
                yield played
                if has_ended:
                    break

    def takeovers(self, begin: Begin) -> Iterator[Played]:
        """The second one takes over at each stop of the first, who goes on when that has ended, and when it has just begun."""
        for stops in itertools.count(1):
            for reach in (None, HELD):
                played, has_ended = self._play(begin, 0, stops, reach)
                if has_ended:
                    return
                yield played

    def _play(self, begin: Begin, leader: int, stops: int, reach: int | None = None) -> tuple[Played, bool]:
        """`reach`: how many steps the other has before the leader goes on; None: all.

        Whether the leader has ended before the other began is returned, too.
        """
        key = f"r{next(self._numbers)}"
        acts = begin(key)
        played = Played(key, f"{stops} of {'ab'[leader]}, then {'ab'[1 - leader]}")
        actors = [
            Actor("ab"[n], partial(_note, played, n, act), process)
            for n, (act, process) in enumerate(zip(acts, self._processes, strict=True))
        ]
        self._scheduler = scheduler = Scheduler(self._admin, actors)
        try:
            for _ in range(stops):
                if not actors[leader].ended:
                    scheduler.step(leader)
            has_ended = actors[leader].ended
            first = 1 - leader
            while not all(actor.ended for actor in actors):
                if enabled := scheduler.enabled():
                    scheduler.step(first if first in enabled else 1 - first)
                    if reach is not None and sum(event.actor == "ab"[1 - leader] for event in scheduler.trace) >= reach:
                        first = leader
                else:
                    played.broken.append("a deadlock")
                    scheduler.wait_for_deadlock()
        finally:
            for n, actor in enumerate(actors):
                if not actor.ended:
                    scheduler.kill(n)
        played.broken += [f"{type(actor.error).__name__}: {actor.error}" for actor in actors if actor.error is not None]
        if self._is_watched:
            found = self._admin.execute("DELETE FROM trespasses RETURNING what").fetchall()
            played.broken += [f"written by a former holder: {what}" for (what,) in found]
        played.trace = scheduler.trace
        return played, has_ended

    # ------------------------------------------------------------ what came of it

    def rest(self, played: Played) -> list[str]:
        """Deliver, and let time pass, until the saga has ended. What is wrong then, or was before time passed."""
        key = played.key
        self.stage.run()
        wrong = [f"sleeps although an event has come: {name}" for (name,) in self._rows(_OVERSLEPT, key)]
        for _ in range(ROUNDS):
            if self.stage.saga(key).status in ("COMPLETED", "FAILED"):
                return wrong + self._books(key)
            played.slept = True
            self._admin.execute(_AGE, [key])
            maintenance.recover(self.stage.app)
            self.stage.run()
            self.stage.pass_time(86400.0)
            self.stage.run()
        return [*wrong, "never ends"]

    def end(self, key: str) -> Any:
        """How the saga and its operation are, with its result or its error's code as `what`."""
        return self._rows(_END, key)[0]

    def entries(self, key: str) -> list[str]:
        """What was written under this key, in order: `make:…`, `void:…` and whatever else."""
        return [account for (account,) in self._rows(_ENTRIES, key)]

    def _books(self, key: str) -> list[str]:
        """What contradicts what in the rows of a saga that has ended."""
        end, wrong = self.end(key), []
        if (end.status, end.record) not in (("COMPLETED", "completed"), ("FAILED", "failed")):
            wrong.append(f"the saga is {end.status}, its operation {end.record}")
        if end.letters != (end.status == "FAILED"):
            wrong.append(f"{end.status} with {end.letters} open letters")
        if end.pending:
            wrong.append(f"{end.pending} messages are left")
        if end.cancels and end.what != "cancelled":
            wrong.append(f"a cancel was accepted, and it has ended as {end.what}")
        there: list[str] = []
        for verb, thing in (entry.split(":", 1) for entry in self.entries(key)):
            if (verb == "make") is (thing in there):
                wrong.append(f"{verb} {thing} when there was {', '.join(there) or 'nothing'}")
            elif verb == "void" and there[-1] != thing:
                wrong.append(f"undone out of order: {thing} before {there[-1]}")
            there = [*there, thing] if verb == "make" else [each for each in there if each != thing]
        rows = self._rows(_RECORDED, key)
        made = sum(row.state == "done" and row.kind in ("step", "effect", "call") for row in rows)
        if len(there) != (made if end.status == "COMPLETED" else 0):
            wrong.append(f"{end.status}, {made} recorded as done, and there is {', '.join(there) or 'nothing'}")
        if open_ := [row.name for row in rows if row.state == "begun" and row.kind != "wait"]:
            wrong.append(f"never decided: {', '.join(open_)}")
        if late := [row.name for row in rows if row.is_after_cancel and row.kind != "undo"]:
            wrong.append(f"recorded after it was cancelled: {', '.join(late)}")
        used = [row.event_id for row in rows if row.event_id is not None]
        if len(used) > len(set(used)):
            wrong.append(f"an event has ended several waits: {used}")
        return wrong

    def _rows(self, query: Any, key: str) -> Any:
        with self.stage.engine.connect() as connection:
            return connection.execute(query, {"key": key}).all()


def _note(played: Played, n: int, act: Act) -> None:
    try:
        played.answers[n] = str(act())
    except REFUSED as error:
        played.answers[n] = f"refused: {error}"


@contextmanager
def ring(stage: Stage, database: str) -> Iterator[Ring]:
    """Prepare processes that stop; one at a time."""
    address = make_url(database).set(drivername="postgresql").render_as_string(hide_password=False)
    with ExitStack() as stack:
        close_runtime(stage.app)
        stack.enter_context(stopping())
        stack.enter_context(mock.patch.object(celery_application, "_open", OfActors()))
        # who waits for the other, however slow this machine is, does not give up
        patiently = saga_steps._PATIENCE.replace("'500ms'", "'0'")
        assert patiently != saga_steps._PATIENCE
        stack.enter_context(mock.patch.object(saga_steps, "_PATIENCE", patiently))
        admin = stack.enter_context(psycopg.connect(address, autocommit=True))
        made = Ring(stage, admin)
        stack.callback(close_runtime, stage.app)
        stack.callback(made.close)
        yield made
