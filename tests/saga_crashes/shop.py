"""The shop in this process, in which attempts die, or are overtaken while they live."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import text

from tests.orders.shop import Sent, Shop
from tests.returns.shop import Returns
from tests.sagas.programs import faults
from tests.sagas.programs.faults import STATEMENT, Fault, Killed, Striking
from tests.support.deliveries import Outcome, deliver_row

KILL, TAKEOVER = "kill", "takeover"
# Seconds that a takeover is given while the attempt stands still; after them it waits for a lock, and the attempt goes on.
BESIDE = 0.15
STUCK = 20.0
# Of a claim alone: what the operation waits for is not over.
_EXPIRE = text("""
UPDATE idempotency.records SET locked_until = clock_timestamp() - interval '1 second'
WHERE (tenant, task, key) = (:tenant, :task, :key) AND status = 'started'
""")


class Strike(Striking):
    """Faults at the nth passing of a point in a delivery. `passed` counts what was passed."""

    delivery = ""

    def reach(self, point: str) -> None:
        if point != STATEMENT:
            super().reach(f"{self.delivery} {point}")


class Struck(Shop):
    """A delivery whose process dies comes again at once, when its lease is over."""

    _strike: Strike | None = None
    _beside: threading.Thread | None = None
    _sent: Sent

    @contextmanager
    def struck_by(self, *planned: Fault) -> Iterator[Strike]:
        """What is delivered meanwhile may meet the faults. A task's deliveries are `task:1`, `task:2` …"""
        self._strike, self._number = Strike(list(planned), lambda _: self._take_over()), Counter[str]()
        try:
            yield self._strike
        finally:
            self._strike = None

    def deliver(self, sent: Sent) -> Outcome:
        if self._strike is None:
            return super().deliver(sent)
        self._number[sent.row.task] += 1
        self._sent, self._strike.delivery = sent, f"{sent.row.task}:{self._number[sent.row.task]}"
        faults.use(self._strike)
        try:
            with faults.alive():
                return super().deliver(sent)
        except Killed:
            faults.use(None)
            return self._again(sent)
        finally:
            faults.use(None)
            self._join()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """What is delivered meanwhile is not struck, and not counted."""
        before, self._strike = self._strike, None
        try:
            yield
        finally:
            self._strike = before

    def _again(self, sent: Sent) -> Outcome:
        """The message comes again, when the lease is over."""
        row = sent.row
        with self.books.connect() as connection, connection.begin():
            connection.execute(_EXPIRE, {"tenant": row.tenant, "task": row.task, "key": row.key})
        return deliver_row(self.deliveries, self.app.tasks[row.task], row)

    def _take_over(self) -> bool:
        """The same message comes again, because the attempt's lease is over; the attempt lives, and stands still."""
        self._beside = threading.Thread(target=self._again, args=(self._sent,), daemon=True)
        self._beside.start()
        self._beside.join(BESIDE)
        return True

    def _join(self) -> None:
        if self._beside is not None:
            self._beside.join(STUCK)
            assert not self._beside.is_alive(), "the takeover does not come to an end"
            self._beside = None


class StruckReturns(Struck, Returns):
    """The shop that takes orders back; that they are bought before is not struck."""

    def bought(self, quantity: int = 2, **changes: Any) -> str:
        with self.undisturbed():
            return super().bought(quantity, **changes)


def told_apart(value: Any, *names: str) -> Any:
    """The same with neutral names in the place of those that each run chooses."""
    if isinstance(value, str):
        for number, name in enumerate(names):
            value = value.replace(name, f"<{number}>")
        return value
    if isinstance(value, (list, tuple)):
        return tuple(told_apart(each, *names) for each in value)
    if isinstance(value, Counter):
        return Counter({told_apart(key, *names): number for key, number in value.items()})
    return value


def ends(shop: Struck) -> list[tuple[str, str]]:
    """How each operation has ended that was accepted since `forget`."""
    keys = {(sent.row.task, sent.row.key) for sent in shop.outbox() if not sent.row.task.startswith("witness")}
    with shop.books.connect() as connection:
        query = text("SELECT task, key, status FROM idempotency.records WHERE key = ANY(:keys)")
        rows = connection.execute(query, {"keys": [key for _, key in keys]}).all()
    known = {(row.task, row.key): row.status for row in rows}
    return [(task, known.get((task, key), "never claimed")) for task, key in keys]
