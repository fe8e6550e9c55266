"""A scheduler that runs one actor at a time, from one visible action to the next.

An actor is a thread that runs the library's own code. It stops before each statement, commit, call to the provider,
publish and acknowledgement, and goes on when it is resumed. A crash point is not a stop by itself: nothing can be seen
from outside between it and the next action, so that stopping or dying there is the same as doing so at that action.
The crash points that were passed are kept in the trace.

An actor that waits for a row lock in Postgres is seen in pg_locks and counts as blocked until the lock is granted. If
its process dies meanwhile, its session goes on waiting, as Postgres has it: the statement is carried out when the lock
is granted, and only then does the session find that it has been left alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

# A statement takes well under a millisecond, and on a busy machine a dozen; only one that takes longer is looked up
# among the waiting locks.
PATIENCE = 0.02
# What everything depends on: a footprint that is not known.
EVERYTHING = "*"
# A step that takes longer than this is a defect of the search, not a slow machine.
STUCK = 30.0

_local = threading.local()


class Killed(BaseException):
    """The actor's process has died: its thread unwinds, and no statement of it reaches the server any more."""


class Stuck(Exception):
    """An actor neither came to its next action nor waits for a lock."""


@dataclass
class Event:
    """What one actor did in one step."""

    actor: str
    action: str
    outcome: str = ""
    passed: list[str] = field(default_factory=list)  # crash points behind it
    footprint: set[str] = field(default_factory=set)  # see `footprints`

    def __str__(self) -> str:
        text = f"{self.actor:<12} {self.action}"
        if self.outcome:
            text += f" -> {self.outcome}"
        return text + (f"   ({', '.join(self.passed)})" if self.passed else "")


class Actor:
    """One process's thread of control. `process` is whatever the world wants to find through `current()`."""

    def __init__(self, name: str, run: Callable[[], object], process: Any = None) -> None:
        self.name = name
        self.process = process
        self.next_action = ""
        self.ended = False
        self.blocked = False
        self.killed_at: str | None = None
        self.error: BaseException | None = None
        self.connections: dict[int, Any] = {}  # in use, by backend pid
        self.has_begun = False
        self.doing: Event | None = None
        self.pid: int | None = None  # the backend that the next action is sent to, if it is
        self.loses_answer = False  # of the action under way
        self._doomed = False
        self._run = run
        self._baton = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    @property
    def doomed(self) -> bool:
        return self._doomed

    # ------------------------------------------------------------ in the actor's own thread

    def _main(self) -> None:
        _local.actor = self
        try:
            self._run()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self._arrived.release()

    def stop_before(self, action: str, pid: int | None) -> None:
        if self._doomed:
            raise Killed
        self.next_action, self.pid = action, pid
        self._arrived.release()
        self._baton.acquire()
        if self._doomed:
            raise Killed

    # ------------------------------------------------------------ in the scheduler's thread

    def start(self) -> None:
        """Run up to the first action."""
        self._thread.start()
        self.wait(STUCK)

    def resume(self) -> None:
        self._baton.release()

    def wait(self, seconds: float) -> bool:
        """Whether the actor has come to its next action, or its end, within this time."""
        return self._arrived.acquire(timeout=seconds)

    def doom(self) -> None:
        self.killed_at, self._doomed = self.next_action, True


def current() -> Actor | None:
    """The actor of this thread; None in any other thread."""
    return getattr(_local, "actor", None)


def stop_before(action: str, pid: int | None = None) -> None:
    """Stop the actor of this thread until it is its turn; nothing in any other thread."""
    if (actor := current()) is not None:
        actor.stop_before(action, pid)


def note(outcome: str) -> None:
    """Say in the trace what came of the action under way."""
    if (actor := current()) is not None and actor.doing is not None and not actor.doomed:
        actor.doing.outcome = f"{actor.doing.outcome}, {outcome}" if actor.doing.outcome else outcome


def touched(*footprint: str) -> None:
    """Say what the action under way has to do with what others do."""
    if (actor := current()) is not None and actor.doing is not None and not actor.doomed:
        actor.doing.footprint.update(footprint)


def passed(crash_point: str) -> None:
    """Keep a crash point in the trace. For `crash_points.install`."""
    if (actor := current()) is not None and actor.doing is not None and not actor.doomed:
        actor.doing.passed.append(crash_point)


class Scheduler:
    """Steps and kills actors, and keeps the trace."""

    def __init__(self, admin: psycopg.Connection[Any], actors: Sequence[Actor]) -> None:
        self._admin = admin
        self.actors = actors
        self.trace: list[Event] = []
        self._left: set[int] = set()  # backends that wait for a lock, and whose process has died
        for actor in actors:
            actor.start()

    def enabled(self) -> list[int]:
        """Who could act now."""
        return [n for n, actor in enumerate(self.actors) if not actor.ended and not actor.blocked]

    def blocked(self) -> list[int]:
        """Who waits for a lock."""
        return [n for n, actor in enumerate(self.actors) if actor.blocked]

    def step(self, n: int) -> None:
        """Let an actor do its next action and run up to the one after it, or until it waits for a lock."""
        actor = self.actors[n]
        actor.doing, actor.has_begun = Event(actor.name, actor.next_action), True
        self.trace.append(actor.doing)
        actor.resume()
        self._await(actor)
        self._unblock()

    def kill(self, n: int) -> None:
        """End an actor's process: the server ends its transactions, and none of its code goes on."""
        actor = self.actors[n]
        when = "while it waits for a lock" if actor.blocked else "before"
        self.trace.append(Event(actor.name, f"KILLED {when}: {actor.next_action}", footprint={EVERYTHING}))
        actor.doom()
        for pid, connection in list(actor.connections.items()):
            if actor.blocked and pid == actor.pid:
                connection.leave()
                self._left.add(pid)
            else:
                connection.die()
        actor.blocked = False
        actor.resume()
        while not actor.ended:  # a wait that timed out had come to its next action
            if not actor.wait(STUCK):
                raise Stuck(f"{actor.name} goes on after it was killed")
        self._unblock()

    def evict(self, but: Actor | None) -> None:
        """End the sessions that the server ends when time passes: idle in a finishing transaction for half a lease."""
        for actor in self.actors:
            for pid, connection in list(actor.connections.items()):
                if actor is not but and not actor.ended and connection.is_finishing:
                    self._admin.execute("SELECT pg_terminate_backend(%s)", [pid])
                    self._await_end(pid)

    def wait_for_deadlock(self) -> None:
        """All actors wait for each other: the server resolves the deadlock."""
        deadline = time.monotonic() + STUCK
        while not self.enabled() and any(actor.blocked for actor in self.actors):
            if time.monotonic() > deadline:
                raise Stuck("a deadlock that the server does not see")
            time.sleep(PATIENCE)
            self._unblock()

    def _await(self, actor: Actor) -> None:
        deadline = time.monotonic() + STUCK
        while not actor.wait(PATIENCE):
            if self._is_waiting(actor.pid):
                actor.blocked = True
                if actor.doing is not None:
                    actor.doing.outcome = "waits for a lock"
                return
            if time.monotonic() > deadline:
                raise Stuck(f"{actor.name}: {actor.next_action}")

    def _await_end(self, pid: int) -> None:
        while self._admin.execute("SELECT FROM pg_stat_activity WHERE pid = %s", [pid]).rowcount:
            time.sleep(0.001)

    def _quiesce(self) -> None:
        """Let the sessions go on that were left alone and have been granted their lock: each ends after its statement."""
        for pid in list(self._left):
            if not self._is_waiting(pid):
                self._await_end(pid)
                self._left.remove(pid)

    def _unblock(self) -> None:
        """Let those go on whose lock was granted, until no actor is left whom another one's end lets go on."""
        waiting = None
        while waiting != (waiting := (len(self.blocked()), len(self._left))) and any(waiting):
            self._quiesce()
            for actor in self.actors:
                if not actor.blocked:
                    continue
                if actor.wait(0):
                    actor.blocked = False
                elif not self._is_waiting(actor.pid):
                    actor.blocked = False
                    self._await(actor)

    def _is_waiting(self, pid: int | None) -> bool:
        query = "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = %s AND NOT granted)"
        row = self._admin.execute(query, [pid]).fetchone()
        return bool(row and row[0])
