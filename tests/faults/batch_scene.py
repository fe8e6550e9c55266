"""Three operations that a worker claims as one batch: `batched.post_each`, or `batched.post_entry`, which commit together."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from tests.faults.scene import PATIENCE, POINTS, Scene
from tests.support import batched, crashing
from tests.support.processes import Worker, eventually
from tests.support.proxy import Proxy

MANY = 3
TOGETHER = ("B2", "B3", "B4")


class BatchScene(Scene):
    """The first of the three is the one that is held, in a batch that commits each."""

    def worker(self, children: int = 2, **environment: str) -> Worker:
        options = ("--concurrency", str(children))
        self.workers.append(self._processes.worker(*options, app="tests.support.batched", **environment))
        return self.workers[-1]

    @property
    def accounts(self) -> list[str]:
        return [self.account, *(f"{self.account}-{number}" for number in range(1, MANY))]

    def bring_to(self, phase: str, postgres: Proxy | None = None, **environment: str) -> None:
        """Have all three in the queue, then start a worker and hold it in a phase."""
        crashing.plan(self.directory, POINTS[phase], crashing.HOLD)
        self.declare_queues()
        self.relay()
        task = batched.post_entry if phase in TOGETHER else batched.post_each
        with Session(self.engine.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
            for account in self.accounts:
                task.enqueue(session, account)
        eventually(lambda: self.messages() == MANY, timeout=PATIENCE, what="all three are in the queue")
        self.worker(2, **environment)
        self.held(phase)
        assert {row.status for row in self.records()} <= {"started", "completed"}, "all three are claimed"
        # with the time: a crash of Postgres may lose the claim, and the next one draws its fence again
        self._claimed_as = {row.key: (row.fence, row.opened_at) for row in self.records()}
        eventually(lambda: len(self.active()) == MANY, timeout=PATIENCE, what="the worker knows all three")
        if postgres is not None:
            postgres.black_hole("replies")
            self.let_go(phase)
            eventually(self.all_completed, timeout=PATIENCE, what="committed, reply swallowed")

    def records(self) -> list[Row[Any]]:
        """Of all three."""
        return self.rows("SELECT * FROM idempotency.records WHERE key = ANY(:keys) ORDER BY key", keys=self.accounts)

    def all_completed(self) -> bool:
        return [row.status for row in self.records()] == ["completed"] * MANY

    def ended(self) -> None:
        """Wait until all are completed, and each has been delivered again, which only a look at its record answers."""
        eventually(self.all_completed, timeout=PATIENCE, what="all three completed")
        eventually(self.all_came_again, timeout=PATIENCE, what="all three were delivered again")

    def all_came_again(self) -> bool:
        """A batch claims without a hint: who takes one came alone."""
        return {each.key for each in crashing.trace(self.directory) if each.point == "hint.left"} >= set(self.accounts)

    def outcomes(self) -> set[str]:
        """The matrix' letters of the three, from their records and what was sent again."""
        assert self.all_completed(), self.records()
        again = {
            row.key
            for row in self.rows(
                "SELECT key FROM idempotency.outbox WHERE key = ANY(:keys) AND origin IN ('recover', 'resend')",
                keys=self.accounts,
            )
        }
        return {self._letter_of(row) + (",S" if row.key in again else "") for row in self.records()}

    def _letter_of(self, row: Row[Any]) -> str:
        if (row.fence, row.opened_at) == self._claimed_as[row.key]:
            return "U" if self.logged("event=commit_in_doubt") or self.logged("event=batch_not_committed") else "D"
        return "R+" if self.logged_of(row.key, "event=fenced") or self.logged_of(row.key, "event=lease_lost") else "R"

    def logged_of(self, key: str, text: str) -> bool:
        return any(
            text in line and f"key={key} " in line for worker in self.workers for line in worker.log.splitlines()
        )
