"""One saga on its way through real servers: `bank.journey`, a step, a call outside, three tasks and an event; then it
fails and is undone, if it is told to.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from sqlalchemy.orm import Session

from idempotency import publish
from idempotency.relay.resend import resend_lost
from idempotency.upkeep import maintenance
from tests.faults.scene import PATIENCE, POINTS, Scene
from tests.support import bank, crashing
from tests.support.processes import eventually

PARTS = ("open", "one", "two", "three")


class SagaScene(Scene):
    """The saga waits for nothing but what it calls, unless its event comes later."""

    fails = False
    # whether the event is there from the beginning
    is_confirmed = True
    # how much the sweeps have sent again; the next wait of the saga deletes the rows
    sent_again = 0

    def accept(self) -> None:
        with Session(self.engine.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
            bank.journey.enqueue(session, self.account, self.outside.url, fails=self.fails)
            if self.is_confirmed:
                self._publish(session)

    def confirm(self) -> None:
        """Publish the event that the saga waits for."""
        with Session(self.engine.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
            self._publish(session)

    def _publish(self, session: Session) -> None:
        publish(session, "bank.confirmed", {"account": self.account, "n": 1}, app=self.app)

    def bring_to(self, phase: str, postgres: Any = None) -> None:
        self.fails = phase == "S3"
        super().bring_to(phase, postgres)

    def duplicate(self) -> None:
        bank.journey.delay(self.account, self.outside.url, fails=self.fails)

    def sweep(self, up_to: int | None = None) -> None:
        self.age(up_to=up_to)
        self.sent_again += maintenance.recover(self.app) + resend_lost(self.app).resent

    def ended(self) -> None:
        """Wait until all has ended."""
        eventually(self._is_over, timeout=PATIENCE, what="the end of the saga and of all that it has called")

    def swept_to_the_end(self, fence: int) -> None:
        """The same, while the sweep sends again what is lost, and takes what was claimed up to a fence."""
        eventually(lambda: (self.sweep(up_to=fence), self._is_over())[1], timeout=PATIENCE, what="the end of the saga")

    def last_fence(self) -> int:
        """Of all operations: what is claimed later is not affected by a fault that comes now."""
        return int(self.rows("SELECT max(fence) FROM idempotency.records")[0].max)

    def _is_over(self) -> bool:
        return self.state() in ("COMPLETED", "FAILED") and not self.rows(
            """SELECT 1 FROM idempotency.records WHERE status NOT IN ('completed', 'failed')
               UNION ALL SELECT 1 FROM idempotency.outbox WHERE status = 'pending' AND settled_at IS NULL"""
        )

    def state(self) -> str:
        rows = self.rows("SELECT status FROM idempotency.saga_instances WHERE key = :key")
        return str(rows[0].status) if rows else "not begun"

    # ------------------------------------------------------------ what is left behind

    def violations(self, state: str) -> list[str]:
        """What the saga's end does not allow in the books that nothing keeps from having a thing twice."""
        done = [f"{self.account}/{part}" for part in PARTS]
        written = Counter(row.account for row in self.rows("SELECT account FROM entries"))
        # undone: what it had done, each once; what it had not come to is neither done nor undone
        undone = Counter(f"{name}/undone" for name in done if written[name])
        backs = Counter({name: number for name, number in written.items() if name.endswith("/back")})
        charges = {key: number for key, number in self.outside.acts.items() if number != 1}
        found = []
        if state == "COMPLETED" and written != Counter(done):
            found.append(f"I3: completed, with {dict(written)}")
        if state == "FAILED" and written - backs != Counter(name for name in done if written[name]) + undone:
            found.append(f"I1: undone, with {dict(written)}")
        if state == "FAILED" and backs.total() != len(self.outside.acts) - backs.total():
            found.append(f"I12: {backs.total()} of {len(self.outside.acts)} calls outside given back")
        if charges:
            found.append(f"I12: the provider acted more than once: {charges}")
        if left := self.rows("SELECT kind, name FROM idempotency.saga_steps WHERE state = 'begun'"):
            found.append(f"I3: {state}, and begun: {left}")
        letters = self.rows("SELECT task FROM idempotency.dead_letters WHERE status = 'open'")
        if [row.task for row in letters] != ["bank.journey"] * (state == "FAILED"):
            found.append(f"I13: {state}, with {len(letters)} open dead letters")
        return found

    def outcome_at(self, phase: str, state: str) -> str:
        """The matrix' letter, read from what was reached after the moment of the fault."""
        found = self.violations(state)
        assert (self.state(), found) == (state, []), (self.state(), found)
        trace = [each for each in crashing.trace(self.directory) if each.key == self.account]
        at = next(number for number, each in enumerate(trace) if each.point == POINTS[phase])
        after = [each.point for each in trace[at + 1 :]]
        letter = self._after_its_commit(after) if phase == "S1" else self._before_its_commit(after, POINTS[phase])
        if self.sent_again:
            return "S" if letter == "–" else f"{letter},S"
        return letter

    def _after_its_commit(self, after: list[str]) -> str:
        """D: a delivery found that nothing was to be done; the saga has gone on by those that it was owed."""
        if after.count("hint.left") > after.count("claimed"):
            return "D"
        return "W" if self.logged("event=claim_waits") else "–"

    def _before_its_commit(self, after: list[str], point: str) -> str:
        if self.logged("event=commit_in_doubt"):
            return "R" if point in after else "U"
        if next(each for each in after if each != "hint.left") not in ("claimed", "released"):
            return "W" if self.logged("event=claim_waits") else "–"
        return "R+" if self.logged("event=fenced") or self.logged("event=lease_lost") else "R"
