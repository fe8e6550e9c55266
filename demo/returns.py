"""Some buyers send back what they ordered, and the carrier, the warehouse and a person do what the rules say of each return.

Importing this module reads the environment (celeryconfig), so set the servers' addresses first.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager

import httpx
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from demo.input import Line
from demo.order_rules import VERDICTS, Rules, return_of
from demo.processes import ProcessError
from idempotency import publish
from tasks import app
from tasks.returns import INSPECTION_DONE, PICKED_UP, process_return, submit_return
from tasks.shipping import confirm_pickup
from tasks.warehouse import record_inspection

# Seconds between two looks at the orders and returns.
PAUSE = 0.3
ENDED = ("REFUNDED", "REJECTED", "ABORTED", "CANCELLED", "ESCALATED")
_IDEMPOTENCY = "from idempotency.cli import main; main()"
_ENDED = text("SELECT id, status FROM orders WHERE id = ANY(:ids) AND status IN ('PROCESSING', 'CANCELLED')")
# The status of each return, and the event that its saga waits for.
_RETURNS = text("""
SELECT r.id, r.status, (
    SELECT s.event_type FROM idempotency.sagas g JOIN idempotency.saga_steps s ON s.saga_id = g.id
    WHERE (g.task, g.key, g.status) = (:saga, r.id, 'RUNNING') AND s.generation = g.generation
      AND (s.kind, s.state) = ('wait', 'begun')
)
FROM returns r WHERE r.id = ANY(:ids)
""")
_LABEL = text("SELECT id FROM labels WHERE return_id = :id AND kind = 'return'")
_LOCKED = text("SELECT id FROM idempotency.sagas WHERE (task, key) = (:saga, :key) FOR UPDATE")
# What a saga waits for in vain: its deadline, and the delivery that was written for it, are now.
_TIME_IS_OVER = text("""
WITH waits AS (
    UPDATE idempotency.saga_steps SET due_at = clock_timestamp()
    WHERE saga_id = :id AND (kind, state) = ('wait', 'begun')
), records AS (
    UPDATE idempotency.records
    SET available_at = clock_timestamp(), opened_at = least(opened_at, clock_timestamp())
    WHERE (task, key, status) = (:saga, :key, 'released')
)
UPDATE idempotency.outbox SET available_at = clock_timestamp()
WHERE (task, key, status) = (:saga, :key, 'pending')
""")


class Returns:
    """Submits returns, and says what happens to them once the application has come so far.

    `transaction`: one of the application's role; `people`: the engine of an operator.
    """

    def __init__(
        self,
        transaction: Callable[[], AbstractContextManager[Session]],
        people: Engine,
        carrier_url: str,
        *,
        copies: int,
        rules: Rules,
        threads: Executor,
    ) -> None:
        self._transaction = transaction
        self._people = people
        self._carrier = httpx.Client(base_url=carrier_url, timeout=10)
        self._copies = copies
        self._rules = rules
        self._threads = threads
        self._ordered: dict[str, str] = {}
        self._scripts: dict[str, list[Step]] = {}
        self._commands: list[subprocess.Popen[str]] = []
        self._next_look = 0.0
        self.done: Counter[str] = Counter()

    def ordered(self, line: Line, order_id: str) -> None:
        """Note an order: whether it is sent back if it is not cancelled."""
        branch = self._rules.branch(line, order_id)
        if branch is not None:
            self._ordered[order_id] = branch

    def go_on(self) -> int:
        """Do what is due; returns how many orders and returns there is still something to do for."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + PAUSE
            self._submit()
            self._play()
            self._reap()
        return len(self._ordered) + len(self._scripts) + len(self._commands)

    def close(self) -> None:
        """Kill the commands that still run, and close the carrier's connections."""
        for command in self._commands:
            command.kill()
            command.communicate()
        self._carrier.close()

    # ------------------------------------------------------------ the buyer

    def _submit(self) -> None:
        with self._people.connect() as connection:
            ended = connection.execute(_ENDED, {"ids": list(self._ordered)}).all()
        for order_id, status in ended:
            if status == "PROCESSING":
                branch = self._ordered[order_id]
                if branch == "reship refused":
                    self._refuse_label(return_of(order_id), kind="reship")
                requests = [(order_id, branch)] * self._copies
                if not all([*self._threads.map(self._request, *zip(*requests, strict=True))]):
                    continue  # the same again at the next look
                self._scripts[return_of(order_id)] = list(SCRIPTS[branch])
                self.done["returned"] += 1
            del self._ordered[order_id]

    def _request(self, order_id: str, branch: str) -> bool:
        try:
            with self._transaction() as session:
                submit_return(
                    session,
                    return_id=return_of(order_id),
                    order_id=order_id,
                    reason=f"demo: {branch}",
                    reship=branch.startswith("reship"),
                )
        except DBAPIError:
            return False  # mostly another request for it did not commit soon enough
        return True

    # ------------------------------------------------------------ carrier, warehouse, and people

    def _play(self) -> None:
        with self._people.connect() as connection:
            about = {"ids": list(self._scripts), "saga": process_return.name}
            seen = {id: (status, awaited) for id, status, awaited in connection.execute(_RETURNS, about)}
        for id, found in seen.items():
            script = self._scripts[id]
            while script and (script[0].when is None or script[0].when in found):
                script[0].act(self, id)
                del script[0]
            if not script or found[0] in ENDED:  # of one that a person has cancelled, nothing more is to come
                del self._scripts[id]

    def collect(self, id: str) -> None:
        """The driver takes the parcel. The carrier has not told us yet."""
        with self._people.connect() as connection:
            label = connection.execute(_LABEL, {"id": id}).scalar_one()
        self._carrier.post(f"/v1/labels/{label}/collect").raise_for_status()

    def pick_up(self, id: str) -> None:
        """The driver takes the parcel, and the carrier tells us; several times, and again as another event."""
        self.collect(id)
        with self._transaction() as session:
            for _ in range(self._copies):
                confirm_pickup(session, return_id=id)
        with self._transaction() as session:
            for _ in range(self._copies - 1):
                publish(session, PICKED_UP, {"return_id": id}, app=app)

    def inspect(self, id: str, verdict: str) -> None:
        """The warehouse opens the parcel, and says so several times."""
        with self._transaction() as session:
            for _ in range(self._copies):
                record_inspection(session, return_id=id, verdict=verdict)

    def cancel(self, id: str) -> None:
        """A person cancels the saga, by the command line; it moves money, so the token of this process's environment says who."""
        arguments = ["saga", "cancel", id, "-A", "tasks", "--reason", "the buyer keeps it"]
        address = self._people.url.render_as_string(hide_password=False)
        command = [sys.executable, "-c", _IDEMPOTENCY, *arguments]
        environment = os.environ | {"DATABASE_URL": address}
        self._commands.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        self.done["cancelled by a person"] += 1

    def let_time_pass(self, id: str) -> None:
        """The parcel is never collected: the saga's deadline is moved to now, in its rows."""
        about = {"saga": process_return.name, "key": id}
        with self._people.begin() as connection:
            saga = connection.execute(_LOCKED, about).scalar_one()
            connection.execute(_TIME_IS_OVER, {**about, "id": saga})
        self.done["waited in vain"] += 1

    def _refuse_label(self, id: str, *, kind: str) -> None:
        plan = {"next": ["label_refused"], "only": {"reference": id, "kind": kind}}
        self._carrier.post("/_sandbox/faults", json=plan).raise_for_status()

    def _reap(self) -> None:
        for command in [each for each in self._commands if each.poll() is not None]:
            _, errors = command.communicate()
            if command.returncode != 0:
                raise ProcessError(f"saga cancel ended with {command.returncode}: {errors.strip()[-500:]}")
            self._commands.remove(command)


class Step:
    """What happens to a return, `when` its row has this status or its saga waits for this event; None: at once."""

    def __init__(self, when: str | None, what: str, *arguments: str) -> None:
        self.when = when
        self._what = what
        self._arguments = arguments

    def act(self, returns: Returns, id: str) -> None:
        """Let it happen."""
        getattr(returns, self._what)(id, *self._arguments)


_PICKED_UP = Step("LABELLED", "pick_up")
# By the branches of tasks/branches.py. Some verdicts come before the saga waits for them.
SCRIPTS: dict[str, Sequence[Step]] = {
    "label refused": (),
    "cancelled": (Step(PICKED_UP, "cancel"),),
    "no pick-up": (Step(PICKED_UP, "let_time_pass"),),
    "late parcel": (Step(PICKED_UP, "collect"), Step(None, "let_time_pass")),
    "cancelled late": (_PICKED_UP, Step(INSPECTION_DONE, "cancel")),
    "no inspection": (_PICKED_UP, Step(INSPECTION_DONE, "let_time_pass")),
    "late inspection": (
        _PICKED_UP,
        Step(INSPECTION_DONE, "let_time_pass"),
        Step("ESCALATED", "inspect", VERDICTS["late inspection"]),
    ),
    "approved": (_PICKED_UP, Step(None, "inspect", VERDICTS["approved"])),
    "damaged": (_PICKED_UP, Step(INSPECTION_DONE, "inspect", VERDICTS["damaged"])),
    "rejected": (_PICKED_UP, Step(None, "inspect", VERDICTS["rejected"])),
    "reshipped": (_PICKED_UP, Step(INSPECTION_DONE, "inspect", VERDICTS["reshipped"])),
    "reship refused": (_PICKED_UP, Step(None, "inspect", VERDICTS["reship refused"])),
}
