"""Operators: they release, cancel, revoke, replay, resolve and discard at random, and give some commands twice.

They use the library's functions, over the same bad connection to Postgres as all processes. Before an effect is resolved
the provider is asked, so the answer given is true.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
from amqp.exceptions import AMQPError
from celery import Celery
from kombu.exceptions import OperationalError as BrokerError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from idempotency.application import runtime_of
from idempotency.attempt.effects import DidNotHappen, Happened
from idempotency.errors import IdempotencyError, OperationNotFound
from idempotency.operate import discard
from idempotency.operate.cancel import cancel
from idempotency.operate.change import Change, Shown, read
from idempotency.operate.people import Person
from idempotency.operate.release import release
from idempotency.operate.replay import replay
from idempotency.operate.resolve import resolve_effect
from idempotency.store.statements import describe
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from tests.chaos import provider
from tests.chaos.evidence import EDGE
from tests.chaos.monitor import is_of_the_storm

# A command every so many seconds.
PAUSE = 0.25
# Of the commands: given a second time, exactly as before.
REPEATED = 0.3
# How often each is drawn. Discarding ends what could go on, so it is rare.
WEIGHTS = {"release": 3, "cancel": 3, "revoke": 4, "replay": 4, "resolve": 8, "discard": 1}
ANN, BOB = Person("ann", "operator"), Person("bob", "admin")

_STARTED = "SELECT tenant, task, key FROM idempotency.records WHERE status = 'started' LIMIT 50"
# What has ended at the edge is left alone: its client has its answer, and would not ask for what a replay goes on with.
_CANCELLABLE = """
SELECT tenant, task, key FROM idempotency.records WHERE status = 'released'
UNION ALL
SELECT o.tenant, o.task, o.key FROM idempotency.outbox o
WHERE o.settled_at IS NULL AND o.origin = 'enqueue' AND NOT EXISTS (
    SELECT FROM idempotency.records r WHERE (r.tenant, r.task, r.key) = (o.tenant, o.task, o.key))
LIMIT 50
"""
_ACCEPTED = """
SELECT tenant, task, key, message FROM idempotency.outbox
WHERE settled_at IS NULL AND origin = 'enqueue' ORDER BY id DESC LIMIT 50
"""
_OPEN = "SELECT id FROM idempotency.dead_letters WHERE status = 'open' AND task IS DISTINCT FROM 'http' ORDER BY id LIMIT 200"
_UNKNOWN = """
SELECT r.tenant, r.task, r.key, e.name, e.effect ->> 'key' AS gateway_key
FROM idempotency.records r, jsonb_each(r.effects) AS e(name, effect)
WHERE r.status = 'failed' AND r.task <> 'http' AND e.effect ->> 'state' = 'begun' LIMIT 50
"""


class People:
    """A thread that gives commands; `done` counts those that changed something, `refused` the others by their kind."""

    def __init__(self, app: Celery, *, seed: int, url: str) -> None:
        self._app = app
        self._url = url
        self._chance = random.Random(f"people {seed}")
        self._stop = threading.Event()
        self._tickets = 0
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.surprises: list[str] = []
        # what Celery was told to revoke, whether or not a worker has heard of it
        self.revoked: set[OperationId] = set()
        self._thread = threading.Thread(target=self._work, name="people", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)

    def _work(self) -> None:
        commands: dict[str, Callable[[], None]] = {
            "release": self._release,
            "cancel": self._cancel,
            "revoke": self._revoke,
            "replay": self._replay,
            "resolve": self._resolve,
            "discard": self._discard,
        }
        while not self._stop.wait(PAUSE):
            name = self._chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            try:
                commands[name]()
            except (httpx.HTTPError, AMQPError, BrokerError, OSError):
                self.refused["no answer"] += 1
            except OperationNotFound:
                self.refused[name] += 1  # purged since it was chosen
            except Exception as error:
                if is_of_the_storm(error):
                    self.refused["no answer"] += 1
                else:  # a finding: a command either changes or refuses
                    self.surprises.append(f"{name}: {describe(error)}")

    # ------------------------------------------------------------ commands

    def _release(self) -> None:
        id = self._one(_STARTED)
        if id is not None:
            shown = self._shown(id)
            self._give("release", lambda change: release(self._app, shown, change))

    def _cancel(self) -> None:
        id = self._one(_CANCELLABLE)
        if id is not None:
            shown = self._shown(id)
            anyway, without_task = self._chance.random() < 0.5, id.task == EDGE

            def end(change: Change) -> None:
                cancel(self._app, shown, change, may_have_happened=anyway, without_task=without_task)

            self._give("cancel", end)

    def _revoke(self) -> None:
        found = self._one(_ACCEPTED, lambda row: row)
        if found is not None:
            self.revoked.add(OperationId(found.tenant, found.task, found.key))
            id = Message.from_text(found.message).headers["id"]
            self._app.control.revoke(id, terminate=self._chance.random() < 0.5)
            self.done["revoke"] += 1

    def _replay(self) -> None:
        letter = self._one(_OPEN, lambda row: row.id)
        if letter is not None:
            self._give("replay", lambda change: replay(self._app, letter, change))

    def _resolve(self) -> None:
        found = self._one(_UNKNOWN, lambda row: row)
        if found is None:
            return
        answer = provider.ask(self._url, found.gateway_key)
        if answer is None:
            return
        outcome = Happened(answer["receipt"]) if answer["acted"] else DidNotHappen()
        shown = self._shown(OperationId(found.tenant, found.task, found.key))
        # whichever was given less often, so that a short run has seen both
        ended, gone_on = self.done["resolve and end"], self.done["resolve"]
        end = self._chance.random() < 0.5 if ended == gone_on else ended < gone_on
        self._give(
            "resolve and end" if end else "resolve",
            lambda change: resolve_effect(self._app, shown, found.name, outcome, change, end=end),
        )

    def _discard(self) -> None:
        letter = self._one(_OPEN, lambda row: row.id)
        if letter is None:
            return

        def ask_and_approve(change: Change) -> None:
            with runtime_of(self._app).engine.begin() as connection:
                discard.request(connection, ANN, letter, change.reason)
            with runtime_of(self._app).engine.begin() as connection:
                discard.approve(connection, BOB, letter, app=self._app)

        self._give("discard", ask_and_approve)

    # ------------------------------------------------------------ how

    def _give(self, name: str, command: Callable[[Change], Any]) -> None:
        """Give a command, sometimes twice: the second time it changes nothing."""
        self._tickets += 1
        # without it a repeated command is refused by what it was shown
        request = f"request {self._tickets}" if self._chance.random() < 0.5 else None
        change = Change("ann", f"ticket {self._tickets}", request)
        repeat = self._chance.random() < REPEATED
        for _ in range(2):
            try:
                command(change)
                self.done[name] += 1
            except IdempotencyError:
                self.refused[name] += 1
            except (DBAPIError, PoolTimeout):
                self.refused["in doubt"] += 1
                repeat = True  # perhaps it took place: an operator would try again
            if not repeat:
                break

    def _one(self, query: str, read: Callable[[Any], Any] = lambda row: OperationId(*row)) -> Any:
        with runtime_of(self._app).autocommit() as connection:
            rows = connection.exec_driver_sql(query).all()
        return read(self._chance.choice(rows)) if rows else None

    def _shown(self, id: OperationId) -> Shown:
        with runtime_of(self._app).autocommit() as connection:
            return read(connection, id, "chaos")
